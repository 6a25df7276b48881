"""Reads benchmarks/results/*.json for tools/figures.py: rows, what follows from several of them,
and how and when a file was measured.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gradferry_lab.output.paired import Interval, paired_ratio

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PLAIN_DDP = "torch:fp32"

Row = dict[str, Any]


class FigureError(Exception):
    """A page asks for a figure that there is not, or whose measurement is missing."""


def results(name: str) -> dict[str, Any]:
    """The document of benchmarks/results/NAME.json. Everything here reads files through it."""
    return _document(name)


@functools.cache
def _document(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise FigureError(f"{path} is missing: python benchmarks/measure_all.py {name}")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def rows_of(name: str, **facts: Any) -> list[Row]:
    """The rows of a file that have these values."""
    rows = results(name)["rows"]
    return [row for row in rows if all(row.get(key) == value for key, value in facts.items())]


def row_of(name: str, **facts: Any) -> Row:
    """The only row of a file that has these values."""
    found = rows_of(name, **facts)
    if len(found) != 1:
        raise FigureError(f"{name}.json has {len(found)} rows with {facts}, not one")
    return found[0]


def step(link: str, hook: str) -> Row:
    """A hook's row of `bench train` on two hosts of one rank."""
    return row_of(f"train_{link}", hook=hook)


def loss(task: str, hook: str, optimizer: str = "AdamW") -> tuple[float, float]:
    """`convergence.json`: loss over fp32's with the same seed, minus 1, mean over seeds; and fp32's
    bytes over the hook's, in whole trainings.
    """
    codec, *options = hook.split("+")
    momentum = float(options[0].removeprefix("momentum=")) if options else None
    modes = ("momentum",) if options else ("dense", "owner", "both")
    base = rows_of("convergence", task=task, optimizer=optimizer, codec=PLAIN_DDP)
    rows = [
        row
        for row in rows_of("convergence", task=task, optimizer=optimizer, codec=codec)
        if row["mode"] in modes and row["momentum"] == momentum and row["warmup"] is None
    ]
    if not rows:
        raise FigureError(f"convergence.json has no rows of {hook} on {task}")
    ratio = fmean(row["wire_bytes"] for row in base) / fmean(row["wire_bytes"] for row in rows)
    return excess_over(base, rows), ratio


def excess_over(base: list[Row], rows: list[Row]) -> float:
    """Loss over that of `base` with the same seed, minus 1, mean over the seeds of `rows`."""
    by_seed = {row["seed"]: row["final_loss"] for row in base}
    return fmean(row["final_loss"] / by_seed[row["seed"]] - 1 for row in rows)


def spread(task: str, file: str = "convergence") -> float:
    """Standard deviation of fp32's loss over seeds, over its mean."""
    base = rows_of(file, task=task, optimizer="AdamW", codec=PLAIN_DDP)
    losses = [row["final_loss"] for row in base]
    return stdev(losses) / fmean(losses)


def sharded_loss(hook: str) -> float:
    """`convergence_sharded.json`: loss over fp32's with the same seed, minus 1, mean over seeds."""
    rows, base = (rows_of("convergence_sharded", codec=codec) for codec in (hook, PLAIN_DDP))
    return excess_over(base, rows)


def faster(row: Row, than: Row) -> Interval:
    """Times of `than` over those of `row`, round by round."""
    return paired_ratio(than["round_ms"], row["round_ms"])


def command(*names: str) -> str:
    """The commands of these files, a line each, as a block of code."""
    return "\n".join(f"    {_command(name)}" for name in names)


def _command(name: str) -> str:
    words = shlex.split(results(name)["environment"]["command"])
    if "--json" in words:
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    if words[0].endswith(".py"):
        words = ["python", f"benchmarks/{Path(words[0]).name}", *words[1:]]
    return shlex.join(words)


def occasion(*names: str) -> str:
    """When and where these files were measured."""
    facts = [results(name)["environment"] for name in names]
    dates = sorted({day for each in facts for day in re.findall(r"\d{4}-\d\d-\d\d", each["date"])})
    places = sorted({_place(each) for each in facts})
    return f"{dates[0]}{f' to {dates[-1]}' if dates[1:] else ''}, {'; '.join(places)}"


def _place(facts: Row) -> str:
    gpu = f"{facts['gpu']}, " if "gpu" in facts else ""
    processors = facts["cpu"].replace("; ", " and ")
    return f"{gpu}{processors}, {facts['cores']} cores, torch {facts['torch'].split('+')[0]}"
