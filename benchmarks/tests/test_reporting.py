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
from pathlib import Path

import pytest
from gradferry.ddp.trial import coverage_of, interval_of_median
from gradferry.errors import ConfigError
from gradferry_lab.bench.codec import codec_table
from gradferry_lab.bench.collective import collective_table
from gradferry_lab.bench.train import train_table
from gradferry_lab.demo import demo_table
from gradferry_lab.output.curves import Curve, draw_loss_curves, running_mean
from gradferry_lab.output.json_file import environment, read_json, write_json
from gradferry_lab.output.paired import (
    coverage_note,
    paired_difference,
    paired_ratio,
)
from gradferry_lab.output.progress import Doing, StatusLine
from gradferry_lab.output.table import Column, Table, markdown_table, print_table
from rich.console import Console


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


def test_a_damaged_file_of_results_is_named(tmp_path):
    path = tmp_path / "j"
    for damaged in ("", "[]", '{"schema": 2}', '{"schema": 1'):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match=str(path)):
            read_json(path)


def test_markdown_table_has_every_cell_on_one_line(table):
    assert markdown_table(table) == (
        "**A <title>**\n\n| hook | bytes sent |\n| --- | ---: |\n"
        "| q4[bold] | 1,234,567 |\n| <b>& | 0 |\n\none [note]\n"
    )
    bars = Table("t", [Column("a|b", lambda row: row["x"])], [{"x": "|x|"}])
    assert "| a\\|b |\n| ---: |\n| \\|x\\| |" in markdown_table(bars)


def test_draw_loss_curves_gives_a_png():
    assert running_mean([4.0, 2.0, 6.0, 1.0], 2) == [4.0, 3.0, 4.0, 3.5]
    curves = [Curve("q4", [3.0, 2.0], [10, 20]), Curve("off", [3.0, float("nan")], [0, 0])]
    timed = [Curve("q4", [3.0, 2.0], [10, 20], [0.5, 0.25])]
    for each in (curves, timed):
        assert draw_loss_curves(each, "nats").startswith(b"\x89PNG\r\n\x1a\n")


def test_a_status_without_a_terminal_is_a_line_now_and_then_with_the_time_left():
    now, file = [0.0], io.StringIO()
    with StatusLine(Console(file=file), clock=lambda: now[0]) as status:
        for seconds, share in ((0.0, 0.0), (5.0, 0.25), (20.0, 0.5)):
            now[0] = seconds
            status(Doing(f"at {share}", share))
        status.print("a piece is done")
    assert file.getvalue() == "at 0.0\nat 0.5; about 20 s left\na piece is done\n"


RESULTS = Path(__file__).parents[1] / "results"


@pytest.mark.parametrize(
    ("name", "table_of"),
    [
        ("train_1gbit", train_table),
        ("train_1gbit_2x4", train_table),
        ("train_1gbit_hsdp", train_table),
        ("collective_h100", collective_table),
        ("codec_h100", lambda rows: codec_table(rows, "a GPU")),
        ("demo", demo_table),
    ],
)
def test_committed_results_fit_80_columns_and_every_column_is_shown_or_named(name, table_of):
    made = table_of(read_json(RESULTS / f"{name}.json")["rows"])
    lines = on_terminal(made)
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    for column in made.columns:
        assert any(part in line for line in lines for part in column.title.split("\n"))
    choices = {"2x4": ["exchange"], "hsdp": ["exchange", "chosen"], "1gbit": ["chosen"]}
    found = [column.title for column in made.columns if column.title in ("exchange", "chosen")]
    assert found == choices.get(name.rpartition("_")[2], [])


def on_terminal(table: Table, *, wide: bool = False) -> list[str]:
    """The lines on a terminal of 80 columns."""
    file = io.StringIO()
    print_table(Console(file=file, width=80, force_terminal=True), table, wide=wide)
    return re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()).splitlines()


def test_the_greatest_detail_is_left_out_first_named_and_shown_with_wide():
    columns = [
        Column("hook", lambda row: row["hook"], is_number=False),
        Column("a", lambda row: "1" * 40, detail=1),
        Column("of\nformula", lambda row: "2" * 40, detail=2, note="What a formula is."),
        Column("c", lambda row: "3" * 20, detail=1),
    ]
    table = Table("A title", columns, [{"hook": "q4"}], ["A note."])
    narrow, wide = ("\n".join(on_terminal(table, wide=wide)) for wide in (False, True))
    assert ["1" * 40 in narrow, "2" * 40 in narrow, "3" * 20 in narrow] == [True, False, True]
    assert narrow.endswith("A note.\n--wide shows also: of formula.")
    assert "2" * 40 in wide
    assert wide.endswith("A note.\nWhat a formula is.")


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


def test_few_rounds_promise_no_more_than_they_hold() -> None:
    # All of n fair coins show the same side with probability 2 / 2^n.
    for n, text in ((1, "0 %"), (2, "50 %"), (5, "93 %"), (6, "96 %")):
        assert interval_of_median(range(n))[1:] == (0, n - 1)
        assert coverage_of(n) == 1 - 2 / 2**n
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
