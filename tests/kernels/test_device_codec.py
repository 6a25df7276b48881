"""`_native.DeviceCodec`, which the measurements on a device time: on the fake device, against the
codecs of the CPU. What codecs compute on a device is what tests/kernels/cuda asks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gradferry
import pytest
import torch
from gradferry import _native
from on_ranks import on_ranks

NUM_ELEMENTS = 2 * _native.TILE_ELEMENTS + 1000
RANKS = 3
HASHES = {"config_hash": 0, "layout_hash": 0}
DEVICE = pytest.mark.parametrize("device", ["streamed"])


def make(codec: str, dtype: torch.dtype = torch.float32, **more: Any) -> _native.DeviceCodec:
    import fake_device
    from gradferry.core.device import load_kernels

    load_kernels(fake_device.DEVICE.type)
    return _native.DeviceCodec(
        codec=codec, dtype=dtype, num_elements=NUM_ELEMENTS, device=fake_device.DEVICE, **more
    )


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    import fake_device

    return tensor.to(fake_device.DEVICE)


def zeros() -> torch.Tensor:
    return on_device(torch.zeros(NUM_ELEMENTS))


def gaussian(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_ELEMENTS, generator=generator).to(dtype)


def on_cpu(codec: str, gradient: torch.Tensor) -> torch.Tensor:
    """What its message is decoded to."""
    message = _native.encode_tensor(gradient, codec, seed=0, step=0, **HASHES)
    decoded = torch.empty_like(gradient)
    _native.decode_tensor(message, codec, decoded, **HASHES)
    return decoded


def launches_of(call: Callable[[], None]) -> int:
    import fake_device

    machine = fake_device.machine
    machine.synchronize()
    before = machine.counters()["launches"]
    call()
    machine.synchronize()
    return machine.counters()["launches"] - before


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        ("exact", torch.float64),
        ("q4", torch.bfloat16),
        ("topk:ratio=0.25", torch.float32),
        ("rht", torch.float32),
    ],
)
@DEVICE
@on_ranks(1)
def test_results_are_those_of_the_cpu_in_one_launch_each(
    device: str, codec: str, dtype: torch.dtype
) -> None:
    """An exchange between ranks, each with numbers of its own."""
    import fake_device

    used = make(codec, dtype, world_size=RANKS)
    gradients = [gaussian(rank, dtype) for rank in range(RANKS)]
    sent = [on_cpu(codec, gradient) for gradient in gradients]
    for rank, gradient in enumerate(gradients):
        there, worker = on_device(gradient), zeros()
        assert launches_of(lambda: used.encode(there, worker)) == 1  # noqa: B023
        assert used.sent.numel() == _native.HEADER_BYTES + used.worker_bytes
        if dtype == torch.float32:
            assert torch.equal(worker.cpu(), gradient - sent[rank])
        used.receive(rank)
    owner, arrived = zeros(), on_device(torch.empty(NUM_ELEMENTS, dtype=dtype))
    assert launches_of(lambda: used.reduce(owner, RANKS)) == 1
    assert used.reduced.numel() == _native.HEADER_BYTES + used.owner_bytes
    assert launches_of(lambda: used.decode(arrived, None)) == 1
    mean = _native.compressed_mean(
        gradients, codec, seed=0, worker_residual=False, owner_residual=True
    )
    assert torch.equal(arrived.cpu().view(torch.uint8), mean.view(torch.uint8))
    if dtype == torch.float32:
        total = sent[0] + sent[1] + sent[2]
        assert torch.equal(owner.cpu(), total * torch.tensor(1 / RANKS) - mean)
    used.expect_no_findings()
    assert fake_device.machine.races() == []


WRONG = {
    "payload": r"ProtocolError: rank 0 \w+ a message from rank 1 \(step 0, chunk 0, scatter\): ",
    "number": "ConfigError: tile 0 was decoded to a number that is not finite",
}


@pytest.mark.parametrize("wrong", WRONG)
@DEVICE
@on_ranks(1)
def test_rejected_messages_are_an_error(device: str, wrong: str) -> None:
    from outcomes import attempt

    codec, gradient = make("q4", world_size=2), gaussian(0)
    if wrong == "number":
        gradient[0] = torch.inf
    there = on_device(gradient)
    codec.encode(there, None)
    for rank in range(2):
        codec.receive(rank)
    if wrong == "payload":
        last = codec.received[-1:]
        last.copy_(on_device(last.cpu() ^ 1))
    codec.reduce(None, 2)
    codec.decode(there, None)
    outcome = attempt(codec.expect_no_findings)
    assert re.match(WRONG[wrong], f"{outcome.error}: {outcome.text}")


@DEVICE
@on_ranks(1)
def test_bad_arguments_are_refused(device: str) -> None:
    codec = make("q4", world_size=2)
    good = on_device(gaussian(0))
    for call in (
        lambda: make("q4", world_size=0),
        lambda: make("exact", world_size=1 << 20),
        lambda: codec.receive(2),
        lambda: codec.reduce(None, 0),
        lambda: codec.reduce(None, 3),
        lambda: codec.encode(good[1:], None),
        lambda: codec.encode(good.to(torch.float16), None),
        lambda: codec.encode(good, gaussian(0)),
        lambda: codec.decode(good, good.to(torch.float64)),
    ):
        with pytest.raises(gradferry.ConfigError):
            call()
