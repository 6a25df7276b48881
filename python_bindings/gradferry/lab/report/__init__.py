"""One page of everything that was measured: reads the JSON files that the other commands write, and
makes tables and pictures of them. The page needs nothing but itself.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gradferry.core.durable import durable_file
from gradferry.errors import ConfigError
from gradferry.lab.output.html import Section, html_page
from gradferry.lab.output.table import Column, Table, print_line
from gradferry.lab.report.page import Measurement, Page, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry report`."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUNS",
        help="JSON files of bench, doctor, plan, converge and demo, and folders that hold some",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the page (default: %(default)s)",
    )
    parser.add_argument(
        "--png", type=Path, metavar="DIR", help="also write every picture as a PNG into this folder"
    )


def run(arguments: argparse.Namespace) -> int:
    """Reads and reports; a file that cannot be used is named on standard error and on the page.
    Raises ConfigError when there is nothing to report.
    """
    found: list[Measurement] = []
    left_out: list[str] = []
    for path in _files(arguments.runs):
        try:
            found.append(read(path))
        except ConfigError as error:
            left_out.append(str(error))
    content = Page(found)
    left_out += content.left_out
    for sentence in left_out:
        print_line(Console(stderr=True), f"Left out: {sentence}")
    if not content.shown:
        places = ", ".join(map(str, arguments.runs))
        raise ConfigError(f"{places}: no results; make some with the option --json of a command")
    sections = [*content.sections, *([_left_out_section(left_out)] if left_out else [])]
    page = html_page("gradferry report", _subtitle(content.shown), sections, {})
    written = [arguments.output]
    try:
        with durable_file(arguments.output) as file:
            file.write(page.encode())
        if arguments.png:
            arguments.png.mkdir(parents=True, exist_ok=True)
            for section in sections:
                for picture in section.pictures:
                    path = arguments.png / f"{_file_name(picture.description)}.png"
                    path.write_bytes(picture.light)
                    written.append(path)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error
    print_line(Console(), f"Written: {', '.join(map(str, written))}")
    return 0


def _files(runs: Sequence[Path]) -> list[Path]:
    """The named files, and those of named folders in alphabetical order, each once."""
    found: dict[Path, None] = {}
    for path in runs:
        if not path.exists():
            raise ConfigError(f"{path} does not exist")
        inside = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        found.update(dict.fromkeys(inside))
    return list(found)


def _left_out_section(sentences: Sequence[str]) -> Section:
    columns = [Column("what, and why", lambda row: str(row["why"]), is_number=False)]
    return Section(Table("Left out", columns, [{"why": sentence} for sentence in sentences]))


def _file_name(description: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "_", description.lower()).strip("_")


def _subtitle(found: Sequence[Measurement]) -> str:
    return f"From {', '.join(measurement.path.name for measurement in found)}."
