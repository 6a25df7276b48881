"""`gradferry converge` as a user runs it, with a suite of a few steps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from gradferry_lab.cli import main
from gradferry_lab.converge import suite as suites
from gradferry_lab.converge.suite import DENSE, MOMENTUM, RULER, Contest, Contestant, Near, Suite

ROOT = Path(__file__).parents[2]
ROW_KEYS = {
    "task", "optimizer", "codec", "mode", "momentum", "warmup", "seed", "final_loss",
    "final_metric", "wire_bytes", "suite", "source", "ranks", "steps", "initial_loss",
}  # fmt: skip
CONTEST = Contest(
    task="convex",
    steps=12,
    cost=0.01,
    contestants=(
        Contestant("AdamW", RULER, DENSE),
        Contestant("AdamW", "q4", "owner", Near(0.5)),
        Contestant("OneBitAdam", "sign1", MOMENTUM, warmup="exact"),
    ),
    ruler_seeds=2,
    seeds=1,
    num_ranks=2,
)


def test_converge_trains_goes_on_where_it_stopped_and_judges(
    rows_of, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(suites.SUITES, "quick", Suite("quick", (CONTEST,), sigmas=2))
    command = ["converge", "--worlds", "1", "--out", str(tmp_path / "out")]
    rows = rows_of(*command)
    assert [(row["codec"], row["mode"], row["momentum"], row["seed"]) for row in rows] == [
        ("torch:fp32", "dense", None, 0),
        ("torch:fp32", "dense", None, 1),
        ("q4", "owner", None, 0),
        ("sign1", "momentum", 0.9, 0),
    ]
    for row in rows:
        assert set(row) == ROW_KEYS
        assert (row["task"], row["suite"], row["ranks"], row["steps"]) == ("convex", "quick", 2, 12)
        assert row["final_loss"] < row["initial_loss"]
    dense, _, q4, sign1 = (row["wire_bytes"] for row in rows)
    assert q4 < dense / 6
    # 3 of 12 steps travel dense, the others with 1.1 bits of 32 and headers.
    assert 3 / 12 * dense < sign1 < (3 / 12 + 2 / 32) * dense
    shown = capsys.readouterr().out
    assert shown.startswith("4 trainings, 1 at a time.\n")
    assert re.search(r"OneBitAdam +sign1 +momentum 0.9 +exact.*reported", shown)

    finished = sorted((tmp_path / "out/quick").glob("*.json"))
    finished[0].unlink()
    finished[1].write_text('{"cut off')
    finished[2].write_text(finished[2].read_text().replace("least squares", "other data"))
    assert rows_of(*command) == rows
    assert "1 of 4 trainings are in" in capsys.readouterr().out

    document = json.loads((tmp_path / "rows.json").read_text())
    other = {**document["rows"].pop(3), "final_loss": 9.0, "seed": 7}
    document["environment"]["cpu"] = "another; one more"
    document["rows"].append(other)
    (tmp_path / "rows.json").write_text(json.dumps(document))
    command[-1] = str(tmp_path / "elsewhere")
    assert rows_of(*command, "--keep") == [*rows, other]
    assert "3 of 4 trainings are in" in capsys.readouterr().out
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["environment"]["cpu"].startswith("another; one more; ")
    document["rows"][2]["final_loss"] *= 3
    (tmp_path / "changed.json").write_text(json.dumps(document))
    assert main(["converge", "--from", str(tmp_path / "changed.json")]) == 1
    assert "Not met: convex, AdamW, q4, owner: OUTSIDE" in capsys.readouterr().out


def test_convergence_document_shows_the_committed_results(tmp_path):
    document = (ROOT / "docs/results/convergence.md").read_text()
    copy = tmp_path / "convergence.md"
    copy.write_text(document)
    results = str(ROOT / "benchmarks/results/convergence.json")
    main(["converge", "--from", results, "--markdown", str(copy)])
    assert copy.read_text() == document


@pytest.mark.slow
def test_quick_meets_all_demands_and_coarse_codecs_need_error_feedback(rows_of, tmp_path):
    """The workers of the convex task disagree: without error feedback it stalls."""
    rows = rows_of("converge", "--quick", "--out", str(tmp_path / "out"))
    convex = {(row["codec"], row["mode"]): row for row in rows if row["task"] == "convex"}
    for codec in ("sign1", "topk:ratio=0.01"):
        reached, stalled = convex[codec, "both"], convex[codec, "none"]
        assert reached["final_loss"] <= 1e-6 * reached["initial_loss"]
        assert stalled["final_loss"] > 0.01 * stalled["initial_loss"]
