"""One HTML page that needs nothing else: tables, curves and environment, in light and dark."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from gradferry_lab.output.table import Table

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --paper: #ffffff; --line: #d5dbe1;
        --soft: #5b6875; --band: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --paper: #000000; --line: #333a42; --soft: #9aa5b0; --band: #12161b; }
}
body { margin: 2rem auto; max-width: 68rem; padding: 0 1rem; color: var(--ink);
       background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; font-weight: 600; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; font-weight: 600; margin: 2.5rem 0 .5rem; }
.subtitle, .notes, nav, dl { color: var(--soft); font-size: .9rem; }
.subtitle { margin: 0 0 1.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .55rem; text-align: right; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th { vertical-align: bottom; font-weight: 600; font-size: .9rem; white-space: pre-line; }
th.name, td.name { text-align: left; }
td.name { font: .9em ui-monospace, monospace; }
tbody tr:hover { background: var(--band); }
img { width: 100%; min-width: 40rem; height: auto; margin: 1.5rem 0 1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; }
"""


@dataclass(frozen=True)
class Picture:
    """The same PNG for both colour schemes."""

    description: str
    light: bytes
    dark: bytes


@dataclass(frozen=True)
class Section:
    """A table and the pictures that belong to it. Verdict: a sentence for the top of the page."""

    table: Table
    pictures: Sequence[Picture] = ()
    verdict: str = ""


def html_page(
    title: str, subtitle: str, sections: Sequence[Section], environment: Mapping[str, Any]
) -> str:
    """Returns the page as text. Every string is escaped; pictures are embedded.

    A section whose table has the page's title gets no heading of its own, and its verdict no name;
    several sections have contents.
    """
    facts = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in environment.items()
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="subtitle">{escape(subtitle)}</p>\n'
        f"{''.join(_verdict(each, title) for each in sections)}"
        f"{_contents(sections) if len(sections) > 1 else ''}"
        f"{''.join(_section(number, each, title) for number, each in enumerate(sections))}"
        f"<dl>{facts}</dl>\n"
        f"</body>\n</html>\n"
    )


def _verdict(section: Section, page_title: str) -> str:
    if not section.verdict:
        return ""
    title = section.table.title
    of = "" if title == page_title else f"{escape(title)}: "
    return f"<p>{of}{escape(section.verdict)}</p>\n"


def _contents(sections: Sequence[Section]) -> str:
    links = "".join(
        f'<li><a href="#section{number}">{escape(section.table.title)}</a></li>'
        for number, section in enumerate(sections)
    )
    return f"<nav><ol>{links}</ol></nav>\n"


def _section(number: int, section: Section, page_title: str) -> str:
    table = section.table
    heading = "" if table.title == page_title else f"<h2>{escape(table.title)}</h2>\n"
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.remarks())
    pictures = "".join(f"{_picture(picture)}\n" for picture in section.pictures)
    return (
        f'<section id="section{number}">\n{heading}{pictures}{_table(table)}\n'
        f'<div class="notes">{notes}</div>\n</section>\n'
    )


def _table(table: Table) -> str:
    kinds = ["" if column.is_number else ' class="name"' for column in table.columns]
    head = "".join(
        f"<th{kind}>{escape(column.title)}</th>"
        for kind, column in zip(kinds, table.columns, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, cells, strict=True))
        + "</tr>\n"
        for cells in table.cells()
    )
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody>\n</table></div>"
    )


def _picture(picture: Picture) -> str:
    return (
        f'<div class="scroll"><picture><source srcset="{_data_url(picture.dark)}" '
        f'media="(prefers-color-scheme: dark)">'
        f'<img src="{_data_url(picture.light)}" alt="{escape(picture.description)}">'
        f"</picture></div>"
    )


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
