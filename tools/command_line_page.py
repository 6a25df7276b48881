"""Writes docs/reference/command_line.md from the parsers of `gradferry`.

.venv/bin/python tools/command_line_page.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from gradferry_lab.cli import parser

PAGE = Path(__file__).parents[1] / "docs/reference/command_line.md"
_HEAD = """# Command line

Made from the parsers of the command line. What columns and keys of results mean:
[benchmarks](../results/benchmarks.md). Exit codes: 0, 1 for an error or a demand that was not met,
2 for a wrong command line, 130 after Ctrl-C.
"""


def page() -> str:
    """The page's text."""
    return _HEAD + "".join(_section(name, each) for name, each in _commands(parser()))


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


def _section(name: str, command: argparse.ArgumentParser) -> str:
    description = _prose(command.description or "").removeprefix(f"`{name}`: ")
    lines = [f"\n## {name}\n", description[:1].upper() + description[1:]]
    shown = (each for each in command._actions if each.help != argparse.SUPPRESS)
    actions = [each for each in shown if each.dest != "help"]
    if actions:
        lines += ["", "| option | meaning |", "| --- | --- |"]
        lines += [f"| {_option(each)} | {_meaning(command, each)} |" for each in actions]
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
