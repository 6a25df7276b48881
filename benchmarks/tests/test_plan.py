"""`gradferry plan`: arithmetic on bytes and rates, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gradferry import _native
from gradferry.ddp.trial import LOSSES
from gradferry_lab import flags
from gradferry_lab.cli import main
from gradferry_lab.ranks.network import parse_rate

KEYS = [
    "kind", "exchange", "hook", "wire_bytes", "card_bytes", "ratio_to_fp32", "needs_momentum",
    "link", "transfer_ms", "compute_ms", "least_step_ms", "most_step_ms", "world", "gpus_per_node",
    "params", "parallel",
]  # fmt: skip
SMOKE = ("plan", "--smoke")
ELEMENTS, WORLD = 2e7, 16  # of --smoke


def test_smoke_shows_bytes_and_says_that_they_are_arithmetic(
    rows_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(*SMOKE, "--link", "10gbit", "25gbit")
    # PyTorch's own do not depend on our exchange.
    assert [(row["hook"], row["exchange"], row["link"]) for row in rows] == [
        (hook, exchange, link)
        for hook, exchange in (
            ("torch:fp32", None),
            ("torch:bf16", None),
            ("q4", "flat"),
            ("q4", "two-level"),
        )
        for link in ("10gbit", "25gbit")
    ]
    for row in rows:
        assert list(row) == KEYS
        assert row["compute_ms"] is row["least_step_ms"] is row["most_step_ms"] is None
    shown = capsys.readouterr().out
    for words in (
        "arithmetic, not a measurement",
        "`gradferry doctor` measures",
        "every GPU sends to every other",
        "add up their gradients first",
        "no training on several GPUs has been timed",
        "Use q4 unless you need fewer bytes.",
        "ms at",
    ):
        assert words in shown, words
    assert sum("  q4  " in line for line in shown.splitlines()) == 2


def test_what_a_codec_cost_in_loss_stands_below_it(
    rows_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for hooks, count in (("q4",), 0), (("q4", "rht:bits=3"), 1):
        rows_of("plan", "--hooks", *hooks)
        assert capsys.readouterr().out.count(f"rht:bits=3: {LOSSES['rht:bits=3']}.") == count


def test_with_one_gpu_per_node_there_is_one_exchange(
    rows_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(*SMOKE, "--gpus-per-node", "1")
    assert {row["exchange"] for row in rows} == {"flat", None}
    assert "nodes of 1 GPU," in capsys.readouterr().out
    assert all(row["wire_bytes"] == row["card_bytes"] for row in rows)


def test_nodes_are_of_8_gpus_where_that_makes_up_the_world(rows_of: Any) -> None:
    for world, per_node in (16, 8), (8, 1), (10, 1), (2, 1):
        rows = rows_of("plan", "--world", str(world), "--params", "20M", "--hooks", "q4")
        assert {row["gpus_per_node"] for row in rows} == {per_node}


def test_times_are_bytes_over_the_rate(rows_of: Any) -> None:
    rows = rows_of(*SMOKE, "--link", "500mbit", "--gpus-per-node", "1")
    ms = {row["hook"]: row["transfer_ms"] for row in rows}
    fp32 = 1e3 * 2 * (WORLD - 1) / WORLD * 4 * ELEMENTS / (500e6 / 8)
    assert ms["torch:fp32"] == pytest.approx(fp32, rel=1e-4)
    assert ms["torch:bf16"] == pytest.approx(fp32 / 2, rel=1e-4)
    # 4.28 bits per element, headers and padding to the largest shard.
    assert ms["q4"] == pytest.approx(fp32 * 4.28 / 32, rel=0.05)
    for row in rows:
        assert row["ratio_to_fp32"] == pytest.approx(row["transfer_ms"] / fp32, rel=1e-4)


def test_gpus_that_share_a_card_multiply_the_flat_exchanges_traffic(rows_of: Any) -> None:
    rows = rows_of(*SMOKE, "--gpus-per-node", "4", "--link", "1gbit")
    cards = {(row["exchange"], row["hook"]): row["card_bytes"] for row in rows}
    # 12 of 15 others are on other nodes, and 4 GPUs share a card: 4 * 12 / 15 = 3.2 times what one
    # GPU alone would send; two levels: 2 * 3/4 of the model through each card.
    assert cards["flat", "q4"] / cards["two-level", "q4"] == pytest.approx(
        (3.2 * 15 / 16) / (3 / 4), rel=0.05
    )
    # A ring enters and leaves every node once.
    assert cards[None, "torch:fp32"] == rows[0]["wire_bytes"]


def test_a_sharded_model_sends_gradients_once_and_parameters_twice(rows_of: Any) -> None:
    rows = rows_of("plan", "--parallel", "fsdp", "--world", "8", "--params", "100M")
    sent = {row["hook"]: row["wire_bytes"] for row in rows}
    elements = 7 / 8 * 100e6  # of other ranks
    q4, q8 = 4.28 / 8, 8.13 / 8  # bytes per element; headers and padding are less than 1 %
    expected = {
        "torch:fp32": 4 + 2 * 4,
        "torch:bf16": 4 + 2 * 2,
        "off+all_gather=bf16": 4 + 2 * 2,
        "off+all_gather=q8": 4 + 2 * q8,
        "q4+all_gather=off": q4 + 2 * 4,
        "q4": q4 + 2 * q8,
        "q4+keep_gathered=True": q4 + q8,
    }
    assert set(sent) == set(expected)
    for hook, num_bytes in expected.items():
        assert sent[hook] == pytest.approx(num_bytes * elements, rel=0.01), hook


def test_gathers_leave_a_node_once_and_a_compressed_scatter_once_per_gpu(rows_of: Any) -> None:
    hooks = ("off+all_gather=q8", "q4+all_gather=off")
    rows = rows_of(*SMOKE[:1], "--parallel", "fsdp", "--world", "16", "--hooks", *hooks)
    card = {row["hook"]: row["card_bytes"] for row in rows}
    sent = {row["hook"]: row["wire_bytes"] for row in rows}
    assert card["torch:fp32"] == sent["torch:fp32"]
    assert card[hooks[0]] == sent[hooks[0]]
    # Each of 8 GPUs sends to 8 of the 15 others through the card.
    dense = 2 / 3 * sent["torch:fp32"]
    scattered = sent[hooks[1]] - dense
    assert card[hooks[1]] - dense == pytest.approx(8 * 8 / 15 * scattered, rel=0.01)


def test_replicas_send_their_shards_averages_and_nothing_else(
    rows_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of("plan", "--parallel", "hsdp", "--world", "32", "--params", "100M")
    card = {row["hook"]: row["card_bytes"] for row in rows}
    ring = 2 * 3 / 4 * 4 * 100e6  # of four nodes
    assert card["torch:fp32"] == pytest.approx(ring, rel=1e-3)
    assert card["torch:bf16"] == card["torch:fp32"]  # gradients are averaged in fp32
    assert card["q4"] == pytest.approx(ring * 4.28 / 32, rel=0.01)
    assert card["q4+reduce_scatter=q4+all_gather=q8"] == card["q4"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "`gradferry bench train --parallel hsdp` measures" in shown
    assert "Fewest bytes through a card: q4." in shown


def test_compute_bounds_the_step(rows_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    links = ("1gbit", "400gbit")
    rows = rows_of(*SMOKE, "--compute-ms", "100", "--link", *links)
    for row in rows:
        assert row["least_step_ms"] == max(100, row["transfer_ms"])
        assert row["most_step_ms"] == 100 + row["transfer_ms"]
    assert {row["least_step_ms"] > 100 for row in rows} == {True, False}
    first = rows[0]
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{first['least_step_ms']:,.0f} .. {first['most_step_ms']:,.0f}" in shown


def test_every_codec_is_planned_and_coarse_ones_are_marked(
    rows_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of("plan", "--params", "1e7")
    assert {row["hook"] for row in rows} >= {str(codec["name"]) for codec in _native.codecs()}
    marked = {row["hook"] for row in rows if row["needs_momentum"]}
    assert marked == {"sign1", "topk"}
    assert "sign1 *" in capsys.readouterr().out


def test_a_model_of_many_buckets_is_as_large_as_all_of_them(rows_of: Any) -> None:
    # Some of many buckets are planned, since all are alike.
    few, many = (rows_of(*SMOKE, "--bucket-cap", cap)[-1]["wire_bytes"] for cap in ("25", "0.5"))
    assert few < many < 1.2 * few  # shorter buckets have as many headers, and more padding


@pytest.mark.parametrize(
    ("text", "value"),
    [("125M", 125e6), ("1.3b", 1.3e9), ("7e9", 7e9), ("2G", 2e9), ("350k", 350e3), ("1T", 1e12)],
)
def test_parameters_are_counted_as_people_write_them(text: str, value: float) -> None:
    assert flags.count(text) == value


@pytest.mark.parametrize("text", ["1gbit", "1Gb/s", "1 Gbit/s", "1000Mbps", "1000000kbit"])
def test_rates_are_read_as_people_write_them(text: str) -> None:
    assert parse_rate("--link", text) == 1e9


@pytest.mark.parametrize("text", ["", "B", "1X", "1.3 Billion", "MM"])
def test_what_counts_nothing_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--params", text])
    assert f"{text!r} is no number; write it as in 125M, 1.3B or 7e9" in capsys.readouterr().err


def test_results_replace_nothing_but_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (tmp_path, pipe):
        with pytest.raises(SystemExit):
            main(["plan", "--smoke", "--json", str(place)])
        assert f"{place} is no file" in capsys.readouterr().err
        assert not place.is_file()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    assert main(["plan", "--smoke", "--json", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "linked").stat().st_size > 0


def test_a_terminal_without_a_sign_ends_no_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "gradferry", "plan", "--smoke"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch:bf16" in shown.stdout
