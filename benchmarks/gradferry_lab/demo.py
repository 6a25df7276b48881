"""`gradferry demo`: the same training with several gradient hooks, which take turns."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from gradferry.errors import ConfigError, PeerError
from rich.console import Console

from gradferry_lab import flags
from gradferry_lab.output.curves import Curve, draw_loss_curves
from gradferry_lab.output.json_file import save_rows
from gradferry_lab.output.progress import Doing, StatusLine
from gradferry_lab.output.table import Column, Row, Table, marked, print_line, print_table
from gradferry_lab.ranks.everywhere import run_everywhere
from gradferry_lab.ranks.hosts import LOOPBACK, Where
from gradferry_lab.ranks.launch import (
    Emit,
    Outbox,
    Placement,
    torchrun_placement,
)
from gradferry_lab.ranks.network import Network, check_network, parse_link
from gradferry_lab.workloads import TASKS, load_task
from gradferry_lab.workloads.hooks import PLAIN_DDP, TORCH_HOOKS, check_hook
from gradferry_lab.workloads.task import Task
from gradferry_lab.workloads.training import Training, TrainingRun, check_size

DEFAULT_HOOKS = (PLAIN_DDP, "torch:fp16", "q4", "sign1+momentum=0.8")
_LINK = "1gbit"  # where this process may make one
_GIGABIT = 1e9  # bits per second


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry demo`."""
    parser.add_argument(
        "--task", default="text", help=f"what to train: {' or '.join(TASKS)} (default: text)"
    )
    flags.add_hooks(
        parser,
        DEFAULT_HOOKS,
        f"hooks to compare: {' '.join(TORCH_HOOKS)}, off, or a gradferry codec as listed by "
        f"`gradferry info`, also with arguments of attach: sign1+momentum=0.8. torch:fp32 is "
        f"DistributedDataParallel without a hook",
    )
    parser.add_argument("--steps", type=int, help="steps per hook (default: 400)")
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="processes to train with, one thread each; under torchrun its own ranks are taken "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--link",
        metavar="RATE",
        help=f"100mbit, 1gbit, ...: each rank in a network namespace, joined by a link of that "
        f"rate (as root); 'loopback': without one, and without times (default: {_LINK} where "
        f"such a link can be made, else loopback). Under torchrun the network is what it is, and "
        f"this only names it",
    )
    flags.add_seed(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo_results"),
        metavar="DIR",
        help="folder for loss_curves.png (default: %(default)s)",
    )
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trains, then reports. Raises a GradferryError when an option is wrong or a rank fails."""
    for hook in arguments.hooks:
        check_hook(hook)
    hooks = tuple(dict.fromkeys(arguments.hooks))
    task = load_task(arguments.task)
    steps = task.default_steps if arguments.steps is None else arguments.steps
    placement = torchrun_placement() or Placement(0, arguments.ranks)
    check_size(task, steps, placement.num_ranks)
    obstacle = _choose_link(arguments)
    console = Console()
    if placement.rank == 0 and not Outbox.of_this_rank():  # else the command on the host said it
        flags.make_folder(arguments.out)
        for line in [*_plan(task, hooks, steps, arguments), *obstacle]:
            print_line(console, line)

    def report(runs: Sequence[TrainingRun], where: Where) -> int:
        rows = [_row(task, run, steps, arguments.seed, where.link) for run in runs]
        timed = _has_times(rows)
        curves = [
            Curve(run.hook, run.losses, run.cumulative_wire_bytes, run.seconds if timed else ())
            for run in runs
        ]
        picture = arguments.out / "loss_curves.png"
        picture.write_bytes(draw_loss_curves(curves, f"training loss, {task.metric}"))
        console.print()
        against = "bytes sent and seconds" if timed else "bytes sent"
        print_line(console, f"Loss against {against}: {picture}")
        console.print()
        print_table(console, demo_table(rows))
        save_rows(console, arguments.json, rows, results_of="demo")
        return 0

    with StatusLine(console) as status:
        body = (task.name, hooks, steps, arguments.seed)
        return run_everywhere(arguments, compare_hooks, body, status, status.closing(report))


def _choose_link(arguments: argparse.Namespace) -> list[str]:
    """Sets --link where the user did not, and what `run_everywhere` reads beside it.

    Returns a sentence for people where the default's link cannot be made. Raises ConfigError for a
    link that was asked for and cannot be made.
    """
    arguments.hosts, arguments.ranks_per_host = arguments.ranks, 1
    if torchrun_placement():
        arguments.link = arguments.link or LOOPBACK  # `Where.on` looks at the hosts
        return []
    if arguments.link is None:
        obstacle = _obstacle(arguments.ranks)
        arguments.link = LOOPBACK if obstacle else _LINK
        arguments.command_line = [*arguments.command_line, "--link", arguments.link]
        return [f"No link of {_LINK} could be made: {obstacle}."] if obstacle else []
    if arguments.link != LOOPBACK:
        parse_link(arguments.link)
        check_network(arguments.ranks)
    return []


def _obstacle(num_hosts: int) -> str | None:
    """Why this process cannot join that many hosts by a link of the default rate; None: it can."""
    try:
        with Network(parse_link(_LINK), [("true",)] * num_hosts) as network:
            network.wait()
    except (ConfigError, PeerError) as error:
        return str(error).rstrip(".")
    return None


def _plan(task: Task, hooks: Sequence[str], steps: int, arguments: argparse.Namespace) -> list[str]:
    """What is about to happen, for people."""
    link = arguments.link
    if torchrun_placement():
        where = "between the ranks of torchrun" + (f", on {link}" if link != LOOPBACK else "")
    elif link == LOOPBACK:
        where = "over loopback"
    else:
        where = f"on a link of {link} between network namespaces"
    return [
        f"Task {task.name}: {task.source}.",
        f"{len(hooks)} trainings of {steps} steps take turns, step by step, {where}.",
    ]


def compare_hooks(
    emit: Emit, task_name: str, hooks: Sequence[str], steps: int, seed: int
) -> list[TrainingRun]:
    """Trains with all hooks, which take turns of one step each; runs on every rank.

    The order is reversed from round to round, so that what else the machine does affects all hooks
    alike.
    """
    task = load_task(task_name)
    trainings = [Training(task, hook, steps=steps, seed=seed) for hook in hooks]
    in_turn = list(trainings)
    for step in range(1, steps + 1):
        for training in in_turn:
            dist.barrier()  # no rank's step waits for another rank's step under another hook
            text = f"step {step}/{steps}: {training.hook}, loss {training.step():.3f}"
            emit(Doing(text, step / steps))
        in_turn.reverse()
    return [training.finish() for training in trainings]


def _row(task: Task, run: TrainingRun, steps: int, seed: int, link: str) -> dict[str, Any]:
    """One row of the JSON file. `ratio` is the bytes of fp32 over this hook's; null if none."""
    sent = run.wire_bytes_per_step
    return {
        "task": task.name,
        "hook": run.hook,
        "link": link,
        "ranks": run.num_ranks,
        "steps": steps,
        "seed": seed,
        "initial_loss": run.initial_loss,
        "final_loss": run.final_loss,
        "wire_bytes_per_step": sent,
        "wire_bytes_measured": run.measured,
        "wire_bytes_formula": run.wire_bytes_formula,
        "ratio": run.fp32_bytes / sent if sent else None,
        "ms_per_step": run.ms_per_step,
    }


def demo_table(rows: Sequence[Row]) -> Table:
    """The demo's rows."""
    task, first = load_task(rows[0]["task"]), rows[0]
    plain = [row["final_loss"] for row in rows if row["hook"] == PLAIN_DDP]

    def name(row: Row) -> str:
        return f"{row['hook']} (plain DDP)" if row["hook"] == PLAIN_DDP else str(row["hook"])

    def against(row: Row) -> str:
        return f"{100 * (row['final_loss'] / plain[0] - 1):+.2f} %" if plain else "-"

    columns = [
        Column("hook", name, is_number=False),
        Column("final\nloss", lambda row: f"{row['final_loss']:.4f}"),
        Column("against\nplain DDP", against),
        Column(
            "bytes sent\nper step ",
            lambda row: marked(row["wire_bytes_per_step"], row["wire_bytes_measured"]),
        ),
        Column("times\nfewer", lambda row: f"{row['ratio']:.2f}" if row["ratio"] else "-"),
    ]
    if _has_times(rows):
        columns.append(Column("ms per\nstep", lambda row: f"{row['ms_per_step']:.1f}"))
    return Table(
        title=f"gradferry demo: task {task.name}, {first['ranks']} ranks, link {first['link']}, "
        f"{first['steps']} steps, seed {first['seed']}",
        columns=columns,
        rows=rows,
        notes=_notes(task, rows),
    )


def _has_times(rows: Sequence[Row]) -> bool:
    return bool(rows[0]["link"] != LOOPBACK)


def _notes(task: Task, rows: Sequence[Row]) -> list[str]:
    times = "Milliseconds: median step of the slowest rank." if _has_times(rows) else ""
    notes = [
        f"Losses: of validation data, in {task.metric}; {rows[0]['initial_loss']:.4f} before "
        f"training. Bytes: of the rank that sends most. {times}".strip()
    ]
    if rows[0]["steps"] < task.default_steps:
        notes.append(
            f"{rows[0]['steps']} steps are too few to compare losses: early in a training, batches "
            f"differ more than hooks do. The default is {task.default_steps}."
        )
    if not all(row["wire_bytes_measured"] for row in rows):
        notes.append("* computed for a ring all-reduce: PyTorch does not count what it sends.")
    if _has_times(rows):
        return notes
    needs = ", ".join(
        f"{row['hook']} {8e3 * row['wire_bytes_per_step'] / _GIGABIT:.1f} ms" for row in rows
    )
    notes.append(
        f"Times are left out: ranks met over loopback, which is faster than any network. As root "
        f"(docker: --privileged) the demo makes a link of {_LINK} and shows them. For these bytes "
        f"alone 1 Gb/s needs in each step: {needs}."
    )
    return notes
