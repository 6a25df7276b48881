"""`gradferry bench codec`: what it reports, on arrays too small for its figures to mean much.

With --device on the fake device, and by a clock of the test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradferry import _native
from gradferry_lab.bench.device_clock import environment_on, find_gpu
from gradferry_lab.bench.device_codec import (
    DeviceOptions,
    device_codec_table,
    device_peer_table,
    num_buffers,
)
from gradferry_lab.bench.device_peers import DEVICE_PEERS, UnfusedQ4
from gradferry_lab.bench.peers import PEERS, compare_with_peers, installed_peers, missing_peers
from world import World

ROW_KEYS = {
    "codec", "op", "dtype", "num_elements", "threads", "isa", "world_size", "gbps", "roof_gbps",
    "roof_ratio", "roof_ratio_min", "roof_ratio_max", "roof_ratio_best", "bytes_per_element",
    "bits_per_element", "elements_per_second", "nmse", "core_gfmas", "core_share", "wrong",
}  # fmt: skip
SMALL = ["bench", "codec", "--num-elements", "524288", "--rounds", "1"]


def test_bench_codec_times_every_codec_of_the_table(rows_of, capsys):
    rows = rows_of(*SMALL, "--world-sizes", "3", "--wide")
    names = [_native.canonical_codec(codec["name"]) for codec in _native.codecs()]
    operations = [("encode", 1), ("encode_ef", 1), ("reduce", 3), ("decode", 1)]
    assert [(row["codec"], row["op"], row["world_size"]) for row in rows] == [
        (name, *operation) for name in names for operation in operations
    ]
    for row in rows:
        assert set(row) == ROW_KEYS
        assert row["wrong"] == 0
        assert row["num_elements"] == 524288
        assert row["gbps"] > 0
        assert row["roof_ratio_min"] <= row["roof_ratio"] <= row["roof_ratio_max"]
        assert row["gbps"] * 1e9 == pytest.approx(
            row["elements_per_second"] * row["bytes_per_element"]
        )
        assert row["nmse"] == 0 or 0 < row["nmse"] < 1
        # Any processor manages a multiply-add in a microsecond, none 10^14 per second on a core.
        assert 1e-3 < row["core_gfmas"] < 1e5
        assert 0 < row["core_share"] <= 1
    # The best window is one of the same run: every row is compared with the same rate.
    alone = [row["core_gfmas"] / row["core_share"] for row in rows]
    assert alone == pytest.approx([alone[0]] * len(rows))
    shown = capsys.readouterr().out
    assert f"the best of the run, {alone[0]:.1f} G/s" in " ".join(shown.split())
    assert "reduce/3" in shown
    assert "memcpy" in shown


def test_bench_codec_takes_threads_isas_and_dtypes(rows_of):
    lists = ["--threads", "1", "2", "--isas", *_native.available_isas(), "--dtypes", "bfloat16"]
    rows = rows_of(*SMALL, "--codecs", "q4", *lists)
    assert {(row["isa"], row["threads"]) for row in rows} == {
        (isa, threads) for isa in _native.available_isas() for threads in (1, 2)
    }
    for row in rows:
        assert row["dtype"] == "bfloat16"
        # 2192 bytes for 4096 elements; the owner's format of q4 is the worker's.
        assert row["bits_per_element"] == 8 * 2192 / 4096


def test_peers_are_compared_on_the_same_buffer(rows_of, capsys):
    rows = [row for row in rows_of(*SMALL, "--codecs", "q8", "--peers") if "peer" in row]
    expected = [peer.name for peer in installed_peers() if peer.rival == "q8"]
    assert "torch:quantize_per_tensor" in expected
    assert [row["peer"] for row in rows] == [name for name in expected for _ in range(2)]
    for row in rows:
        assert row["speedup_min"] <= row["speedup"] <= row["speedup_max"]
    assert "torch:quantize_per_tensor" in capsys.readouterr().out


def test_missing_peers_are_named_as_pip_knows_them(monkeypatch):
    monkeypatch.setattr("gradferry_lab.bench.peers.installed_peers", list)
    assert missing_peers() == ["bitsandbytes", "hivemind", "pypiquant", "torch"]


def test_peers_without_a_rival_are_left_out():
    assert compare_with_peers(["sign1"], 1 << 19, threads=1, rounds=1) == []
    assert {peer.rival for peer in PEERS} <= {codec["name"] for codec in _native.codecs()}


def test_timer_lends_its_gradient_for_as_long_as_the_view_lives():
    timer = _native.CodecTimer(
        codec="q4",
        dtype=torch.float32,
        isa="scalar",
        num_elements=1 << 18,
        world_sizes=[],
        rounds=1,
        threads=1,
    )
    view = timer.gradient().view(torch.float32)
    assert view.numel() == 1 << 18
    # 2^16 Gaussian numbers, sigma 1e-3, repeated: five standard errors of the mean of squares,
    # sigma^2 * sqrt(2 / 2^16).
    assert view.double().square().mean().item() == pytest.approx(1e-6, rel=5 * math.sqrt(2 / 2**16))
    del timer
    assert torch.isfinite(view).all()


# --- on a device ---------------------------------------------------------------------------------


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
        if len(passes) == 2:
            return [1e-3, 4e-3]
        return [1e-3, 2e-3 if self.calls % 2 else 2.5e-3, 1e-3]


def case_measure(options: DeviceOptions) -> dict[str, Any]:
    import fake_device
    from gradferry_lab.bench.device_clock import TimedDevice
    from gradferry_lab.bench.device_codec import measure

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
    codecs = [_native.canonical_codec(str(codec["name"])) for codec in _native.codecs()]
    dtypes = [torch.float32, torch.float16]
    options = DeviceOptions(codecs, dtypes, [SIZE_MB], [2, 3], 5, peers=False)
    (answer,) = device_worlds(1).run(case_measure, options=options, seconds=300)
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
        assert row["num_elements"] == NUM_BYTES // (4 if row["dtype"] == "float32" else 2)
        assert row["roof_ratio_min"] == pytest.approx(0.4)
        assert row["roof_ratio_max"] == pytest.approx(0.5)
        assert row["roof_ratio_min"] <= row["roof_ratio"] <= row["roof_ratio_max"]
        assert row["us_median"] == pytest.approx(2000) or row["us_median"] == pytest.approx(2500)
        assert 2400 < row["us_p99"] <= 2500.1
        assert row["gbps"] * 1e9 == pytest.approx(
            row["elements_per_second"] * row["bytes_per_element"]
        )
        assert row["buffers"] >= 4
        item = 4 if row["dtype"] == "float32" else 2
        moved = row["bytes_per_element"] - row["bits_per_element"] / 8
        if row["op"] in ("encode", "decode", "decode_ef"):
            assert moved == item
        if row["op"] == "encode_ef":
            assert moved == item + 8
    for encode, _, two, three, decode, _ in zip(*[iter(rows)] * len(operations), strict=True):
        sent, reduced = encode["bits_per_element"] / 8, decode["bits_per_element"] / 8
        for row in (two, three):  # every message and the result once, the residual both ways
            touched = row["world_size"] * sent + reduced + 8
            assert row["bytes_per_element"] == pytest.approx(touched)
    assert "reduce/3" in str(
        [column.cell(rows[3]) for column in device_codec_table(rows, "x").columns]
    )


def case_wrong_kernel() -> dict[str, Any]:
    import fake_device
    from gradferry_lab.bench import device_codec
    from gradferry_lab.bench.device_clock import TimedDevice

    timed = TimedDevice(fake_device.DEVICE, 1 << 18, Clock(), {"gpu": "fake"})
    options = DeviceOptions(["q8"], [torch.float32], [0.25], [], 2, peers=False)
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


def test_peers_take_turns_with_the_codec_on_a_device(device_worlds: Callable[[int], World]) -> None:
    installed = [peer for peer in DEVICE_PEERS if peer.module == "torch"]
    codecs = [peer.rival for peer in installed]
    options = DeviceOptions(codecs, [], [0.25], [2], 3, peers=True)
    (answer,) = device_worlds(1).run(case_measure, options=options, seconds=300)
    rows = [row for row in answer["rows"] if not row["peer"].startswith("bitsandbytes")]
    assert [(row["peer"], row["op"]) for row in rows] == [
        (peer.name, op) for peer in installed for op in ("encode_ef", "decode")
    ]
    for row in rows:
        assert row["speedup"] == row["speedup_min"] == row["speedup_max"] == 4.0
    assert device_peer_table(rows).rows == rows


@pytest.mark.parametrize("n", [1024, 4096, 5 * 4096 + 3 * 1024])
@pytest.mark.parametrize("spread", [0, 12, 120])
def test_unfused_q4_gives_the_numbers_of_q4(n: int, spread: int) -> None:
    generator = torch.Generator().manual_seed(n + spread)
    q4 = UnfusedQ4(torch.device("cpu"))
    residual = torch.zeros(n)
    for _ in range(3):
        exponents = torch.randint(-spread, 1, (n,), generator=generator).float()
        gradient = torch.randn(n, generator=generator) * torch.exp2(exponents)
        gradient[torch.rand(n, generator=generator) < 0.1] = 0
        total = gradient + residual
        sent = q4.encode(gradient, residual)
        message = _native.encode_tensor(total, "q4", seed=0, step=0, config_hash=0, layout_hash=0)
        expected = torch.empty(n)
        _native.decode_tensor(message, "q4", expected, config_hash=0, layout_hash=0)
        assert torch.equal(q4.decode(*sent, n), expected)
        assert torch.equal(residual, total - expected)
        payload = message[_native.HEADER_BYTES :]
        first = min(n, 4096) // 2
        assert torch.equal(sent[0].flatten()[:first], payload[:first])


def test_buffers_together_are_larger_than_the_cache() -> None:
    assert num_buffers(10, 0) == 4
    assert num_buffers(1 << 20, 50 << 20) == 200
    assert num_buffers(100 << 20, 50 << 20) == 4


@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({}, 0),  # a process that starts the ranks
        ({"RANK": "6", "WORLD_SIZE": "8", "MASTER_ADDR": "here", "MASTER_PORT": "1"}, 2),
    ],
)
def test_the_environment_names_the_gpu_of_the_rank_and_takes_none(
    variables: dict[str, str], index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    monkeypatch.delenv("RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda place: SimpleNamespace(name=f"GPU {torch.device(place).index}", L2_cache_size=1),
    )
    assert environment_on("cuda")["gpu"] == f"GPU {index}"
    assert taken == []
    # What measures on a GPU makes it the current one.
    assert find_gpu("cuda:3").environment["gpu"] == "GPU 3"
    assert taken == [3]
