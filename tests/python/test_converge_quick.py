"""`gradferry converge --quick` itself: what CI trains on every change, and that it would notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gradferry.cli import main
from gradferry.converge.suite import MOMENTUM, QUICK, Misses, Near, Reaches

Row = dict[str, Any]

GAPS = {
    one.codec: one.demand.gap
    for contest in QUICK.contests
    for one in contest.contestants
    if isinstance(one.demand, Reaches)
}
COARSE = ("sign1", "topk:ratio=0.01")


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[int, Path]:
    """Exit code and JSON file of the command."""
    folder = tmp_path_factory.mktemp("quick")
    path = folder / "rows.json"
    return main(["converge", "--quick", "--out", str(folder), "--json", str(path)]), path


def rows_of(quick: tuple[int, Path]) -> list[Row]:
    return json.loads(quick[1].read_text())["rows"]


def report_again(
    quick: tuple[int, Path], folder: Path, change: Callable[[list[Row]], list[Row]]
) -> int:
    """The exit code had the trainings given other rows."""
    document = json.loads(quick[1].read_text())
    document["rows"] = change(document["rows"])
    path = folder / "changed.json"
    path.write_text(json.dumps(document))
    return main(["converge", "--from", str(path), "--out", str(folder)])


def find(rows: list[Row], codec: str, mode: str) -> Row:
    (row,) = (row for row in rows if (row["codec"], row["mode"]) == (codec, mode))
    return row


def test_quick_meets_all_demands(quick, capsys):
    assert quick[0] == 0, f"see {quick[1].parent / 'index.html'}"


def test_quick_turns_red_without_error_feedback(quick, tmp_path, capsys):
    # Trainings without error feedback, in the place of those that should have it.
    def forget(rows: list[Row]) -> list[Row]:
        kept = [row for row in rows if row["mode"] != "both"]
        return kept + [{**row, "mode": "both"} for row in rows if row["mode"] == "none"]

    assert report_again(quick, tmp_path, forget) == 1
    shown = capsys.readouterr().out
    for codec in GAPS:
        assert f"Not met: convex, SGD, {codec}, both: OUTSIDE" in shown


def test_quick_turns_red_when_the_control_passes(quick, tmp_path, capsys):
    def help_the_control(rows: list[Row]) -> list[Row]:
        kept = [row for row in rows if row["mode"] != "none"]
        return kept + [{**row, "mode": "none"} for row in rows if row["mode"] == "both"]

    assert report_again(quick, tmp_path, help_the_control) == 1
    shown = capsys.readouterr().out
    for codec in GAPS:
        assert f"Not met: convex, SGD, {codec}, none: MUST STALL" in shown


JUDGED = [
    (contest.task, one.optimizer, one.codec, one.mode)
    for contest in QUICK.contests
    for one in contest.contestants
    if isinstance(one.demand, Near)
]


@pytest.mark.parametrize("who", JUDGED, ids=lambda who: "-".join(who))
def test_quick_turns_red_when_a_codec_leaves_its_band(who, quick, tmp_path, capsys):
    keys = ("task", "optimizer", "codec", "mode")

    def worsen(rows: list[Row]) -> list[Row]:
        return [
            {**row, "final_loss": 2 * row["final_loss"]}
            if tuple(row[key] for key in keys) == who
            else row
            for row in rows
        ]

    assert report_again(quick, tmp_path, worsen) == 1
    assert f"Not met: {', '.join(who)}: OUTSIDE" in capsys.readouterr().out


def test_quick_judges_every_codec_and_the_momentum_mode():
    assert {codec for _, _, codec, _ in JUDGED} == {"q8", "q4", "rht:bits=4", *COARSE}
    assert {(opt, codec) for _, opt, codec, mode in JUDGED if mode == MOMENTUM} == {
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
    assert gaps[-1] > 0.8 * gaps[len(gaps) // 2]
    assert Misses(1e-6) in {
        one.demand
        for contest in QUICK.contests
        for one in contest.contestants
        if (one.codec, one.mode) == (codec, "none")
    }
