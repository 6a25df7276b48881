"""Step time of a model under gradient hooks that take turns in one run, each at its best bucket
size, on loopback, on a link of a chosen rate (as root), or under torchrun. `none` does not
communicate: what a hook takes longer than that is communication that the backward pass does not
hide. `sync` all-reduces one element per step: that much of it no hook can avoid.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from gradferry import _native
from gradferry.core.nodes import TWO_LEVEL
from gradferry.ddp.interval import coverage_of, interval_of_median
from gradferry.errors import ConfigError
from rich.console import Console

from gradferry_lab import flags
from gradferry_lab.bench.device_clock import environment_on
from gradferry_lab.bench.train_turns import TrainOptions, TrainOutcome, run_train
from gradferry_lab.output.json_file import save_rows
from gradferry_lab.output.paired import (
    coverage_note,
    coverage_text,
    interval_text,
    paired_difference,
    paired_ratio,
    ratio_columns,
)
from gradferry_lab.output.progress import StatusLine
from gradferry_lab.output.table import Column, Table, print_table
from gradferry_lab.ranks.everywhere import add_rank_arguments, check_ranks, run_everywhere
from gradferry_lab.ranks.exchanges import (
    add_exchange,
    asked_exchanges,
    chosen_columns,
    exchange_columns,
)
from gradferry_lab.ranks.hosts import Where, ranks_text
from gradferry_lab.ranks.place import add_device
from gradferry_lab.workloads.hook_names import (
    NO_HOOK,
    RULERS,
    SYNC_HOOK,
    TORCH_HOOKS,
)
from gradferry_lab.workloads.hooks import PHASES, timed_hooks
from gradferry_lab.workloads.models import check_model
from gradferry_lab.workloads.parallel import (
    DDP,
    FSDP,
    PARALLEL,
    SHARDED_HOOKS,
    check_parallel,
)

_MOMENTUM = "+momentum=0.9+warmup_steps=100"
# All at once they take about 0.45 GB per hook and rank, so not every codec is among them.
_DDP_HOOKS = (*RULERS, *TORCH_HOOKS, "q8", "q4", f"sign1{_MOMENTUM}", f"topk{_MOMENTUM}")
_SMOKE: dict[str, Any] = {
    "hooks": [*RULERS, "torch:fp16", "q4"],
    "model": "small",
    "bucket_caps": [4.0, 25.0],
    "rounds": 2,
    "steps": 1,
}

_CPU = "CPU: processor time per step of all threads of rank 0."
_INTERFACE = (
    "Interface: what the network interface of the host that sends most has counted, protocol "
    "headers included, over what its ranks must send to other hosts."
)

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry bench train`."""
    codecs = " ".join(str(codec["name"]) for codec in _native.codecs())
    flags.add_hooks(
        parser,
        _DDP_HOOKS,
        f"of {NO_HOOK} (no communication; always included), {SYNC_HOOK} (one element per step), "
        f"{' '.join(TORCH_HOOKS)}, off, auto, and codecs: {codecs}. Arguments of attach may "
        f"follow a codec: sign1{_MOMENTUM}",
    )
    parser.set_defaults(hooks=None)  # they depend on --parallel
    parser.add_argument(
        "--parallel",
        choices=PARALLEL,
        default=DDP,
        help="ddp: DistributedDataParallel; hsdp: FSDP2 with a replica of the model on every host, "
        "or two on one host, and the hook between replicas; fsdp: one replica over all ranks, and "
        "the hook in its reduce-scatter and its gathers of parameters. There hooks are none, "
        "torch:fp32 and torch:bf16 (FSDP2's own, parameters gathered in that dtype), off, and "
        "codecs; every module is a bucket, so that --bucket-caps means nothing (default: "
        f"%(default)s; the hooks of fsdp: {' '.join(SHARDED_HOOKS[FSDP])})",
    )
    flags.add_model(parser)
    add_device(parser)
    add_rank_arguments(parser)
    add_exchange(parser)
    flags.add_bucket_caps(parser, "tried with each, and compared at its fastest")
    flags.add_turns(parser)
    flags.add_seed(parser)
    parser.add_argument(
        "--until-loss",
        type=float,
        metavar="LOSS",
        help="then train a fresh model with every hook until its validation loss is there, and "
        "say how long that took",
    )
    parser.add_argument(
        "--most-steps",
        type=int,
        default=1000,
        help="with --until-loss: give a hook up after so many (default: %(default)s)",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a small model, few hooks and two rounds, to see that all works; figures mean nothing",
    )
    flags.add_wide(parser)
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures and reports. Raises a GradferryError when an option is wrong or a rank fails."""
    flags.apply_smoke(arguments, _SMOKE)
    place = environment_on(arguments.device)
    options = _options(arguments)
    check_ranks(arguments)
    console = Console()

    def report(outcomes: Sequence[TrainOutcome], where: Where) -> int:
        rows = train_rows(outcomes, options, where)
        print_table(console, train_table(rows), wide=arguments.wide)
        save_rows(console, arguments.json, rows, place, results_of="bench train")
        return 0

    with StatusLine(console) as status:
        return run_everywhere(arguments, run_train, (options,), status, status.closing(report))


def _options(arguments: argparse.Namespace) -> TrainOptions:
    hooks = timed_hooks(_hooks(arguments))
    for hook in hooks:
        check_parallel(arguments.parallel, hook)
    _check_sharding(arguments)
    check_model(arguments.model)
    if arguments.until_loss is None:
        flags.refuse(arguments, ["most_steps"], "without --until-loss")
    flags.require_at_least_one(arguments, "rounds", "steps", "most_steps")
    flags.require_more_than_zero("--bucket-caps", arguments.bucket_caps)
    return TrainOptions(
        model=arguments.model,
        hooks=hooks,
        bucket_caps_mb=tuple(dict.fromkeys(arguments.bucket_caps)),
        rounds=arguments.rounds,
        steps=arguments.steps,
        seed=arguments.seed,
        until_loss=arguments.until_loss,
        most_steps=arguments.most_steps,
        device=arguments.device,
        exchanges=asked_exchanges(arguments),
        parallel=arguments.parallel,
    )


def _hooks(arguments: argparse.Namespace) -> Sequence[str]:
    """Those that were named, or all of the default ones that can be used."""
    if arguments.hooks and not arguments.smoke:
        return list(arguments.hooks)
    sharded = SHARDED_HOOKS.get(arguments.parallel)
    if not arguments.smoke:
        return sharded or _DDP_HOOKS
    return [hook for hook in arguments.hooks if sharded is None or hook in sharded]


def _check_sharding(arguments: argparse.Namespace) -> None:
    if arguments.parallel == DDP:
        return
    flags.refuse(
        arguments, ["bucket_caps"], f"with --parallel {arguments.parallel}: each module is a bucket"
    )
    if arguments.device != "cpu":
        raise ConfigError(
            f"--parallel {arguments.parallel} is measured on the CPU only; leave out --device "
            f"{arguments.device}"
        )
    if TWO_LEVEL in arguments.exchange:
        raise ConfigError(
            f"--exchange {TWO_LEVEL}: under --parallel {arguments.parallel} ranks of a host share "
            "a replica, so there is nothing to add up on it; leave it out"
        )


def train_rows(
    outcomes: Sequence[TrainOutcome], options: TrainOptions, where: Where
) -> list[dict[str, Any]]:
    """Rows of the JSON file; docs/results/performance.md defines every key."""
    by_hook = {outcome.hook: outcome.round_ms for outcome in outcomes}
    none, sync = by_hook[NO_HOOK], by_hook.get(SYNC_HOOK)
    torch_ms = _best_of_torch(outcomes)
    rows = []
    for outcome in outcomes:
        times = interval_of_median(outcome.round_ms)
        ratio = paired_ratio(outcome.round_ms, none)
        to_sync = paired_ratio(outcome.round_ms, sync) if sync else None
        speedup = paired_ratio(torch_ms, outcome.round_ms) if torch_ms else None
        rows.append(
            {
                "hook": outcome.hook,
                "exchange": outcome.exchange,
                "chosen": outcome.chosen,
                "link": where.link,
                "ranks": where.ranks,
                "bucket_cap_mb": outcome.bucket_cap_mb,
                "ms_median": times.median,
                "ms_min": min(outcome.round_ms),
                "ms_max": max(outcome.round_ms),
                "ratio_to_none": ratio.median,
                "wire_bytes": outcome.wire_bytes,
                "exposed_ms": paired_difference(outcome.round_ms, none).median,
                "ratio_to_none_low": ratio.low,
                "ratio_to_none_high": ratio.high,
                "ratio_to_sync": to_sync.median if to_sync else None,
                "ratio_to_sync_low": to_sync.low if to_sync else None,
                "ratio_to_sync_high": to_sync.high if to_sync else None,
                "speedup": speedup.median if speedup else None,
                "speedup_low": speedup.low if speedup else None,
                "speedup_high": speedup.high if speedup else None,
                "interval_coverage": coverage_of(len(outcome.round_ms)),
                "wire_bytes_measured": outcome.wire_measured,
                "wire_bytes_formula": outcome.wire_formula,
                "interface_bytes": outcome.interface_bytes,
                "interface_bytes_formula": outcome.interface_formula,
                "hosts": where.hosts,
                "ranks_per_host": where.ranks_per_host,
                "until_loss": options.until_loss,
                "steps_to_loss": outcome.reached.steps if outcome.reached else None,
                "seconds_to_loss": outcome.reached.seconds if outcome.reached else None,
                **{phase: outcome.phase_ms.get(phase) for phase in PHASES},
                "cpu_ms": outcome.cpu_ms,
                "model": options.model,
                "device": options.device,
                "parallel": options.parallel,
                "seed": options.seed,
                "round_ms": outcome.round_ms,
                "trial_ms": {f"{cap:g}": ms for cap, ms in outcome.trial_ms.items()},
                "last_step": asdict(outcome.last_step) if outcome.last_step else None,
            }
        )
    return rows


def _best_of_torch(outcomes: Sequence[TrainOutcome]) -> list[float] | None:
    """Times of the fastest of PyTorch's own hooks."""
    candidates = [o.round_ms for o in outcomes if o.hook.startswith("torch:")]
    return min(candidates, key=median) if candidates else None


def train_table(rows: Sequence[Row]) -> Table:
    """Rows of `gradferry bench train`, with its columns explained below."""
    num_rounds = len(rows[0]["round_ms"])
    coverage = f"({coverage_text(num_rounds)})"
    columns = [
        Column("hook", lambda row: str(row["hook"]), is_number=False),
        *exchange_columns(rows),
        *chosen_columns(rows),
        Column("bucket\nMB", lambda row: _number(row["bucket_cap_mb"], "g"), detail=5),
        Column("ms per\nstep", lambda row: f"{row['ms_median']:.1f}"),
        Column("(min)", lambda row: f"{row['ms_min']:.1f}", detail=6),
        Column("(max)", lambda row: f"{row['ms_max']:.1f}", detail=6),
        Column("exposed\nms", lambda row: f"{row['exposed_ms']:.1f}", detail=2),
        Column("CPU\nms", _cpu_ms, detail=7, note=_CPU),
        *(column for ruler in RULERS for column in ratio_columns(rows, ruler, coverage)),
        Column("speed-up", lambda row: _number(row["speedup"], ".2f")),
        Column(coverage, lambda row: interval_text(row, "speedup"), detail=4),
        Column("bytes sent\nper step ", _bytes_sent, detail=1),
        Column("of\nformula", _formula_part, detail=6),
        Column("interface\nof formula", _interface_part, detail=6, note=_INTERFACE),
    ]
    notes = [
        "Hooks take turns; every ratio compares times of the same round. Median, minimum and "
        "maximum are of turns, of the slowest rank. Exposed: what a step takes longer than with "
        "`none`; `sync` is one all-reduce of one element per step. Speed-up: over the fastest of "
        f"PyTorch's own hooks. {coverage_note(num_rounds)}. Bytes: of the rank that sends most.",
    ]
    if not all(row["wire_bytes_measured"] for row in rows):
        notes.append("* computed for rings, also in part: PyTorch does not count what it sends.")
    until_loss = rows[0].get("until_loss")
    if until_loss is not None:
        columns += [
            Column("steps to\nloss", lambda row: _number(row["steps_to_loss"], "d")),
            Column("seconds\nto loss", lambda row: _number(row["seconds_to_loss"], ".1f")),
        ]
        notes.append(
            f"To loss: training until the validation loss is {until_loss:g}, looked at every 10 "
            f"steps; validation is not counted."
        )
    first = rows[0]
    on = "" if first.get("device", "cpu") == "cpu" else f" on {first['device']}"
    parallel = first.get("parallel", DDP)  # older files do not say
    under = "" if parallel == DDP else f" under {parallel}"
    title = (
        f"gradferry bench train: {first['model']}{under}, {ranks_text(first)}{on}, "
        f"link {first['link']}, {num_rounds} rounds"
    )
    return Table(title, columns, rows, notes)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cpu_ms(row: Row) -> str:
    return _number(sum(row.get("cpu_ms", {}).values()) or None, ".1f")


def _formula_part(row: Row) -> str:
    return _part(row["wire_bytes"], row["wire_bytes_formula"])


def _bytes_sent(row: Row) -> str:
    mark = " " if row["wire_bytes_measured"] else "*"
    return f"{row['wire_bytes']:,}{mark}"


def _interface_part(row: Row) -> str:
    # In older files every rank has an interface to itself.
    formula = row.get("interface_bytes_formula", row["wire_bytes_formula"])
    return _part(row["interface_bytes"], formula)


def _part(sent: float | None, formula: int) -> str:
    return "-" if sent is None or not formula else f"{sent / formula:.4f}"
