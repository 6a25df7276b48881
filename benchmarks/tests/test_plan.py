"""`gradferry plan`: arithmetic on bytes and rates, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gradferry import _native

ELEMENTS, WORLD = 2e7, 16
SMALL = ("plan", "--world", "16", "--params", "2e7", "--hooks", "torch:bf16", "q4")


def test_a_plan_shows_bytes_and_says_that_they_are_arithmetic(
    rows_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(*SMALL, "--link", "10gbit", "25gbit")
    assert [(row["hook"], row["exchange"]) for row in rows[::2]] == [
        ("torch:fp32", None), ("torch:bf16", None), ("q4", "flat"), ("q4", "two-level"),
    ]  # fmt: skip
    for row in rows:
        assert row["compute_ms"] is row["least_step_ms"] is row["most_step_ms"] is None
    shown = capsys.readouterr().out
    assert "arithmetic, not a measurement" in shown
    assert sum("  q4  " in line for line in shown.splitlines()) == 2


def test_times_are_bytes_over_the_rate(rows_of: Any) -> None:
    rows = rows_of(*SMALL, "--link", "500mbit", "--gpus-per-node", "1")
    ms = {row["hook"]: row["transfer_ms"] for row in rows}
    fp32 = 1e3 * 2 * (WORLD - 1) / WORLD * 4 * ELEMENTS / (500e6 / 8)
    assert ms["torch:fp32"] == pytest.approx(fp32, rel=1e-4)
    assert ms["torch:bf16"] == pytest.approx(fp32 / 2, rel=1e-4)
    # 4.28 bits per element, headers and padding to the largest shard.
    assert ms["q4"] == pytest.approx(fp32 * 4.28 / 32, rel=0.05)
    for row in rows:
        assert row["ratio_to_fp32"] == pytest.approx(row["transfer_ms"] / fp32, rel=1e-4)


def test_gpus_that_share_a_card_multiply_the_flat_exchanges_traffic(rows_of: Any) -> None:
    rows = rows_of(*SMALL, "--gpus-per-node", "4", "--link", "1gbit")
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


def test_replicas_send_their_shards_averages_and_nothing_else(rows_of: Any) -> None:
    rows = rows_of("plan", "--parallel", "hsdp", "--world", "32", "--params", "100M")
    card = {row["hook"]: row["card_bytes"] for row in rows}
    ring = 2 * 3 / 4 * 4 * 100e6  # of four nodes
    assert card["torch:fp32"] == pytest.approx(ring, rel=1e-3)
    assert card["torch:bf16"] == card["torch:fp32"]  # gradients are averaged in fp32
    assert card["q4"] == pytest.approx(ring * 4.28 / 32, rel=0.01)
    assert card["q4+reduce_scatter=q4+all_gather=q8"] == card["q4"]


def test_every_codec_is_planned_and_coarse_ones_are_marked(
    rows_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of("plan", "--params", "1e7")
    assert {row["hook"] for row in rows} >= {str(codec["name"]) for codec in _native.codecs()}
    marked = {row["hook"] for row in rows if row["needs_momentum"]}
    assert marked == {"sign1", "topk"}
    assert "sign1 *" in capsys.readouterr().out


def test_ranks_send_hardly_more_than_payloads_in_worlds_of_any_size(rows_of: Any) -> None:
    """Within the memory that is allowed by default: (W - 1) / W of both stages, and headers."""
    worlds = ("2", "8", "64", "512", "1024", "4096")
    codecs = ("exact", "q8", "q4", "rht:bits=2", "sign1", "topk")
    rows = rows_of(
        "plan", "--params", "50M", "--link", "1gbit", "--world", *worlds, "--hooks", *codecs
    )  # fmt: skip
    rows = [row for row in rows if row["messages"]]
    assert len(rows) == len(codecs) * (len(worlds) + 4)  # of worlds of nodes also two levels
    for row in rows:
        world, siblings = row["world"], 1 if row["exchange"] == "flat" else row["gpus_per_node"]
        n, stages = _native.TILE_ELEMENTS, ("worker", "owner")
        tile = sum(_native.payload_bytes(row["hook"], n, torch.float32, each) for each in stages)
        buckets = math.ceil(50e6 * 4 / (25 << 20))
        headers = 64 * (row["messages"] + buckets * (world - siblings))  # and commits
        sent = 50e6 / n * tile * (world // siblings - 1) / world
        assert sent * 0.99 <= row["wire_bytes"] - headers <= sent * 1.05, row
