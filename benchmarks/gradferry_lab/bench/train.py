"""Step time of a model under gradient hooks that take turns in one run, each at its best bucket
size, on loopback, on a link of a chosen rate (as root), or under torchrun. `none` does not
communicate: what a hook takes longer than that is communication that the backward pass does not
hide. `sync` all-reduces one element per step: that much of it no hook can avoid.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

from gradferry import _native
from gradferry.core.nodes import TWO_LEVEL
from gradferry.ddp.trial import coverage_of
from gradferry.errors import ConfigError
from rich.console import Console

from gradferry_lab import flags
from gradferry_lab.bench.device_clock import environment_on
from gradferry_lab.bench.train_turns import TrainOptions, TrainOutcome, run_train
from gradferry_lab.output.json_file import save_rows
from gradferry_lab.output.paired import (
    coverage_note,
    coverage_text,
    interval_keys,
    interval_text,
    paired_difference,
    paired_ratio,
    ratio_columns,
)
from gradferry_lab.output.progress import StatusLine
from gradferry_lab.output.table import Column, Row, Table, marked, number, print_table
from gradferry_lab.ranks.everywhere import add_rank_arguments, check_ranks, run_everywhere
from gradferry_lab.ranks.exchanges import add_exchange, exchange_columns
from gradferry_lab.ranks.hosts import Where, ranks_text
from gradferry_lab.ranks.place import add_device
from gradferry_lab.workloads.hooks import (
    NO_HOOK,
    PHASES,
    RULERS,
    SYNC_HOOK,
    TORCH_HOOKS,
)
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

_INTERFACE = (
    "Interface: what the network interface of the host that sends most has counted, protocol "
    "headers included, over what its ranks must send to other hosts."
)


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
    what = "DDP's bucket_cap_mb: every hook is tried with each, and compared at its fastest"
    flags.add_several(parser, "--bucket-caps", [4.0, 10.0, 25.0], "MB", what)
    parser.add_argument("--rounds", type=int, default=20, help="turns of every hook (default: 20)")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn (default: 3)")
    flags.add_seed(parser)
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
    # `none` first, which all others are compared with.
    hooks = tuple(dict.fromkeys([NO_HOOK, *_hooks(arguments)]))
    for hook in hooks:
        check_parallel(arguments.parallel, hook)
    _check_sharding(arguments)
    check_model(arguments.model)
    flags.require_at_least(1, arguments, "rounds", "steps")
    flags.require_more_than_zero("--bucket-caps", arguments.bucket_caps)
    return TrainOptions(
        model=arguments.model,
        hooks=hooks,
        bucket_caps_mb=tuple(dict.fromkeys(arguments.bucket_caps)),
        rounds=arguments.rounds,
        steps=arguments.steps,
        seed=arguments.seed,
        device=arguments.device,
        exchanges=tuple(dict.fromkeys(arguments.exchange)),
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
        to_sync = paired_ratio(outcome.round_ms, sync) if sync else None
        speedup = paired_ratio(torch_ms, outcome.round_ms) if torch_ms else None
        rows.append(
            {
                "hook": outcome.hook,
                "exchange": outcome.exchange,
                "chosen": outcome.chosen,
                **where._asdict(),
                "bucket_cap_mb": outcome.bucket_cap_mb,
                "ms_median": median(outcome.round_ms),
                "ms_min": min(outcome.round_ms),
                "ms_max": max(outcome.round_ms),
                "wire_bytes": outcome.wire_bytes,
                "exposed_ms": paired_difference(outcome.round_ms, none).median,
                **interval_keys("ratio_to_none", paired_ratio(outcome.round_ms, none)),
                **interval_keys("ratio_to_sync", to_sync),
                **interval_keys("speedup", speedup),
                "interval_coverage": coverage_of(len(outcome.round_ms)),
                "wire_bytes_measured": outcome.wire_measured,
                "wire_bytes_formula": outcome.wire_formula,
                "interface_bytes": outcome.interface_bytes,
                "interface_bytes_formula": outcome.interface_formula,
                **{phase: outcome.phase_ms.get(phase) for phase in PHASES},
                "model": options.model,
                "device": options.device,
                "parallel": options.parallel,
                "seed": options.seed,
                "round_ms": outcome.round_ms,
                "trial_ms": {f"{cap:g}": ms for cap, ms in outcome.trial_ms.items()},
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
        Column("bucket\nMB", lambda row: number(row["bucket_cap_mb"], "g"), detail=5),
        Column("ms per\nstep", lambda row: f"{row['ms_median']:.1f}"),
        Column("(min)", lambda row: f"{row['ms_min']:.1f}", detail=6),
        Column("(max)", lambda row: f"{row['ms_max']:.1f}", detail=6),
        Column("exposed\nms", lambda row: f"{row['exposed_ms']:.1f}", detail=2),
        *(column for ruler in RULERS for column in ratio_columns(rows, ruler, coverage)),
        Column("speed-up", lambda row: number(row["speedup"], ".2f")),
        Column(coverage, lambda row: interval_text(row, "speedup"), detail=4),
        Column(
            "bytes sent\nper step ",
            lambda row: marked(row["wire_bytes"], row["wire_bytes_measured"]),
            detail=1,
        ),
        Column(
            "of\nformula", lambda row: _part(row["wire_bytes"], row["wire_bytes_formula"]), detail=6
        ),
        Column(
            "interface\nof formula",
            lambda row: _part(row["interface_bytes"], row["interface_bytes_formula"]),
            detail=6,
            note=_INTERFACE,
        ),
    ]
    notes = [
        "Hooks take turns; every ratio compares times of the same round. Median, minimum and "
        "maximum are of turns, of the slowest rank. Exposed: what a step takes longer than with "
        "`none`; `sync` is one all-reduce of one element per step. Speed-up: over the fastest of "
        f"PyTorch's own hooks. {coverage_note(num_rounds)}. Bytes: of the rank that sends most.",
    ]
    if not all(row["wire_bytes_measured"] for row in rows):
        notes.append("* computed for rings, also in part: PyTorch does not count what it sends.")
    first = rows[0]
    on = "" if first["device"] == "cpu" else f" on {first['device']}"
    under = "" if first["parallel"] == DDP else f" under {first['parallel']}"
    title = (
        f"gradferry bench train: {first['model']}{under}, {ranks_text(first)}{on}, "
        f"link {first['link']}, {num_rounds} rounds"
    )
    return Table(title, columns, rows, notes)


def _part(sent: float | None, formula: int) -> str:
    return "-" if sent is None or not formula else f"{sent / formula:.4f}"
