"""Tables, JSON, curves and page: their content, not their looks."""

from __future__ import annotations

import io
import json
import re

import pytest
from gradferry.reporting.curves import Curve, draw_loss_curves, running_mean
from gradferry.reporting.environment import environment
from gradferry.reporting.html import Picture, html_page
from gradferry.reporting.json_file import write_json
from gradferry.reporting.progress import StepDone, TrainingProgress
from gradferry.reporting.table import Column, Table, print_table
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


def test_print_table_shows_cells_as_they_are(table):
    text = printed(80, table)
    assert re.search(r"q4\[bold\] +1,234,567\n", text)
    assert "one [note]" in text


def test_print_table_cuts_nothing_off_when_narrow(table):
    assert printed(8, table) == printed(200, table)


def test_write_json_has_schema_environment_and_rows(tmp_path):
    path = tmp_path / "new" / "rows.json"
    write_json(path, [{"hook": "q4", "losses": [1.5, float("nan")], "ratio": float("inf")}])
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert document["environment"] == environment()
    assert document["rows"] == [{"hook": "q4", "losses": [1.5, None], "ratio": None}]


def test_environment_names_versions_and_machine():
    facts = environment()
    assert list(facts) == ["gradferry", "torch", "python", "cpu", "cores", "isa", "os"]
    assert all(facts.values())


def test_running_mean_starts_with_what_there_is():
    assert running_mean([4.0, 2.0, 6.0, 1.0], 2) == [4.0, 3.0, 4.0, 3.5]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_draw_loss_curves_gives_a_png(theme):
    curves = [Curve("q4", [3.0, 2.0], [10, 20]), Curve("off", [3.0, float("nan")], [0, 0])]
    assert draw_loss_curves(curves, "nats", theme).startswith(PNG_START)


def test_html_page_is_self_contained_and_escaped(table):
    page = html_page(table, "from <here>", Picture("two curves", b"light", b"dark"), {"cpu": "A&B"})
    assert "q4[bold]" in page
    assert "&lt;b&gt;&amp;" in page
    assert "A &lt;title&gt;" in page
    assert "A&amp;B" in page
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', page)
    assert len(sources) == 2
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_shows_hook_and_loss(is_terminal):
    file = io.StringIO()
    with TrainingProgress(Console(file=file, force_terminal=is_terminal, width=80)) as progress:
        for step in (1, 2, 3):
            progress(StepDone("q4", step, 3, 2.5))
    assert "q4" in file.getvalue()
    assert "3/3" in file.getvalue()
    assert "2.500" in file.getvalue()
