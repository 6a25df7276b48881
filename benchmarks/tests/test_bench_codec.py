"""`gradferry bench codec` on the fake device, by a clock of the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

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


def case_measure(options: DeviceOptions, is_wrong: bool = False) -> tuple[list[Any], list[Any]]:
    """The rows, and races. is_wrong: the device gets other numbers, as from wrong kernels."""
    import fake_device
    from gradferry_lab.bench import codec
    from gradferry_lab.bench.device_clock import TimedDevice

    timed = TimedDevice(fake_device.DEVICE, NUM_BYTES, Clock(), {"gpu": "fake"})
    honest = codec._Buffers

    def forged(name: str, gradient: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return honest(name, torch.zeros_like(gradient), *rest, **named)

    with mock.patch.object(codec, "_Buffers", forged if is_wrong else honest):
        rows = list(codec.measure(options, timed, lambda _: None))
    return rows, fake_device.machine.races()


def test_every_case_is_validated_and_compared_with_a_copy(
    device_worlds: Callable[[int], World],
) -> None:
    codecs = [_native.canonical_codec(name) for name in ("q4", "sign1", "topk")]
    dtypes = [torch.float32, torch.float16]
    options = DeviceOptions(codecs, dtypes, [SIZE_MB], [2, 3], 5)
    ((rows, races),) = device_worlds(1).run(case_measure, options=options)
    assert races == []
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
    for row in rows:
        assert row["wrong"] == 0
        assert (row["roof_ratio_min"], row["roof_ratio_max"]) == pytest.approx((0.4, 0.5))
        assert row["roof_ratio_min"] <= row["roof_ratio"] <= row["roof_ratio_max"]
        item = 4 if row["dtype"] == "float32" else 2
        assert row["num_elements"] == NUM_BYTES // item
        assert row["buffers"] >= 4
        assert row["rounds"] == 5
        moved = row["bytes_per_element"] - row["bits_per_element"] / 8
        if row["op"] != "reduce":
            assert moved == item + 8 * (row["op"] == "encode_ef")  # the residual, both ways
    for encode, _, two, three, decode, _ in zip(*[iter(rows)] * len(operations), strict=True):
        sent, reduced = encode["bits_per_element"] / 8, decode["bits_per_element"] / 8
        for row in (two, three):  # every message and the result once, the residual both ways
            touched = row["world_size"] * sent + reduced + 8
            assert row["bytes_per_element"] == pytest.approx(touched)


def test_a_wrong_result_is_counted_and_not_timed(device_worlds: Callable[[int], World]) -> None:
    options = DeviceOptions(["q8"], [torch.float32], [0.25], [], 2)
    ((rows, _),) = device_worlds(1).run(case_measure, options=options, is_wrong=True)
    assert rows
    for row in rows:
        assert row["wrong"] > 0
        assert "gbps" not in row
