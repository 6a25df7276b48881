"""`gradferry converge` as a user runs it, with a suite of a few steps."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from gradferry_lab.cli import main
from gradferry_lab.converge import suite as suites
from gradferry_lab.converge.suite import DENSE, MOMENTUM, RULER, Contest, Contestant, Near, Suite
from gradferry_lab.workloads import load_task

ROOT = Path(__file__).parents[2]
ROW_KEYS = {
    "task", "optimizer", "codec", "mode", "momentum", "warmup", "seed", "final_loss",
    "final_metric", "wire_bytes", "suite", "source", "ranks", "steps", "initial_loss", "curve",
}  # fmt: skip
CONTEST = Contest(
    task="convex",
    steps=12,
    cost=0.01,
    contestants=(
        Contestant("AdamW", RULER, DENSE),
        Contestant("AdamW", "q4", "owner", Near(0.5)),
        Contestant("OneBitAdam", "sign1", MOMENTUM, warmup="exact"),
        Contestant("AdamW", "topk:ratio=0.01", "none"),
    ),
    ruler_seeds=2,
    seeds=1,
    num_ranks=2,
)


SUITE = Suite("quick", (CONTEST,), sigmas=2)


@pytest.fixture(autouse=True)
def small_suite(monkeypatch):
    """A few steps in place of what --quick trains."""
    monkeypatch.setitem(suites.SUITES, "quick", SUITE)


@dataclass(frozen=True)
class Trained:
    """What one call of the command has left behind."""

    code: int
    folder: Path  # with out/ and rows.json
    shown: str

    def document(self) -> dict:
        return json.loads((self.folder / "rows.json").read_text())

    def rows(self) -> list[dict]:
        return self.document()["rows"]

    def write(self, document: dict) -> str:
        path = self.folder / "changed.json"
        path.write_text(json.dumps(document))
        return str(path)


def converge(folder: Path, *arguments: str) -> int:
    files = ["--out", str(folder / "out"), "--json", str(folder / "rows.json")]
    return main(["converge", "--worlds", "1", *files, *arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    folder, shown = tmp_path_factory.mktemp("converge"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setitem(suites.SUITES, "quick", SUITE)
        code = converge(folder)
    return Trained(code, folder, shown.getvalue())


@pytest.fixture
def copy(trained, tmp_path) -> Trained:
    shutil.copytree(trained.folder, tmp_path, dirs_exist_ok=True)
    return replace(trained, folder=tmp_path)


def test_converge_writes_a_row_for_every_training(trained):
    assert trained.code == 0
    rows = trained.rows()
    assert [(row["optimizer"], row["codec"], row["mode"], row["seed"]) for row in rows] == [
        ("AdamW", "torch:fp32", "dense", 0),
        ("AdamW", "torch:fp32", "dense", 1),
        ("AdamW", "q4", "owner", 0),
        ("OneBitAdam", "sign1", "momentum", 0),
        ("AdamW", "topk:ratio=0.01", "none", 0),
    ]
    for row in rows:
        assert set(row) == ROW_KEYS
        assert (row["task"], row["suite"], row["ranks"], row["steps"]) == ("convex", "quick", 2, 12)
        assert row["final_loss"] < row["initial_loss"]
        assert row["curve"]["steps"] == list(range(1, 13))
        assert row["curve"]["wire_bytes"][-1] == row["wire_bytes"]
        assert len(row["curve"]["losses"]) == 12
    assert [row["warmup"] for row in rows] == [None, None, None, "exact", None]
    assert [row["momentum"] for row in rows] == [None, None, None, 0.9, None]
    dense, _, q4, sign1, topk = (row["wire_bytes"] for row in rows)
    assert topk < q4 < dense / 6
    # 3 of 12 steps travel dense, the others with 1.1 bits of 32 and headers.
    assert 3 / 12 * dense < sign1 < (3 / 12 + 2 / 32) * dense


def test_converge_shows_verdicts_pictures_and_a_page(trained):
    out = trained.folder / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "convex_AdamW.png",
        "index.html",
        "quick",
    ]
    assert "All 1 demands are met." in (out / "index.html").read_text()
    assert trained.shown.startswith("5 trainings, 1 at a time.\n")
    assert "5/5 convex" in trained.shown
    assert re.search(r"OneBitAdam +sign1 +momentum 0.9 +exact.*reported", trained.shown)
    assert re.search(r"AdamW +q4 +owner.*within", trained.shown)


@pytest.mark.slow
def test_converge_goes_on_where_it_stopped_with_the_same_rows(copy, capsys):
    rows = copy.rows()
    finished = sorted((copy.folder / "out/quick").glob("*.json"))
    assert len(finished) == 5
    finished[0].unlink()
    finished[1].write_text('{"cut off')
    assert converge(copy.folder) == 0
    assert "3 of 5 trainings are in" in capsys.readouterr().out
    assert copy.rows() == rows


@pytest.mark.usefixtures("no_process")
def test_converge_trains_nothing_twice(copy):
    rows = copy.rows()
    (copy.folder / "rows.json").unlink()
    assert converge(copy.folder) == 0
    assert copy.rows() == rows


def test_converge_trains_only_what_a_file_does_not_have(copy, monkeypatch, capsys):
    document = copy.document()
    (left_out,) = (row for row in document["rows"] if row["codec"] == "sign1")
    document["rows"].remove(left_out)
    known = copy.write(document)
    shutil.rmtree(copy.folder / "out")
    asked_for = []

    def trainings_of(trainings, _worlds, keep, _progress):
        for training in trainings:
            asked_for.append(training)
            keep(training, left_out)

    monkeypatch.setattr("gradferry_lab.converge.run_trainings", trainings_of)
    rows = copy.rows()
    assert converge(copy.folder, "--known", known) == 0
    assert [training.contestant.codec for training in asked_for] == ["sign1"]
    assert copy.rows() == rows
    document["environment"]["torch"] = "1.0"
    capsys.readouterr()
    assert converge(copy.folder, "--known", copy.write(document)) == 2
    assert "its trainings had torch 1.0 and not" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["settings", "versions", "data", "fresh"])
def test_converge_repeats_what_was_trained_otherwise(change, copy, monkeypatch):
    asked_for = []
    monkeypatch.setattr(
        "gradferry_lab.converge.run_trainings", lambda trainings, *_: asked_for.extend(trainings)
    )
    arguments = []
    if change == "settings":
        longer = replace(SUITE, contests=(replace(CONTEST, steps=13),))
        monkeypatch.setitem(suites.SUITES, "quick", longer)
    elif change == "versions":
        monkeypatch.setattr("gradferry_lab.converge.environment", lambda: {"gradferry": "another"})
    elif change == "data":
        other = replace(load_task("convex"), source="another least squares")
        monkeypatch.setattr("gradferry_lab.converge.load_task", lambda _: other)
        arguments += ["--known", str(copy.folder / "rows.json")]
    else:
        arguments.append("--fresh")
    converge(copy.folder, *arguments)
    assert asked_for == list(suites.SUITES["quick"].trainings())


def test_converge_fails_when_a_codec_leaves_its_band(copy, capsys):
    document = copy.document()
    document["rows"][2]["final_loss"] *= 3
    source = ["--from", copy.write(document), "--out", str(copy.folder)]
    assert main(["converge", *source]) == 1
    assert "Not met: convex, AdamW, q4, owner: OUTSIDE" in capsys.readouterr().out
    assert "1 of 1 demands are not met" in (copy.folder / "index.html").read_text()


def test_converge_shows_the_data_of_the_rows_not_of_this_machine(copy, capsys, monkeypatch):
    other = replace(load_task("convex"), source="another least squares")
    monkeypatch.setattr("gradferry_lab.converge.pages.load_task", lambda _: other)
    document = copy.document()
    known = ["converge", "--out", str(copy.folder), "--from"]
    assert main([*known, copy.write(document)]) == 0
    assert "Least squares, 16,384 weights" in capsys.readouterr().out
    del document["rows"][0]["source"]
    assert main([*known, copy.write(document)]) == 2
    assert "its rows do not say which data" in capsys.readouterr().err


@pytest.mark.usefixtures("no_process")
def test_converge_reports_a_file_without_training(copy, tmp_path):
    page = (copy.folder / "out/index.html").read_text()
    document = tmp_path / "document.md"
    document.write_text(
        "<!-- results of gradferry converge -->\n<!-- end of results of gradferry converge -->\n"
    )
    again = ["--from", str(tmp_path / "rows.json"), "--out", str(tmp_path / "again")]
    assert main(["converge", *again, "--markdown", str(document)]) == 0
    assert (tmp_path / "again/index.html").read_text() == page
    assert "| OneBitAdam | sign1 | momentum 0.9 | exact | 1 |" in document.read_text()


# Long enough for a kill to come between the second training and the last; nothing is demanded.
STRETCHED = replace(
    CONTEST,
    steps=200,
    contestants=tuple(replace(one, demand=None) for one in CONTEST.contestants),
)


def converge_stretched(out: str) -> None:
    """A process of its own that trains STRETCHED."""
    suites.SUITES["quick"] = replace(SUITE, contests=(STRETCHED,))
    sys.exit(main(["converge", "--worlds", "1", "--out", out]))


@pytest.mark.slow
def test_converge_killed_at_any_time_keeps_what_was_finished(tmp_path):
    script = f"import test_converge; test_converge.converge_stretched({str(tmp_path)!r})"
    command, here = [sys.executable, "-c", script], Path(__file__).parent
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=here)
    try:
        while "2/" not in (line := process.stdout.readline()):
            assert line, "ended before two trainings were done"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finished = list((tmp_path / "quick").glob("*.json"))
    assert len(finished) >= 2
    assert all("row" in json.loads(path.read_text()) for path in finished)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=here)
    assert f"{len(finished)} of " in ended.stdout
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.torch_core
def test_convergence_document_shows_the_committed_results(tmp_path, monkeypatch):
    monkeypatch.setattr("gradferry_lab.converge.pages.draw_loss_curves", lambda *_: b"a picture")
    results = ROOT / "benchmarks/results/convergence.json"
    document = ROOT / "docs/results/convergence.md"
    if not results.exists():
        pytest.skip("no results are committed")
    copy = tmp_path / "convergence.md"
    copy.write_text(document.read_text())
    arguments = ["--from", str(results), "--out", str(tmp_path), "--markdown", str(copy)]
    main(["converge", *arguments])
    assert copy.read_text() == document.read_text()


def quick_of(folder: Path, *arguments: str) -> Trained:
    files = ["--out", str(folder), "--json", str(folder / "rows.json")]
    return Trained(main(["converge", "--quick", *arguments, *files]), folder, "")


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Trained:
    """`converge --quick` itself, the part of it that every change trains."""
    part = ["--tasks", "digits", "convex", "--codecs", "q4", "sign1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(suites.SUITES, "quick", suites.QUICK)
        return quick_of(tmp_path_factory.mktemp("quick"), *part)


@pytest.fixture(scope="module")
def all_of_quick(tmp_path_factory) -> Trained:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(suites.SUITES, "quick", suites.QUICK)
        return quick_of(tmp_path_factory.mktemp("all_of_quick"))


PARTS = [
    pytest.param("quick", ("sign1",), id="part"),
    pytest.param("all_of_quick", ("sign1", "topk:ratio=0.01"), id="all", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("part", "coarse"), PARTS)
def test_quick_meets_all_demands(part, coarse, request):
    trained = request.getfixturevalue(part)
    assert trained.code == 0, f"see {trained.folder / 'index.html'}"


@pytest.mark.parametrize(("part", "coarse"), PARTS)
def test_coarse_codecs_reach_the_optimum_with_error_feedback_alone(part, coarse, request):
    """The workers of the convex task disagree. Its demands are those of the test beside this."""
    rows = request.getfixturevalue(part).rows()
    convex = {(row["codec"], row["mode"]): row for row in rows if row["task"] == "convex"}
    for codec in coarse:
        reached = convex[codec, "both"]
        assert reached["final_loss"] <= 1e-6 * reached["initial_loss"]
        gaps = convex[codec, "none"]["curve"]["losses"]
        assert gaps[-1] > 0.01 * gaps[0]
        assert gaps[-1] > 0.8 * gaps[len(gaps) * 3 // 4]
