"""`gradferry bench overlap`: what it reports, and that its trace names the phases of a step."""

from __future__ import annotations

import json

import pytest
import torch
from gradferry_lab.bench.overlap import overlap_rows, overlap_table
from gradferry_lab.bench.overlap_turns import OverlapOptions, OverlapOutcome
from gradferry_lab.cli import main
from gradferry_lab.ranks.hosts import Where

ROW_KEYS = {
    "hook", "link", "ranks", "hosts", "ranks_per_host", "device", "model", "bucket_cap_mb", "seed",
    "backward_ms", "backward_ms_min", "backward_ms_max", "exposed_ms", "exposed_ms_low",
    "exposed_ms_high", "ratio_to_none", "ratio_to_sync", "round_ms", "interval_coverage",
}  # fmt: skip
PHASES = {"gradferry::encode", "gradferry::network", "gradferry::reduce", "gradferry::decode"}


def test_smoke_compares_backward_passes_and_traces_the_hook(tmp_path, capsys):
    file, trace = tmp_path / "rows.json", tmp_path / "trace.json"
    arguments = ["bench", "overlap", "--smoke", "--json", str(file), "--trace", str(trace)]
    assert main(arguments) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["hook"] for row in rows] == ["none", "sync", "q4"]
    for row in rows:
        assert set(row) == ROW_KEYS
        assert (row["device"], row["ranks"], row["model"]) == ("cpu", 2, "small")
        assert len(row["round_ms"]) == 2
        assert 0 < row["backward_ms_min"] <= row["backward_ms"] <= row["backward_ms_max"]
    assert rows[0]["exposed_ms"] == 0
    events = json.loads(trace.read_text())["traceEvents"]
    named = [event for event in events if event.get("name") in PHASES]
    assert {event["name"] for event in named} == PHASES
    # On the thread of backward and on the hook's own, with a beginning and a length.
    assert len({event["tid"] for event in named}) == 2
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in named)
    assert "Trace of q4" in capsys.readouterr().out


def test_exposed_time_is_that_of_pairs():
    options = OverlapOptions("small", ("none", "q4"), "cpu", 25.0, 3, 1, 0)
    outcomes = [
        OverlapOutcome("none", [10.0, 20.0, 30.0]),
        OverlapOutcome("q4", [11.0, 22.0, 36.0]),
    ]
    none, q4 = overlap_rows(outcomes, options, Where("loopback", 2, 1, 2))
    assert (none["exposed_ms"], none["ratio_to_none"]) == (0.0, 1.0)
    assert (q4["exposed_ms"], q4["exposed_ms_low"], q4["exposed_ms_high"]) == (2.0, 1.0, 6.0)
    assert (q4["backward_ms"], q4["ratio_to_none"]) == (22.0, 1.1)
    assert q4["ratio_to_sync"] is None
    assert q4["interval_coverage"] == 0.75
    table = overlap_table([none, q4])
    assert len(table.rows) == 2
    assert "(75 %)" in [column.title for column in table.columns]
    assert "75 %: how surely" in table.notes[1]
    outcomes.append(OverlapOutcome("sync", [10.0, 11.0, 40.0]))
    rows = overlap_rows(outcomes, options, Where("loopback", 2, 1, 2))
    assert [row["ratio_to_sync"] for row in rows] == [1.0, 1.1, 1.0]  # of .9, 1.1 and 2, ...
    assert "ratio to\nsync" in [column.title for column in overlap_table(rows).columns]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys):
    assert main(["bench", "overlap", "--device", "cuda"]) == 2
    assert "sees no GPU on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds: 0"),
        (["--bucket-cap", "0"], "--bucket-cap: 0"),
        (["--hooks", "q5"], "q5"),
        (["--model", "none"], "none"),
    ],
)
def test_the_option_that_is_wrong_is_named(arguments, message, capsys):
    assert main(["bench", "overlap", *arguments]) == 2
    assert message in capsys.readouterr().err
