"""What a hook adds to the backward pass: exposed time per step, by a GPU's events or the CPU's
clock, and a trace of it that chrome://tracing and ui.perfetto.dev open. Hooks take turns in one
run; `none` does not communicate, `sync` all-reduces one element per step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gradferry.forecast.hook_names import NO_HOOK, RULERS, SYNC_HOOK, TORCH_HOOKS
from rich.console import Console

from gradferry_lab import flags
from gradferry_lab.bench.device_clock import environment_on
from gradferry_lab.bench.overlap_turns import OverlapOptions, OverlapOutcome, run_overlap
from gradferry_lab.output.json_file import save_rows
from gradferry_lab.output.paired import (
    coverage_note,
    coverage_of,
    coverage_text,
    paired_difference,
    paired_ratio,
    ratio_columns,
)
from gradferry_lab.output.progress import StatusLine
from gradferry_lab.output.table import Column, Table, print_line, print_table
from gradferry_lab.ranks.everywhere import add_rank_arguments, check_ranks, run_everywhere
from gradferry_lab.ranks.hosts import Where, ranks_text
from gradferry_lab.ranks.place import add_device
from gradferry_lab.workloads.hooks import timed_hooks
from gradferry_lab.workloads.models import check_model

_DEFAULT_HOOKS = (SYNC_HOOK, "torch:fp32", "torch:bf16", "q4")
_SMOKE: dict[str, Any] = {"model": "small", "hooks": [SYNC_HOOK, "q4"], "rounds": 2, "steps": 1}

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry bench overlap`."""
    flags.add_hooks(
        parser,
        _DEFAULT_HOOKS,
        f"beside {NO_HOOK}: {SYNC_HOOK}, {' '.join(TORCH_HOOKS)}, off, and codecs; arguments "
        f"of attach may follow a codec",
    )
    flags.add_model(parser)
    add_device(parser)
    add_rank_arguments(parser)
    parser.add_argument(
        "--bucket-cap",
        type=float,
        default=25.0,
        metavar="MB",
        help="DDP's bucket_cap_mb (default: %(default)g)",
    )
    flags.add_turns(parser)
    flags.add_seed(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="also trace two steps of the last hook on rank 0, as JSON",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a small model and two rounds, to see that all works"
    )
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures and reports. Raises a GradferryError when an option is wrong or a rank fails."""
    flags.apply_smoke(arguments, _SMOKE)
    place = environment_on(arguments.device)
    options = _options(arguments)
    check_ranks(arguments)
    console = Console()

    def report(outcomes: Sequence[OverlapOutcome], where: Where) -> int:
        rows = overlap_rows(outcomes, options, where)
        print_table(console, overlap_table(rows))
        if options.trace:
            print_line(console, f"Trace of {options.hooks[-1]}: {options.trace}")
        save_rows(console, arguments.json, rows, place, results_of="bench overlap")
        return 0

    with StatusLine(console) as status:
        return run_everywhere(arguments, run_overlap, (options,), status, status.closing(report))


def _options(arguments: argparse.Namespace) -> OverlapOptions:
    hooks = timed_hooks(arguments.hooks)
    check_model(arguments.model)
    flags.require_at_least_one(arguments, "rounds", "steps")
    flags.require_more_than_zero("--bucket-cap", [arguments.bucket_cap])
    return OverlapOptions(
        model=arguments.model,
        hooks=hooks,
        device=arguments.device,
        bucket_cap_mb=arguments.bucket_cap,
        rounds=arguments.rounds,
        steps=arguments.steps,
        seed=arguments.seed,
        trace=arguments.trace,
    )


def overlap_rows(
    outcomes: Sequence[OverlapOutcome], options: OverlapOptions, where: Where
) -> list[dict[str, Any]]:
    """Rows of the JSON file; docs/results/benchmarks.md defines every key."""
    by_hook = {outcome.hook: outcome.backward_ms for outcome in outcomes}
    none, sync = by_hook[NO_HOOK], by_hook.get(SYNC_HOOK)
    rows = []
    for outcome in outcomes:
        exposed = paired_difference(outcome.backward_ms, none)
        ratio = paired_ratio(outcome.backward_ms, none)
        rows.append(
            {
                "hook": outcome.hook,
                **where._asdict(),
                "device": options.device,
                "model": options.model,
                "bucket_cap_mb": options.bucket_cap_mb,
                "seed": options.seed,
                "backward_ms": median(outcome.backward_ms),
                "backward_ms_min": min(outcome.backward_ms),
                "backward_ms_max": max(outcome.backward_ms),
                "exposed_ms": exposed.median,
                "exposed_ms_low": exposed.low,
                "exposed_ms_high": exposed.high,
                "interval_coverage": coverage_of(len(outcome.backward_ms)),
                "ratio_to_none": ratio.median,
                "ratio_to_sync": paired_ratio(outcome.backward_ms, sync).median if sync else None,
                "round_ms": list(outcome.backward_ms),
            }
        )
    return rows


def overlap_table(rows: Sequence[Row]) -> Table:
    """Rows of overlap_rows."""
    first = rows[0]
    num_rounds = len(first["round_ms"])
    columns = (
        Column("hook", lambda row: str(row["hook"]), is_number=False),
        Column("backward\nms", lambda row: f"{row['backward_ms']:.2f}"),
        Column("(min)", lambda row: f"{row['backward_ms_min']:.2f}"),
        Column("(max)", lambda row: f"{row['backward_ms_max']:.2f}"),
        Column("exposed\nms", lambda row: f"{row['exposed_ms']:.2f}"),
        Column(f"({coverage_text(num_rounds)})", _interval),
        *(column for ruler in RULERS for column in ratio_columns(rows, ruler)),
    )
    clock = "events of the GPU" if first["device"] == "cuda" else "the clock"
    notes = (
        f"Backward passes of {first['model']} on {ranks_text(first)}, {first['link']}, buckets "
        f"of {first['bucket_cap_mb']:g} MB; by {clock}, per step, of the slowest rank.",
        f"Exposed: time minus that of {NO_HOOK} in the same round, median and interval. "
        f"{coverage_note(num_rounds)}.",
    )
    return Table("Backward passes", columns, rows, notes)


def _interval(row: Row) -> str:
    return f"{row['exposed_ms_low']:.2f} to {row['exposed_ms_high']:.2f}"
