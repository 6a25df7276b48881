"""`gradferry converge --quick` itself: what CI trains on every change, and that it would notice.

Its text takes as long as all else of it and is for the slow set: every codec, mode and optimizer is
in the other contests too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gradferry_lab.cli import main
from gradferry_lab.converge.pages import broken_demands, exit_code, judge
from gradferry_lab.converge.suite import MOMENTUM, QUICK, Misses, Near, Reaches

Row = dict[str, Any]

GAPS = {
    one.codec: one.demand.gap
    for contest in QUICK.contests
    for one in contest.contestants
    if isinstance(one.demand, Reaches)
}
COARSE = ("sign1", "topk:ratio=0.01")
TEXT = "tiny_text"
TASKS = [contest.task for contest in QUICK.contests if contest.task != TEXT]


def train(folder: Path, tasks: Sequence[str]) -> tuple[int, Path]:
    """Exit code and JSON file of the command."""
    path = folder / "rows.json"
    files = ["--out", str(folder), "--json", str(path)]
    return main(["converge", "--quick", "--tasks", *tasks, *files]), path


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[int, Path]:
    return train(tmp_path_factory.mktemp("quick"), TASKS)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> tuple[int, Path]:
    return train(tmp_path_factory.mktemp("text"), [TEXT])


def rows_of(quick: tuple[int, Path]) -> list[Row]:
    return json.loads(quick[1].read_text())["rows"]


def verdict_of(rows: list[Row]) -> tuple[int, list[str]]:
    """Exit code and broken demands, had the trainings given these rows."""
    outcomes = judge(QUICK, rows)
    return exit_code(outcomes), broken_demands(outcomes)


def find(rows: list[Row], codec: str, mode: str) -> Row:
    (row,) = (row for row in rows if (row["codec"], row["mode"]) == (codec, mode))
    return row


@pytest.mark.parametrize("part", ["quick", pytest.param("text", marks=pytest.mark.slow)])
def test_quick_meets_all_demands(part, request):
    code, path = request.getfixturevalue(part)
    assert code == 0, f"see {path.parent / 'index.html'}"


def test_quick_turns_red_without_error_feedback(quick):
    # Trainings without error feedback, in the place of those that should have it.
    rows = rows_of(quick)
    kept = [row for row in rows if row["mode"] != "both"]
    code, broken = verdict_of(
        kept + [{**row, "mode": "both"} for row in rows if row["mode"] == "none"]
    )
    assert code == 1
    for codec in GAPS:
        assert any(line.startswith(f"convex, SGD, {codec}, both: OUTSIDE") for line in broken)


def test_quick_turns_red_when_the_control_passes(quick):
    rows = rows_of(quick)
    kept = [row for row in rows if row["mode"] != "none"]
    code, broken = verdict_of(
        kept + [{**row, "mode": "none"} for row in rows if row["mode"] == "both"]
    )
    assert code == 1
    for codec in GAPS:
        assert any(line.startswith(f"convex, SGD, {codec}, none: MUST STALL") for line in broken)


JUDGED = [
    (contest.task, one.optimizer, one.codec, one.mode)
    for contest in QUICK.contests
    for one in contest.contestants
    if isinstance(one.demand, Near)
]


@pytest.mark.parametrize(
    "who",
    [
        pytest.param(who, id="-".join(who), marks=[pytest.mark.slow] if who[0] == TEXT else [])
        for who in JUDGED
    ],
)
def test_quick_turns_red_when_a_codec_leaves_its_band(who, request):
    keys = ("task", "optimizer", "codec", "mode")
    rows = rows_of(request.getfixturevalue("text" if who[0] == TEXT else "quick"))
    changed = [row for row in rows if tuple(row[key] for key in keys) == who]
    assert changed
    code, broken = verdict_of(
        [{**row, "final_loss": 3 * row["final_loss"]} if row in changed else row for row in rows]
    )
    assert code == 1
    assert len(broken) == 1
    assert broken[0].startswith(", ".join(who))
    assert ": OUTSIDE (" in broken[0]


def test_quick_judges_every_codec_and_the_momentum_mode_outside_its_text():
    judged = [who for who in JUDGED if who[0] != TEXT]
    assert {codec for _, _, codec, _ in judged} == {"q8", "q4", "rht:bits=4", *COARSE}
    assert {(opt, codec) for _, opt, codec, mode in judged if mode == MOMENTUM} == {
        ("OneBitAdam", "sign1"),
        ("OneBitAdam", "topk:ratio=0.01"),
        ("SGD", "topk:ratio=0.01"),
    }


@pytest.mark.parametrize("codec", COARSE)
def test_error_feedback_reaches_the_optimum_of_workers_that_disagree(codec, quick):
    row = find(rows_of(quick), codec, "both")
    assert GAPS[codec] == 1e-6
    assert row["final_loss"] <= 1e-6 * row["initial_loss"]


@pytest.mark.parametrize("codec", COARSE)
def test_without_error_feedback_the_same_training_stalls(codec, quick):
    row = find(rows_of(quick), codec, "none")
    gaps = row["curve"]["losses"]
    assert gaps[-1] > 0.01 * gaps[0]
    assert gaps[-1] > 0.8 * gaps[len(gaps) * 3 // 4]
    assert Misses(1e-6) in {
        one.demand
        for contest in QUICK.contests
        for one in contest.contestants
        if (one.codec, one.mode) == (codec, "none")
    }
