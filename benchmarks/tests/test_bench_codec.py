"""`gradferry bench codec` on the fake device, by a clock of the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gradferry import _native
from gradferry_lab.bench.codec import DeviceOptions
from world import World

NUM_BYTES = 5 << 13  # of a gradient: some tiles, the last one ragged
SIZE_MB = NUM_BYTES / 2**20


class Clock:
    """Every pass takes its time; the operations of codecs twice as long as copies."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, passes: Sequence[Callable[[], object]]) -> list[float]:
        for work in passes:
            work()
        self.calls += 1
        return [1e-3, 2e-3 if self.calls % 2 else 2.5e-3, 1e-3]


def case_measure(options: DeviceOptions) -> dict[str, Any]:
    import fake_device
    from gradferry_lab.bench.codec import measure
    from gradferry_lab.bench.device_clock import TimedDevice

    clock = Clock()
    timed = TimedDevice(fake_device.DEVICE, NUM_BYTES, clock, {"gpu": "fake"})
    heard: list[str] = []
    rows = list(measure(options, timed, heard.append))
    return {
        "rows": rows,
        "heard": heard,
        "races": fake_device.machine.races(),
        "calls": clock.calls,
    }


def test_every_case_is_validated_and_compared_with_a_copy(
    device_worlds: Callable[[int], World],
) -> None:
    codecs = [_native.canonical_codec(name) for name in ("q4", "sign1", "topk")]
    dtypes = [torch.float32, torch.float16]
    options = DeviceOptions(codecs, dtypes, [SIZE_MB], [2, 3], 5)
    (answer,) = device_worlds(1).run(case_measure, options=options)
    rows = answer["rows"]
    assert answer["races"] == []
    operations = [
        *(("encode", 1), ("encode_ef", 1), ("reduce", 2), ("reduce", 3)),
        *(("decode", 1), ("decode_ef", 1)),
    ]
    assert [
        (row["codec"], row["dtype"], row["misaligned"], row["op"], row["world_size"])
        for row in rows
    ] == [
        (codec, dtype, misaligned, *operation)
        for codec in codecs
        for dtype in ("float32", "float16")
        for misaligned in (False, True)
        for operation in operations
    ]
    assert answer["calls"] == 5 * len(rows)
    for row in rows:
        assert row["wrong"] == 0
        assert (row["roof_ratio_min"], row["roof_ratio_max"]) == pytest.approx((0.4, 0.5))
        assert row["roof_ratio_min"] <= row["roof_ratio"] <= row["roof_ratio_max"]
        item = 4 if row["dtype"] == "float32" else 2
        assert row["num_elements"] == NUM_BYTES // item
        assert row["buffers"] >= 4
        moved = row["bytes_per_element"] - row["bits_per_element"] / 8
        if row["op"] != "reduce":
            assert moved == item + 8 * (row["op"] == "encode_ef")  # the residual, both ways
    for encode, _, two, three, decode, _ in zip(*[iter(rows)] * len(operations), strict=True):
        sent, reduced = encode["bits_per_element"] / 8, decode["bits_per_element"] / 8
        for row in (two, three):  # every message and the result once, the residual both ways
            touched = row["world_size"] * sent + reduced + 8
            assert row["bytes_per_element"] == pytest.approx(touched)


def case_wrong_kernel() -> dict[str, Any]:
    import fake_device
    from gradferry_lab.bench import codec as device_codec
    from gradferry_lab.bench.device_clock import TimedDevice

    timed = TimedDevice(fake_device.DEVICE, 1 << 18, Clock(), {"gpu": "fake"})
    options = DeviceOptions(["q8"], [torch.float32], [0.25], [], 2)
    # Numbers of another seed on the device than on the CPU: as wrong as a kernel can be.
    honest = device_codec._Buffers.__init__

    def forged(self: Any, name: str, gradient: torch.Tensor, *rest: Any, **named: Any) -> None:
        honest(self, name, torch.zeros_like(gradient), *rest, **named)

    device_codec._Buffers.__init__ = forged
    try:
        return list(device_codec.measure(options, timed, lambda _: None))
    finally:
        device_codec._Buffers.__init__ = honest


def test_a_wrong_result_is_counted_and_not_timed(device_worlds: Callable[[int], World]) -> None:
    (rows,) = device_worlds(1).run(case_wrong_kernel)
    assert rows
    for row in rows:
        assert row["wrong"] > 0
        assert "gbps" not in row
