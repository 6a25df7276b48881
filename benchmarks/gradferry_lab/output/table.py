"""Tables for the terminal and Markdown, from one description."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradferry.errors import ConfigError
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table as RichTable

_UNLIMITED = 10_000  # characters

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A heading, which may have several lines, and the text of a row's cell.

    Attributes:
        title: the heading.
        cell: gives the text of a row's cell.
        is_number: numbers stand right, names left.
        detail: 0: always shown; others are left out where a terminal is too narrow, the greatest
            first, and of equals the last.
        note: what it means, for a reader who sees the column.
    """

    title: str
    cell: Callable[[Row], str]
    is_number: bool = True
    detail: int = 0
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under columns, with remarks below. Headings and cells are plain text."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[str] = field(default=())

    def cells(self) -> list[list[str]]:
        """The text of every cell, row by row."""
        return [[column.cell(row) for column in self.columns] for row in self.rows]

    def remarks(self) -> list[str]:
        """The notes, and then those of the columns."""
        of_columns = " ".join(column.note for column in self.columns if column.note)
        return [*self.notes, *([of_columns] if of_columns else [])]


def print_table(console: Console, table: Table, *, wide: bool = True) -> None:
    """Prints the table and its remarks; on a narrow terminal lines wrap, but nothing is cut off.

    wide: with columns that do not fit the terminal. Without it, those that are details are named
    instead, and a name is broken before its options. A file always gets all columns.
    """
    shown = _rich_table(table)
    if console.is_terminal and not wide:
        table, shown = _fitted(console, table)
    print_line(console, table.title)
    console.print()
    needed = _width(console, shown)
    Console(file=console.file, width=needed, force_terminal=console.is_terminal).print(shown)
    console.print()
    for remark in table.remarks():
        print_line(console, remark)


def _fitted(console: Console, table: Table) -> tuple[Table, RichTable]:
    columns = list(table.columns)
    breaks = False
    while True:
        fitted = replace(table, columns=columns)
        shown = _rich_table(fitted, breaks=breaks)
        most = max(column.detail for column in columns)
        if _width(console, shown) <= console.width or (breaks and most == 0):
            break
        if breaks:
            columns.remove([column for column in columns if column.detail == most][-1])
        breaks = True
    left_out = [_cell(column.title) for column in table.columns if column not in columns]
    if left_out:
        more = f"--wide shows also: {', '.join(left_out)}."
        fitted = replace(fitted, notes=[*table.notes, more])
    return fitted, shown


def _width(console: Console, shown: RichTable) -> int:
    unlimited = console.options.update(width=_UNLIMITED)
    return Measurement.get(console, unlimited, shown).maximum


def _rich_table(table: Table, *, breaks: bool = False) -> RichTable:
    """breaks: names are broken before their options."""
    shown = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for column in table.columns:
        shown.add_column(
            escape(column.title),
            justify="right" if column.is_number else "left",
            vertical="bottom",
            no_wrap=True,
        )
    for row in table.rows:
        texts = (
            text.replace("+", "\n+") if breaks and not column.is_number else text
            for column in table.columns
            for text in [column.cell(row)]
        )
        shown.add_row(*map(escape, texts))
    return shown


def number(value: float | None, form: str) -> str:
    """A cell; "-" where there is no number."""
    return "-" if value is None else format(value, form)


def marked(count: int, is_measured: bool) -> str:
    """A cell of bytes, with a star where they are computed."""
    return f"{count:,}{' ' if is_measured else '*'}"


def print_line(console: Console, text: str) -> None:
    """Prints plain text: wrapped at words on a terminal, as one line into a file."""
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def markdown_table(table: Table) -> str:
    """The table's title in bold, its rows, its notes."""
    heads = [_cell(column.title) for column in table.columns]
    rules = ["---:" if column.is_number else "---" for column in table.columns]
    rows = [[_cell(text) for text in cells] for cells in table.cells()]
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows)]
    notes = "".join(f"\n{note}\n" for note in table.remarks())
    return f"**{table.title}**\n\n" + "\n".join(lines) + f"\n{notes}"


def replace_section(path: Path, name: str, content: str) -> None:
    """Puts `content` between the lines `<!-- name -->` and `<!-- end of name -->` of a file.

    Raises ConfigError when the file lacks them.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    head, found_begin, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise ConfigError(
            f"{path} has no place for results: it needs the lines {begin.strip()!r} and "
            f"{end.strip()!r}"
        )
    replace_file(path, f"{head}{begin}\n{content.strip()}\n\n{end}{tail}")


def replace_file(path: Path, text: str) -> None:
    """A kill leaves the old file or the new one."""
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")
