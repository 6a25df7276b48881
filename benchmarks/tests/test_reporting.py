"""Tables, JSON, curves, pages, medians with intervals: their content, not their looks."""

from __future__ import annotations

import io
import json
import random
import re
import shlex
import sys
from datetime import datetime
from math import comb

import pytest
from gradferry.ddp.interval import coverage_of, interval_of_median
from gradferry.errors import ConfigError
from gradferry_lab.output.curves import Axis, Curve, draw_loss_curves, running_mean
from gradferry_lab.output.html import Picture, Section, html_page
from gradferry_lab.output.json_file import environment, read_json, require_replaceable, write_json
from gradferry_lab.output.paired import (
    coverage_note,
    coverage_text,
    paired_difference,
    paired_ratio,
)
from gradferry_lab.output.progress import (
    PartDone,
    PieceDone,
    StepDone,
    TrainingProgress,
    WorkProgress,
)
from gradferry_lab.output.table import Column, Table, markdown_table, print_table, replace_section
from rich.console import Console

PNG_START = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def table() -> Table:
    columns = (
        Column("hook", lambda row: row["hook"], is_number=False),
        Column("bytes\nsent", lambda row: f"{row['sent']:,}"),
    )
    rows = [{"hook": "q4[bold]", "sent": 1234567}, {"hook": "<b>&", "sent": 0}]
    return Table("A <title>", columns, rows, notes=["one [note]"])


def printed(width: int, table: Table) -> str:
    file = io.StringIO()
    print_table(Console(file=file, width=width), table)
    return file.getvalue()


def test_print_table_shows_cells_as_they_are_however_narrow(table):
    text = printed(80, table)
    assert re.search(r"q4\[bold\] +1,234,567\n", text)
    assert "one [note]" in text
    assert printed(8, table) == printed(200, table)


def test_write_json_has_schema_environment_and_rows(tmp_path):
    path = tmp_path / "new" / "rows.json"
    rows = [{"hook": "q4", "losses": [1.5, float("nan")], "ratio": float("inf")}]
    write_json(path, rows, results_of="demo")
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert document["results_of"] == "demo"
    place = dict(document["environment"])
    assert datetime.fromisoformat(place.pop("date")).tzinfo is not None
    assert shlex.split(place.pop("command"))[1:] == sys.argv[1:]
    assert place == environment()
    assert list(place) == ["gradferry", "torch", "python", "cpu", "cores", "isa", "os"]
    assert all(place.values())
    assert document["rows"] == [{"hook": "q4", "losses": [1.5, None], "ratio": None}]
    assert read_json(path) == document


def test_write_json_gives_every_row_a_line(tmp_path):
    rows = [{"row": n, "list": [1, 2]} for n in range(3)]
    write_json(tmp_path / "j", rows, {"cpu": "another"}, results_of="demo")
    text = (tmp_path / "j").read_text()
    assert [line for line in text.splitlines() if "row" in line][1:] == [
        '{"row": 0, "list": [1, 2]},',
        '{"row": 1, "list": [1, 2]},',
        '{"row": 2, "list": [1, 2]}',
    ]
    assert json.loads(text)["environment"] == {"cpu": "another"}


def test_a_file_of_something_else_is_not_replaced(tmp_path):
    path = tmp_path / "j"
    require_replaceable(path, "demo")
    write_json(path, [], results_of="demo")
    require_replaceable(path, "demo")
    with pytest.raises(ConfigError, match=r"of 'demo' and not of 'doctor'.* name another file"):
        require_replaceable(path, "doctor")
    whole = path.read_text()
    for damaged in (whole[:-4], whole.replace("rows", "row"), "", "[]", '{"schema": 2}'):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match=str(path)):
            require_replaceable(path, "demo")


def test_write_json_leaves_the_old_file_when_it_fails(tmp_path):
    for rows in ([], [{"row": 1}]):
        write_json(tmp_path / "j", rows, results_of="demo")
        assert read_json(tmp_path / "j")["rows"] == rows
    with pytest.raises(TypeError):
        write_json(tmp_path / "j", [{"row": object()}], results_of="demo")
    assert read_json(tmp_path / "j")["rows"] == [{"row": 1}]
    assert [path.name for path in tmp_path.iterdir()] == ["j"]


@pytest.mark.parametrize("content", ["", "[1]", '{"schema": 2, "rows": []}'])
def test_read_json_refuses_other_files(content, tmp_path):
    (tmp_path / "j").write_text(content)
    with pytest.raises(ConfigError, match="j "):
        read_json(tmp_path / "j")


def test_markdown_table_has_every_cell_on_one_line(table):
    assert markdown_table(table) == (
        "**A <title>**\n\n| hook | bytes sent |\n| --- | ---: |\n"
        "| q4[bold] | 1,234,567 |\n| <b>& | 0 |\n\none [note]\n"
    )
    bars = Table("t", [Column("a|b", lambda row: row["x"])], [{"x": "|x|"}])
    assert "| a\\|b |\n| ---: |\n| \\|x\\| |" in markdown_table(bars)


def test_replace_section_touches_nothing_else(tmp_path):
    path = tmp_path / "d.md"
    path.write_text("before\n<!-- x -->\nold\n<!-- end of x -->\nafter\n")
    for _ in range(2):
        replace_section(path, "x", "new")
        assert path.read_text() == ("before\n<!-- x -->\n\nnew\n\n<!-- end of x -->\nafter\n")


@pytest.mark.parametrize("text", ["", "<!-- x -->\n", "<!-- end of x -->\n<!-- x -->\n"])
def test_replace_section_needs_its_place(text, tmp_path):
    path = tmp_path / "d.md"
    path.write_text(text)
    with pytest.raises(ConfigError, match="<!-- x -->"):
        replace_section(path, "x", "new")
    assert path.read_text() == text


def test_draw_loss_curves_gives_a_png_and_draws_bands_on_a_log_axis():
    assert running_mean([4.0, 2.0, 6.0, 1.0], 2) == [4.0, 3.0, 4.0, 3.5]
    curves = [Curve("q4", [3.0, 2.0], [10, 20]), Curve("off", [3.0, float("nan")], [0, 0])]
    assert draw_loss_curves(curves, Axis("nats"), "dark").startswith(PNG_START)
    axis = Axis("gap", smoothed=False, is_log=True)
    plain, banded = (
        draw_loss_curves([Curve("q4", [1.0, 1e-3], [10, 20], [5, 10], low, high)], axis)
        for low, high in (((), ()), ([0.5, 1e-4], [2.0, 1e-2]))
    )
    assert plain.startswith(PNG_START)
    assert plain != banded


def test_html_page_is_self_contained_and_escaped(table):
    sections = [Section(table, [Picture("two curves", b"light", b"dark")])]
    page = html_page("A <page>", "from <here>", sections, {"cpu": "A&B"})
    assert "q4[bold]" in page
    assert "&lt;b&gt;&amp;" in page
    assert "<h1>A &lt;page&gt;</h1>" in page
    assert "<h2>A &lt;title&gt;</h2>" in page
    assert "A&amp;B" in page
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', page)
    assert len(sources) == 2
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page
    page = html_page(table.title, "", [Section(table), Section(table)], {})
    assert "<h2>" not in page  # a title is said once
    assert page.count("<table>") == 2


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_shows_hook_and_loss(is_terminal):
    file = io.StringIO()
    with TrainingProgress(Console(file=file, force_terminal=is_terminal, width=80)) as progress:
        for step in (1, 2, 3):
            progress(StepDone("q4", step, 3, 2.5))
    assert "q4" in file.getvalue()
    assert "3/3" in file.getvalue()
    assert "2.500" in file.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_work_progress_shows_pieces_and_time_left(is_terminal):
    now = [0.0]
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=120)
    with WorkProgress(console, 3, 100.0, lambda: now[0]) as progress:
        now[0] = 10.0
        progress.part_done(PartDone(0, "first", 0.5, 20.0))
        assert progress.time_left() == ""  # most of these seconds went into starting
        progress.piece_done(PieceDone(0, "first: loss 1.5", 20.0))
        assert progress.time_left() == "about 40 s left"
        progress.part_done(PartDone(1, "second", 0.25, 80.0))
        assert progress.time_left() == "about 15 s left"
        now[0] = 19.9  # a line is 9.9 s old
        progress.part_done(PartDone(1, "second", 0.275, 80.0))
        now[0] = 20.0
        progress.part_done(PartDone(1, "second", 0.3, 80.0))
    shown = file.getvalue()
    assert "1/3" in shown
    if is_terminal:
        assert "second" in shown
    else:
        assert shown == (
            "0/3 first: 50%\n"
            "1/3 first: loss 1.5; about 40 s left\n"
            "1/3 second: 30%; about 25 s left\n"
        )


# --- medians ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k"),
    # From tables of the binomial distribution: k - 1 is its 2.5 % point for n fair coins.
    [(6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (25, 8), (30, 10)],
)
def test_interval_runs_between_the_right_order_statistics(n: int, k: int) -> None:
    values = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(values)
    interval = interval_of_median(values)
    assert (interval.low, interval.high) == (k, n + 1 - k)
    assert interval.median == (n + 1) / 2
    below = sum(comb(n, i) for i in range(k)) / 2**n
    assert 2 * below <= 0.05 < 2 * (below + comb(n, k) / 2**n)
    assert coverage_of(n) == 1 - 2 * below


@pytest.mark.parametrize(
    # All of n fair coins show the same side with probability 2 / 2^n.
    ("n", "coverage", "text"),
    [(1, 0, "0 %"), (2, 0.5, "50 %"), (5, 0.9375, "93 %"), (6, 0.96875, "96 %")],
)
def test_few_rounds_promise_no_more_than_they_hold(n: int, coverage: float, text: str) -> None:
    assert interval_of_median(range(n))[1:] == (0, n - 1)
    assert coverage_of(n) == coverage
    assert coverage_text(n) == text
    assert coverage_note(n).startswith(f"{text}: ")
    assert ("6 give" in coverage_note(n)) == (n < 6)


def test_pairs_are_compared_within_their_round() -> None:
    # A machine that slows down tenfold meanwhile changes no ratio of a round.
    baseline = [1.0, 10.0, 100.0]
    times = [2.0, 20.0, 200.0]
    assert paired_ratio(times, baseline) == (2.0, 2.0, 2.0)
    assert paired_difference(times, baseline) == (10.0, 1.0, 100.0)
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio(times, baseline[:2])
