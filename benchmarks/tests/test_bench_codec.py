"""`gradferry bench codec`: what it reports, on arrays too small for its figures to mean much."""

from __future__ import annotations

import math

import pytest
import torch
from gradferry import _native
from gradferry_lab.bench.peers import PEERS, compare_with_peers, installed_peers, missing_peers

ROW_KEYS = {
    "codec", "op", "dtype", "num_elements", "threads", "isa", "world_size", "gbps", "roof_gbps",
    "roof_ratio", "roof_ratio_min", "roof_ratio_max", "roof_ratio_best", "bytes_per_element",
    "bits_per_element", "elements_per_second", "nmse", "core_gfmas", "core_share", "wrong",
}  # fmt: skip
SMALL = ["bench", "codec", "--num-elements", "524288", "--rounds", "1"]


def test_bench_codec_times_every_codec_of_the_table(rows_of, capsys):
    rows = rows_of(*SMALL, "--world-sizes", "3")
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
