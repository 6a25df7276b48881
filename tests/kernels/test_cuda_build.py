"""Where kernels come from, and what is said where they do not run."""

from __future__ import annotations

import datetime
import importlib
import importlib.util

import pytest
import torch
from gradferry import ConfigError, StateError, _native
from gradferry.core import device
from gradferry.core.device import explaining_refusal


def test_a_gpu_that_does_not_run_the_kernels_is_named_with_what_they_are_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "an old one")
    refusal = StateError("CUDA refused cudaGetLastError(): no kernel image is available")
    with pytest.raises(ConfigError) as error, explaining_refusal(torch.device("cuda", 3)):
        raise refusal
    for part in (str(refusal), "cuda:3 is an old one", "6.1", "CUDAARCHS=61", "driver"):
        assert part in str(error.value)
    with pytest.raises(StateError), explaining_refusal(torch.device("cpu")):
        raise refusal


def test_a_build_without_cuda_kernels_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="no CUDA kernels; install gradferry again where nvcc"):
        device.LIBRARIES["cuda"]()


def test_kernels_that_cannot_be_loaded_are_named_with_the_reason(monkeypatch):
    def fail(name: str) -> None:
        raise ImportError("undefined symbol: cudaLaunchKernel")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigError) as error:
        device.LIBRARIES["cuda"]()
    assert "cannot be loaded: undefined symbol: cudaLaunchKernel" in str(error.value)
    assert "cmake.define.GRADFERRY_CUDA=ON" in str(error.value)


def test_a_device_without_kernels_is_refused_by_name():
    with pytest.raises(ConfigError, match="no codecs for gradients on 'meta'; move the model to"):
        device.load_kernels("meta")


def test_only_a_device_library_is_taken():
    with pytest.raises(ConfigError, match="not a device library: a capsule named 'datetime"):
        _native.use_device_library(datetime.datetime_CAPI)
