"""Writes docs/reference/command_line.md from the parsers of `gradferry`.

.venv/bin/python tools/command_line_page.py
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradferry_lab.cli import parser

Row = tuple[str, str]  # an option and its meaning

PAGE = Path(__file__).parents[1] / "docs/reference/command_line.md"
_HEAD = """# Command line

Made from the parsers of the command line. Columns and keys of results are defined
[here](../results/performance.md#measuring-it-yourself). Exit codes: 0; 1 for an error or a demand
that was not met; 2 for a wrong command line; 130 after Ctrl-C.
"""
_SHARED = "Options of several commands"


def page() -> str:
    """The page's text."""
    commands = list(_commands(parser()))
    used = Counter(row for _, command in commands for row in _rows(command))
    shared = [row for row, times in used.items() if times > 1]
    sections = [_section(name, command, shared) for name, command in commands]
    return "".join([_HEAD, *sections, f"\n## {_SHARED}\n\n", _table(shared)])


def _commands(
    of: argparse.ArgumentParser, prefix: str = "gradferry"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Commands without commands of their own."""
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield from _commands(each, f"{prefix} {name}")
            return
    yield prefix, of


def _section(name: str, command: argparse.ArgumentParser, shared: Sequence[Row]) -> str:
    description = _prose(command.description or "").removeprefix(f"`{name}`: ")
    rows = _rows(command)
    own = [row for row in rows if row not in shared]
    text = f"\n## {name}\n\n{description[:1].upper()}{description[1:]}\n"
    if own:
        text += f"\n{_table(own)}"
    if len(own) < len(rows):
        names = ", ".join(row[0].split(" ")[0] for row in rows if row in shared)
        text += f"\nAlso {names}: [below](#{_SHARED.lower().replace(' ', '-')}).\n"
    return text


def _rows(command: argparse.ArgumentParser) -> list[Row]:
    shown = (each for each in command._actions if each.help != argparse.SUPPRESS)
    return [(_option(each), _meaning(command, each)) for each in shown if each.dest != "help"]


def _table(rows: Sequence[Row]) -> str:
    lines = ["| option | meaning |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows)]
    return "\n".join(lines) + "\n"


def _option(action: argparse.Action) -> str:
    names = ", ".join(f"`{each}`" for each in action.option_strings)
    if action.nargs == 0:
        return names
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    more = " ..." if action.nargs in ("+", "*") else ""
    return f"{names} `{value}{more}`".strip()


def _meaning(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = command._get_formatter()._expand_help(action) if action.help else ""
    if action.dest == "isas":  # what there is on this machine
        text = "instruction sets, of those that `gradferry info` shows (default: the best)"
    if action.choices:
        text += f"; one of {', '.join(map(str, action.choices))}"
    return _prose(text).replace("|", "\\|")


def _prose(text: str) -> str:
    """Without line ends, and without what Markdown would take for emphasis."""
    return " ".join(text.split()).replace("*", "\\*").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
