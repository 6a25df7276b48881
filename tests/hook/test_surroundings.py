"""What is said of settings that keep the streams of a hook from overlapping."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from gradferry.core.device import Transport
from gradferry.reduction import advice
from gradferry.reduction.advice import Surroundings, warn_about_surroundings


@pytest.mark.parametrize(
    ("environment", "high_priority", "parts"),
    [
        ({}, True, None),
        ({}, None, None),  # a backend without priorities
        ({"TORCH_NCCL_HIGH_PRIORITY": "1"}, False, None),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}, True, None),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, True, ("BLOCKING_WAIT has the host wait", "unset it")),
        ({"NCCL_BLOCKING_WAIT": "True"}, True, ("BLOCKING_WAIT has the host wait", "unset it")),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, True, ("into one queue", "unset it")),
        ({}, False, ("normal priority", "TORCH_NCCL_HIGH_PRIORITY=1", "is_high_priority_stream")),
    ],
)
def test_every_setting_is_named_with_what_to_do(environment, high_priority, parts):
    advice = Surroundings(environment, high_priority, translated=None).advice()
    if parts is None:
        assert advice == []
        return
    (sentence,) = advice
    for part in parts:
        assert part in sentence


def test_kernels_that_the_driver_must_translate_are_announced():
    (sentence,) = Surroundings({}, True, "cuda:0, of compute capability 12.0").advice()
    assert "no machine code for cuda:0, of compute capability 12.0" in sentence
    assert "CUDAARCHS=native" in sentence


def transport(kind: str, *, exchanges: bool = True, streams: bool = True) -> Transport:
    return Transport(torch.device(kind), exchanges=exchanges, streams=streams)


def group_with(options: object) -> SimpleNamespace:
    return SimpleNamespace(_get_backend=lambda place: SimpleNamespace(options=options))


def test_the_priority_is_that_of_the_groups_backend(monkeypatch):
    monkeypatch.setattr(advice, "this_build", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (9, 0))
    place = torch.device("cuda", 0)
    for high in (True, False):
        options = SimpleNamespace(is_high_priority_stream=high)
        assert Surroundings.of(place, group_with(options)).high_priority is high
    assert Surroundings.of(place, group_with(SimpleNamespace())).high_priority is None


def test_only_hooks_that_exchange_on_streams_of_a_gpu_are_told(monkeypatch):
    loud = Surroundings({"TORCH_NCCL_BLOCKING_WAIT": "1"}, high_priority=False, translated=None)
    monkeypatch.setattr(Surroundings, "of", classmethod(lambda cls, place, group: loud))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_surroundings(transport("cpu", streams=False), group_with(None))
        warn_about_surroundings(transport("cuda", streams=False), group_with(None))
        warn_about_surroundings(transport("cuda", exchanges=False), group_with(None))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_about_surroundings(transport("cuda"), group_with(None))
    assert len(told) == 2
    assert told[0].filename == __file__
