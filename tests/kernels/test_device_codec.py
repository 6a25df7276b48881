"""`_native.DeviceCodec`, which the measurements on a device time: on the fake device, against the
codecs of the CPU. What codecs compute on a device is what tests/kernels/cuda asks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gradferry import _native
from on_ranks import on_ranks

NUM_ELEMENTS = 2 * _native.TILE_ELEMENTS + 1000
RANKS = 3


def on_cpu(codec: str, gradient: torch.Tensor) -> torch.Tensor:
    """What its message is decoded to."""
    hashes = {"config_hash": 0, "layout_hash": 0}
    message = _native.encode_tensor(gradient, codec, seed=0, step=0, **hashes)
    decoded = torch.empty_like(gradient)
    _native.decode_tensor(message, codec, decoded, **hashes)
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
@pytest.mark.parametrize("device", ["streamed"])
@on_ranks(1)
def test_results_are_those_of_the_cpu_in_one_launch_each(
    device: str, codec: str, dtype: torch.dtype
) -> None:
    """An exchange between ranks, each with numbers of its own."""
    import fake_device
    from gradferry.core.device import load_kernels

    place = fake_device.DEVICE
    load_kernels(place.type)
    used = _native.DeviceCodec(
        codec=codec, dtype=dtype, num_elements=NUM_ELEMENTS, device=place, world_size=RANKS
    )
    torch.manual_seed(1)
    gradients = [torch.randn(NUM_ELEMENTS).to(dtype) for _ in range(RANKS)]
    sent = [on_cpu(codec, gradient) for gradient in gradients]
    for rank, gradient in enumerate(gradients):
        there, worker = gradient.to(place), torch.zeros(NUM_ELEMENTS).to(place)
        assert launches_of(lambda: used.encode(there, worker)) == 1  # noqa: B023
        assert used.sent.numel() == _native.HEADER_BYTES + used.worker_bytes
        if dtype == torch.float32:
            assert torch.equal(worker.cpu(), gradient - sent[rank])
        used.receive(rank)
    owner = torch.zeros(NUM_ELEMENTS).to(place)
    arrived = torch.empty(NUM_ELEMENTS, dtype=dtype).to(place)
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
