"""Does compressed training reach the same loss as uncompressed training? Trains small models with
every codec and several seeds, and compares the differences with the seed-to-seed variation of fp32.
Exit code 1 when a codec leaves its band, or a negative control passes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradferry.errors import ConfigError
from rich.console import Console

from gradferry_lab import flags
from gradferry_lab.bench.device_clock import environment_on
from gradferry_lab.converge.results import Results
from gradferry_lab.converge.suite import SUITES, Suite, Training, select
from gradferry_lab.converge.tables import (
    broken_demands,
    judge,
    table_of,
    write_markdown,
)
from gradferry_lab.converge.worlds import run_trainings
from gradferry_lab.output.json_file import read_json, save_rows
from gradferry_lab.output.progress import StatusLine
from gradferry_lab.output.table import print_line, print_table
from gradferry_lab.ranks.place import add_device
from gradferry_lab.workloads import load_task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry converge`."""
    size = parser.add_mutually_exclusive_group()
    for name, what in (
        ("quick", "fewer trainings, shorter and with wider bands: minutes (default)"),
        ("full", "all trainings under DDP: about an hour on two cores"),
        ("sharded", "trainings of models that FSDP2 shards: about an hour on two cores"),
        ("large", "models of 11 and 124 million parameters, for a machine with a GPU"),
    ):
        size.add_argument(
            f"--{name}", dest="suite", action="store_const", const=name, default="quick", help=what
        )
    size.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="train nothing: report the rows of a JSON file that was written before",
    )
    for name, what in (("tasks", "TASK"), ("codecs", "CODEC"), ("optimizers", "OPTIMIZER")):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            metavar=what,
            help=f"only these {name}, beside the rulers (default: all of the suite)",
        )
    parser.add_argument(
        "--worlds",
        type=int,
        default=2,
        metavar="N",
        help="trainings at a time, each with 2 or 4 processes of one thread (default: %(default)s)",
    )
    add_device(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("converge_results"),
        metavar="DIR",
        help="folder for trainings, finished or saved every minute: called again, the command goes "
        "on with them (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        metavar="N",
        help="stop after so long (default: when all trainings are finished)",
    )
    flags.add_wide(parser)
    flags.add_json(parser)
    parser.add_argument(
        "--keep",
        action="store_true",
        help="rows that --json's file has already stay, from whichever machine, and are not "
        "trained again",
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="also put the tables into this document, as docs/results/convergence.md has them",
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains what is not there yet, then reports. 1 when a demand is not met, else 0."""
    console = Console()
    if arguments.source:
        meaningless = ["worlds", "out", "device", "minutes", "keep"]
        flags.refuse(arguments, meaningless, "beside --from, which trains nothing")
        document = read_json(arguments.source)
        rows, place = document["rows"], document["environment"]
        suite = _suite_of(rows, arguments.source)
    else:
        suite = SUITES[arguments.suite]
    suite = select(suite, arguments.tasks, arguments.codecs, arguments.optimizers)
    if not arguments.source:
        rows, place = _train(console, suite, arguments)
    outcomes = judge(suite, rows)
    for outcome in outcomes:
        console.print()
        print_table(console, table_of(suite, outcome), wide=arguments.wide)
    console.print()
    save_rows(console, arguments.json, rows, place, results_of="converge")
    if arguments.markdown:
        write_markdown(suite, outcomes, place, arguments.markdown)
        print_line(console, f"Written: {arguments.markdown}")
    broken = broken_demands(outcomes)
    for line in broken:
        print_line(console, f"Not met: {line}")
    return 1 if broken else 0


def _train(
    console: Console, suite: Suite, arguments: argparse.Namespace
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Rows of all trainings, in the suite's order, and rows that are kept; their environment."""
    flags.require_at_least(1, arguments, "worlds")
    flags.require_more_than_zero("--minutes", [arguments.minutes])
    kept, before = _kept(suite, arguments.json) if arguments.keep else ([], {})
    place: dict[str, Any] = environment_on(arguments.device)
    versions = {key: value for key, value in place.items() if key not in ("date", "command")}
    folder = arguments.out / suite.name
    sources = {contest.task: load_task(contest.task).source for contest in suite.contests}
    results = Results(folder, versions, sources)

    def find(training: Training) -> Mapping[str, Any] | None:
        facts = {"device": "cpu", "source": sources[training.task], **training.facts()}.items()
        same = (row for row in kept if {"device": "cpu", **row}.items() >= facts)
        return next(same, results.find(training))

    trainings = list(suite.trainings(arguments.device))
    missing = [training for training in trainings if find(training) is None]
    if len(missing) < len(trainings):
        found, where = len(trainings) - len(missing), arguments.json if kept else folder
        print_line(console, f"{found} of {len(trainings)} trainings are in {where} already.")
    if missing:
        print_line(console, f"{len(missing)} trainings, {arguments.worlds} at a time.")
    deadline = time.time() + 60 * arguments.minutes
    with StatusLine(console) as status:
        run_trainings(missing, arguments.worlds, results, status, deadline)
    rows = [row for row in map(find, trainings) if row is not None]
    if len(rows) < len(trainings):
        left = len(trainings) - len(rows)
        print_line(console, f"{left} trainings are left: the same command goes on with them.")
    rows += [row for row in kept if row not in rows]
    for key in before:  # every value once
        now = str(place.get(key, before[key])) if len(rows) > len(kept) else ""
        place[key] = "; ".join(filter(None, dict.fromkeys([*str(before[key]).split("; "), now])))
    return rows, place


def _kept(suite: Suite, path: Path | None) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    if path is None:
        raise ConfigError("--keep keeps rows of a file; name it with --json FILE")
    document = read_json(path)
    _suite_of([{"suite": suite.name, "source": ""}, *document["rows"]], path)
    return document["rows"], document["environment"]


def _suite_of(rows: Sequence[Mapping[str, Any]], path: Path) -> Suite:
    names = {str(row.get("suite")) for row in rows}
    if len(names) != 1 or not names <= set(SUITES):
        raise ConfigError(
            f"{path} holds no rows of one suite of {', '.join(SUITES)}, but of {sorted(names)}"
        )
    if any("source" not in row for row in rows):
        raise ConfigError(f"{path}: its rows do not say which data was trained on; train again")
    return SUITES[names.pop()]
