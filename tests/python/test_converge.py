"""`gradferry converge` as a user runs it, with a suite of a few steps."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gradferry.cli import main
from gradferry.converge import suite as suites
from gradferry.converge.suite import DENSE, MOMENTUM, RULER, Contest, Contestant, Near, Suite

ROOT = Path(__file__).parents[2]
ROW_KEYS = {
    "task",
    "optimizer",
    "codec",
    "mode",
    "seed",
    "final_loss",
    "final_metric",
    "wire_bytes",
    "suite",
    "ranks",
    "steps",
    "initial_loss",
    "curve",
}
CONTEST = Contest(
    task="convex",
    steps=12,
    cost=0.01,
    contestants=(
        Contestant("AdamW", RULER, DENSE),
        Contestant("AdamW", "q4", "owner", Near(0.5)),
        Contestant("OneBitAdam", "sign1", MOMENTUM),
        Contestant("AdamW", "topk:ratio=0.01", "none"),
    ),
    ruler_seeds=2,
    seeds=1,
)


@pytest.fixture
def converge(tmp_path, monkeypatch):
    """Calls the command with a small suite in place of the quick one; returns exit code, rows."""
    monkeypatch.setitem(
        suites.SUITES, "quick", Suite("quick", (CONTEST,), sigmas=2, num_ranks=2)
    )

    def call(*arguments: str) -> tuple[int, list[dict]]:
        out = ["--out", str(tmp_path / "out"), "--json", str(tmp_path / "rows.json")]
        code = main(["converge", "--worlds", "1", *out, *arguments])
        return code, json.loads((tmp_path / "rows.json").read_text())["rows"]

    return call


def test_converge_writes_rows_pictures_page_and_verdicts(converge, tmp_path, capsys):
    code, rows = converge("--worlds", "2")
    assert code == 0
    assert [(row["optimizer"], row["codec"], row["mode"], row["seed"]) for row in rows] == [
        ("AdamW", "torch:fp32", "dense", 0),
        ("AdamW", "torch:fp32", "dense", 1),
        ("AdamW", "q4", "owner", 0),
        ("OneBitAdam", "sign1", "momentum", 0),
        ("AdamW", "topk:ratio=0.01", "none", 0),
    ]
    for row in rows:
        assert set(row) == ROW_KEYS
        assert row["final_loss"] < row["initial_loss"]
        assert row["curve"]["steps"] == list(range(1, 13))
        assert row["curve"]["wire_bytes"][-1] == row["wire_bytes"]
        assert len(row["curve"]["losses"]) == 12
    dense, _, q4, sign1, topk = (row["wire_bytes"] for row in rows)
    assert topk < q4 < dense / 6
    # 2 of 12 steps travel dense, the others with 1.1 bits.
    assert 2 / 12 * dense < sign1 < (2 / 12 + 1.2 / 32 + 0.02) * dense
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["convex_AdamW.png", "index.html", "quick"]
    page = (out / "index.html").read_text()
    assert "All 1 demands are met." in page
    shown = capsys.readouterr().out
    assert "5/5 convex" in shown
    assert re.search(r"OneBitAdam +sign1 +momentum.*reported", shown)
    assert re.search(r"AdamW +q4 +owner.*within", shown)


def test_converge_goes_on_where_it_stopped_with_the_same_rows(converge, tmp_path, capsys, monkeypatch):
    _, rows = converge()
    finished = sorted((tmp_path / "out" / "quick").glob("*.json"))
    assert len(finished) == 5
    for path in finished[:2]:
        path.unlink()
    finished[2].write_text('{"cut off')
    assert converge()[1] == rows
    assert "2 of 5 trainings are in" in capsys.readouterr().out
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", lambda _: pytest.fail("start"))
    assert converge()[1] == rows


@pytest.mark.parametrize("change", ["settings", "versions", "fresh"])
def test_converge_repeats_what_was_trained_otherwise(change, converge, tmp_path, monkeypatch):
    converge("--codecs", "q4")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/quick").iterdir()}
    arguments = ["--codecs", "q4"]
    if change == "settings":
        from dataclasses import replace

        longer = Suite("quick", (replace(CONTEST, steps=13),), sigmas=2, num_ranks=2)
        monkeypatch.setitem(suites.SUITES, "quick", longer)
    elif change == "versions":
        place = {"gradferry": "another"}
        monkeypatch.setattr("gradferry.converge.environment", lambda: place)
    else:
        arguments.append("--fresh")
    converge(*arguments)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/quick").iterdir()}
    assert set(after) == set(before)
    assert all(after[path] > before[path] for path in before)


def test_converge_fails_when_a_codec_leaves_its_band(converge, tmp_path, capsys, monkeypatch):
    _, rows = converge("--codecs", "q4")
    document = json.loads((tmp_path / "rows.json").read_text())
    document["rows"][-1]["final_loss"] *= 3
    (tmp_path / "worse.json").write_text(json.dumps(document))
    assert main(["converge", "--from", str(tmp_path / "worse.json"), "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "Not met: convex, AdamW, q4, owner: OUTSIDE" in shown


def test_converge_reports_a_file_without_training(converge, tmp_path, monkeypatch):
    _, rows = converge()
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", lambda _: pytest.fail("start"))
    document = tmp_path / "document.md"
    document.write_text(
        "<!-- results of gradferry converge -->\n<!-- end of results of gradferry converge -->\n"
    )
    again = [str(tmp_path / "rows.json"), "--out", str(tmp_path / "again")]
    assert main(["converge", "--from", *again, "--markdown", str(document)]) == 0
    assert (tmp_path / "again" / "index.html").read_text() == (
        tmp_path / "out" / "index.html"
    ).read_text()
    assert "| OneBitAdam | sign1 | momentum | 1 |" in document.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worlds", "0"], "--worlds: 0 must be at least 1"),
        (["--tasks", "convexx"], "did you mean 'convex'"),
        (["--out", "/dev/null/results"], "cannot make this folder"),
        (["--from", "/dev/null"], "/dev/null cannot be read"),
    ],
)
def test_converge_refuses_before_it_starts_a_process(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", lambda _: pytest.fail("start"))
    assert main(["converge", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_converge_killed_at_any_time_keeps_what_was_finished(tmp_path):
    part = ["--quick", "--tasks", "digits", "--codecs", "q8", "--optimizers", "SGD"]
    command = [sys.executable, "-m", "gradferry", "converge", *part, "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        while "2/" not in (line := process.stdout.readline()):
            assert line, "ended before two trainings were done"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finished = list((tmp_path / "quick").glob("*.json"))
    assert len(finished) >= 2
    assert all("row" in json.loads(path.read_text()) for path in finished)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert f"{len(finished)} of " in ended.stdout
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_convergence_document_shows_the_committed_results(tmp_path):
    results = ROOT / "benchmarks/results/convergence.json"
    document = ROOT / "docs/convergence.md"
    if not results.exists():
        pytest.skip("no results are committed")
    copy = tmp_path / "convergence.md"
    copy.write_text(document.read_text())
    arguments = ["--from", str(results), "--out", str(tmp_path), "--markdown", str(copy)]
    main(["converge", *arguments])
    assert copy.read_text() == document.read_text()
