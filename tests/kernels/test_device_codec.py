"""`_native.DeviceCodec`, which the measurements on a device time: on the fake device, against the
codecs of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradferry import _native
from reference.message import Header
from world import World

Worlds = Callable[[int], World]

NUM_ELEMENTS = 2 * _native.TILE_ELEMENTS + 1000
RANKS = 3
SCATTER, GATHER = 1, 2  # phases of the wire format
HASHES = {"config_hash": 0, "layout_hash": 0}


def make(codec: str, dtype: torch.dtype, **more: Any) -> _native.DeviceCodec:
    import fake_device
    from gradferry.core.device import load_kernels

    load_kernels(fake_device.DEVICE.type)
    return _native.DeviceCodec(
        codec=codec, dtype=dtype, num_elements=NUM_ELEMENTS, device=fake_device.DEVICE, **more
    )


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    import fake_device

    return tensor.to(fake_device.DEVICE)


def gaussian(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_ELEMENTS, generator=generator).to(dtype)


def on_cpu(codec: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The payload, and what it is decoded to."""
    message = _native.encode_tensor(gradient, codec, seed=0, step=0, **HASHES)
    decoded = torch.empty_like(gradient)
    _native.decode_tensor(message, codec, decoded, **HASHES)
    return message[_native.HEADER_BYTES :], decoded


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8))


def launches_of(call: Callable[[], None]) -> int:
    import fake_device

    machine = fake_device.machine
    machine.synchronize()
    before = machine.counters()["launches"]
    call()
    machine.synchronize()
    return machine.counters()["launches"] - before


def header_of(message: torch.Tensor) -> Header:
    return Header.unpack(message.cpu().numpy().tobytes())


def case_exchange(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """An exchange between ranks, each with numbers of its own; every result is checked here."""
    import fake_device

    codec = make(name, dtype, world_size=RANKS)
    gradients = [gaussian(rank, dtype) for rank in range(RANKS)]
    launches, decoded = [], []
    for rank, gradient in enumerate(gradients):
        there, worker = on_device(gradient), on_device(torch.zeros(NUM_ELEMENTS))
        launches.append(launches_of(lambda: codec.encode(there, worker)))  # noqa: B023
        payload, sent = on_cpu(name, gradient)
        assert_same(codec.sent[_native.HEADER_BYTES :], payload)
        assert codec.worker_bytes == payload.numel()
        if dtype == torch.float32:
            assert torch.equal(worker.cpu(), gradient - sent)
        decoded.append(sent)
        codec.receive(rank)
        size = codec.sent.numel()
        received = codec.received[rank * size : (rank + 1) * size]
        assert_same(received[_native.HEADER_BYTES :], payload)
        header = header_of(received)
        assert (header.phase, header.source_rank) == (SCATTER, rank)

    owner = on_device(torch.zeros(NUM_ELEMENTS))
    launches.append(launches_of(lambda: codec.reduce(owner, RANKS)))
    header = header_of(codec.reduced)
    assert (header.phase, header.source_rank) == (GATHER, 0)
    assert header.payload_bytes == codec.owner_bytes

    arrived = on_device(torch.empty(NUM_ELEMENTS, dtype=dtype))
    launches.append(launches_of(lambda: codec.decode(arrived, None)))
    mean = _native.compressed_mean(
        gradients, name, seed=0, worker_residual=False, owner_residual=True
    )
    assert_same(arrived, mean)
    if dtype == torch.float32:
        total = decoded[0] + decoded[1] + decoded[2]
        assert torch.equal(owner.cpu(), total * torch.tensor(1 / RANKS) - mean)
    # Without a momentum a residual stays as it is.
    kept = on_device(gaussian(9))
    arrived.zero_()
    launches.append(launches_of(lambda: codec.decode(arrived, kept)))
    assert_same(arrived, mean)
    assert_same(kept, gaussian(9))

    codec.expect_no_findings()
    return {"launches": launches, "races": fake_device.machine.races()}


# What codecs compute on a device is what tests/kernels/cuda asks.
@pytest.mark.parametrize("codec", ["exact", "q4", "topk:ratio=0.25", "rht"])
def test_results_are_those_of_the_cpu_in_one_launch_each(device_worlds: Worlds, codec: str) -> None:
    dtypes = {"exact": [torch.bfloat16, torch.float64], "q4": [torch.float32, torch.bfloat16]}
    for dtype in dtypes.get(codec, [torch.float32]):
        (answer,) = device_worlds(1).run(case_exchange, name=codec, dtype=dtype)
        assert answer == {"launches": [1] * (RANKS + 3), "races": []}


def case_momentum() -> None:
    gradient = gaussian(0)
    for name in ("exact", "q8"):
        codec = make(name, torch.float32, momentum=True)
        there, residual = on_device(gradient), on_device(torch.zeros(NUM_ELEMENTS))
        codec.encode(there, residual)
        codec.receive(0)
        codec.reduce(None, 1)
        codec.decode(there, residual)
        codec.expect_no_findings()
        # Half of the gradient is sent; of what arrives the residual keeps a half.
        _, sent = on_cpu(name, 0.5 * gradient)
        (again,) = (on_cpu(name, sent)[1],)
        assert torch.equal(there.cpu(), again)
        assert torch.equal(residual.cpu(), (0.5 * gradient - sent) + 0.5 * again)


def test_with_a_momentum_the_residual_keeps_it(device_worlds: Worlds) -> None:
    device_worlds(1).run(case_momentum)


def case_refused() -> list[str]:
    from outcomes import attempt

    said = []

    def after(damage: Callable[[_native.DeviceCodec], None], first: float = 1.0) -> None:
        codec = make("q4", torch.float32, world_size=2)
        gradient = gaussian(0)
        gradient[0] = first
        there = on_device(gradient)
        codec.encode(there, None)
        codec.receive(0)
        codec.receive(1)
        damage(codec)
        codec.reduce(None, 2)
        codec.decode(there, None)
        outcome = attempt(codec.expect_no_findings)
        said.append(f"{outcome.error}: {outcome.text}")

    def flip(codec: _native.DeviceCodec) -> None:
        last = codec.received[-1:]
        last.copy_(on_device(last.cpu() ^ 1))

    after(lambda codec: None)
    after(flip)
    after(lambda codec: None, first=float("inf"))
    return said


def test_refused_messages_are_an_error(device_worlds: Worlds) -> None:
    (said,) = device_worlds(1).run(case_refused)
    good, damaged, infinite = said
    assert good == "None: "
    where = r"ProtocolError: rank 0 refused a message from rank 1 (step 0, chunk 0, scatter): "
    assert damaged.startswith(where + "checksum is")
    assert infinite.startswith("ConfigError: tile 0 was decoded to a number that is not finite")


def case_bad_arguments() -> None:
    from outcomes import attempt

    codec = make("q4", torch.float32, world_size=2)
    good = on_device(gaussian(0))
    calls: list[Callable[[], object]] = [
        lambda: make("q4", torch.float32, world_size=0),
        lambda: make("exact", torch.float32, world_size=1 << 20),
        lambda: codec.receive(2),
        lambda: codec.reduce(None, 0),
        lambda: codec.reduce(None, 3),
        lambda: codec.encode(good[1:], None),
        lambda: codec.encode(good.to(torch.float16), None),
        lambda: codec.encode(good, gaussian(0)),
        lambda: codec.decode(good, good.to(torch.float64)),
    ]
    assert {attempt(call).error for call in calls} == {"ConfigError"}


def test_bad_arguments_are_refused(device_worlds: Worlds) -> None:
    device_worlds(1).run(case_bad_arguments)
