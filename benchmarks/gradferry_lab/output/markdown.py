"""A table as Markdown, and the place in a document where a command keeps it."""

from __future__ import annotations

import re
from pathlib import Path

from gradferry.core.durable import durable_file
from gradferry.errors import ConfigError

from gradferry_lab.output.table import Table


def markdown_table(table: Table) -> str:
    """The table's title in bold, its rows, its notes."""
    heads = [_cell(column.title) for column in table.columns]
    rules = ["---:" if column.is_number else "---" for column in table.columns]
    rows = [[_cell(text) for text in cells] for cells in table.cells()]
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows)]
    notes = "".join(f"\n{note}\n" for note in table.notes)
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
    with durable_file(path) as file:
        file.write(f"{head}{begin}\n{content.strip()}\n\n{end}{tail}".encode())


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")
