"""Will it help me? Trains a model for a few steps under every hook, and says which to use,
if any. On loopback, on a link of a chosen rate (as root), or under torchrun.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from gradferry.core.device import load_kernels
from gradferry.diagnosis import (
    DEFAULT_HOOKS,
    TORCH_DTYPES,
    Diagnosis,
    Progress,
    examine,
    require_hooks,
)
from gradferry.errors import ConfigError
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradferry_lab import flags
from gradferry_lab.bench.device_clock import environment_on
from gradferry_lab.output.json_file import save_rows
from gradferry_lab.output.progress import StatusLine
from gradferry_lab.output.table import print_line
from gradferry_lab.ranks.everywhere import add_rank_arguments, check_ranks, run_everywhere
from gradferry_lab.ranks.hosts import NETWORK, Where, ranks_text
from gradferry_lab.ranks.place import add_device, on_device, place_of_rank
from gradferry_lab.workloads.models import check_model, load_workload
from gradferry_lab.workloads.optimizers import make_optimizer

_SMOKE: dict[str, Any] = {"model": "small", "hooks": ["torch:fp32", "q4"]}
_SMOKE_VERDICT = (
    "It works. Figures of --smoke mean nothing: without it, doctor says which hook to use."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry doctor`."""
    flags.add_model(parser)
    parser.add_argument("--parallel", help=argparse.SUPPRESS)  # refused, with what to use instead
    flags.add_hooks(
        parser, DEFAULT_HOOKS, f"beside torch:fp32: {' '.join(TORCH_DTYPES)} and codecs"
    )
    add_device(parser)
    add_rank_arguments(parser)
    parser.add_argument(
        "--bucket-cap", type=float, metavar="MB", help="of DDP's buckets (default: DDP's own)"
    )
    flags.add_seed(parser)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a small model and two hooks, to see that all works; figures mean nothing",
    )
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures and reports. Raises a GradferryError when an option is wrong or a rank fails."""
    flags.apply_smoke(arguments, _SMOKE)
    if arguments.parallel is not None:
        raise ConfigError(
            "doctor tries hooks of DistributedDataParallel, none of models that FSDP2 shards; "
            f"`gradferry bench train --parallel {arguments.parallel} --model module:function` "
            "measures those on your model and network"
        )
    hooks = require_hooks(arguments.hooks)
    check_model(arguments.model)
    if arguments.bucket_cap is not None:
        flags.require_more_than_zero("--bucket-cap", [arguments.bucket_cap])
    place = environment_on(arguments.device)
    if arguments.device != "cpu":
        load_kernels(arguments.device)
    check_ranks(arguments)
    if arguments.ranks < 2:
        raise ConfigError("doctor needs two ranks at least: a world of one does not communicate")
    console = Console()

    def report(found: Diagnosis, where: Where) -> int:
        asked = {"model": arguments.model, "ranks": found.world_size, **where._asdict()}
        link = "" if where.link == NETWORK else f", link {where.link}"
        print_line(console, f"gradferry doctor: {arguments.model}, {ranks_text(asked)}{link}")
        text = str(found)
        if arguments.smoke:
            text = _SMOKE_VERDICT + text.removeprefix(found.verdict)
        for line in text.splitlines():
            print_line(console, line)
        rows = doctor_rows(found, asked)
        save_rows(console, arguments.json, rows, place, results_of="doctor")
        return 0

    with StatusLine(console, every_s=0) as status:
        body_arguments = (
            arguments.model, hooks, arguments.seed, arguments.device, arguments.bucket_cap
        )  # fmt: skip
        return run_everywhere(
            arguments, examine_workload, body_arguments, status, status.closing(report)
        )


def examine_workload(
    emit: Progress,
    model: str,
    hooks: tuple[str, ...],
    seed: int,
    device: str,
    bucket_cap_mb: float | None,
) -> Diagnosis:
    """Runs on every rank of the default group, on a model as `bench train` has it."""
    place, group = place_of_rank(device)
    group = group or dist.group.WORLD
    assert group is not None
    torch.manual_seed(seed)
    workload = load_workload(model)
    batch: Any = on_device(place, workload.draw(torch.Generator().manual_seed(seed)))

    def make_step(copy: nn.Module) -> Callable[[], None]:
        optimizer = make_optimizer("AdamW", workload, copy, None, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            workload.loss(copy, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    ddp = DistributedDataParallel(
        workload.build_model().to(place), process_group=group, bucket_cap_mb=bucket_cap_mb
    )
    return examine(ddp, make_step, hooks, emit)


def doctor_rows(found: Diagnosis, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the JSON file; docs/guide/numbers.md defines every key."""
    verdict: dict[str, Any] = {
        "kind": "verdict",
        "text": found.verdict,
        "elements": found.elements,
        "parameters": found.parameters,
        "none_ms": 1e3 * found.silent_s,
    }
    steps: list[dict[str, Any]] = [
        {
            "kind": "step",
            "hook": step.hook,
            "exchange": step.exchange,
            "ms": 1e3 * step.seconds,
            "steps": step.steps,
            "ratio_to_none": step.seconds / found.silent_s,
            "times_faster": step.times_faster.median,
            "times_faster_low": step.times_faster.low,
            "times_faster_high": step.times_faster.high,
            "wire_bytes": step.wire_bytes,
            "needs_momentum": not step.is_advised,
        }
        for step in found.steps
    ]
    return [{**row, **asked, "device": found.device} for row in (*steps, verdict)]
