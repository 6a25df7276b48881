"""`gradferry demo`: the same training with several gradient hooks, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradferry.core.codec_spec import OFF
from gradferry.errors import ConfigError
from rich.console import Console

from gradferry_lab import flags
from gradferry_lab.output.curves import THEMES, Axis, Curve, draw_loss_curves
from gradferry_lab.output.html import Picture, Section, html_page
from gradferry_lab.output.json_file import environment, write_json
from gradferry_lab.output.progress import StepDone, TrainingProgress
from gradferry_lab.output.table import Column, Table, print_line, print_table
from gradferry_lab.ranks.launch import Emit, Placement, run_ranks, torchrun_placement
from gradferry_lab.workloads import TASKS, load_task
from gradferry_lab.workloads.hook_names import TORCH_HOOKS, check_hook
from gradferry_lab.workloads.task import Task
from gradferry_lab.workloads.training import TrainingRun, check_size, train

DEFAULT_HOOKS = ("torch:fp32", "torch:bf16", "q4")
_REFERENCE = "torch:fp32"
_GIGABIT = 1e9  # bits per second

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry demo`."""
    parser.add_argument(
        "--task",
        default="text",
        help=f"what to train: {' or '.join(TASKS)} (default: %(default)s)",
    )
    flags.add_hooks(
        parser,
        DEFAULT_HOOKS,
        f"hooks to compare, in this order: {' '.join(TORCH_HOOKS)}, off, or a gradferry codec "
        f"as listed by `gradferry info`",
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
        "--seed", type=int, default=0, help="of model and data, the same for all (default: 0)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo_results"),
        metavar="DIR",
        help="folder for loss_curves.png and index.html (default: %(default)s)",
    )
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trains, then reports. Raises a GradferryError when an option is wrong or a rank fails."""
    for hook in arguments.hooks:
        check_hook(hook)
    task = load_task(arguments.task)
    steps = task.default_steps if arguments.steps is None else arguments.steps
    placement = torchrun_placement() or Placement(0, arguments.ranks)
    check_size(task, steps, placement.num_ranks)
    is_first = placement.rank == 0
    console = Console()
    if is_first:
        _make_folder(arguments.out)
        print_line(console, f"Task {task.name}: {task.source}.")
    with TrainingProgress(console) as progress:
        runs = run_ranks(
            compare_hooks,
            (task.name, tuple(arguments.hooks), steps, arguments.seed),
            arguments.ranks,
            progress,
        )
    if is_first:
        rows = [_row(task, run, steps, arguments.seed) for run in runs]
        _report(console, task, rows, arguments.out, arguments.json)
    return 0


def compare_hooks(
    emit: Emit, task_name: str, hooks: Sequence[str], steps: int, seed: int
) -> list[TrainingRun]:
    """Trains with one hook after the other; runs on every rank."""
    task = load_task(task_name)

    def train_with(hook: str) -> TrainingRun:
        def on_step(step: int, loss: float) -> None:
            emit(StepDone(hook, step, steps, loss))

        return train(task, hook, steps=steps, seed=seed, on_step=on_step)

    return [train_with(hook) for hook in hooks]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot make this folder: {error}") from error


def _row(task: Task, run: TrainingRun, steps: int, seed: int) -> dict[str, Any]:
    """One row of the JSON file. `ratio` is the bytes of fp32 over this hook's; null if none."""
    sent = run.wire_bytes_per_step
    return {
        "task": task.name,
        "hook": run.hook,
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
        "losses": run.losses,
        "cumulative_wire_bytes": run.cumulative_wire_bytes,
    }


def _report(
    console: Console, task: Task, rows: Sequence[Row], folder: Path, json_file: Path | None
) -> None:
    section = section_of(rows)
    table, (picture,) = section.table, section.pictures
    console.print()
    print_table(console, table)
    page = html_page(table.title, f"{task.source}.", [section], environment())
    (folder / "loss_curves.png").write_bytes(picture.light)
    (folder / "index.html").write_text(page, encoding="utf-8")
    written = [folder / "loss_curves.png", folder / "index.html"]
    if json_file:
        write_json(json_file, rows, results_of="demo")
        written.append(json_file)
    print_line(console, f"Written: {', '.join(map(str, written))}")


def section_of(rows: Sequence[Row]) -> Section:
    """Table and curves of the demo's rows."""
    task = load_task(rows[0]["task"])
    curves = [Curve(row["hook"], row["losses"], row["cumulative_wire_bytes"]) for row in rows]
    axis = Axis(f"training loss, {task.metric}")
    light, dark = (draw_loss_curves(curves, axis, theme) for theme in THEMES)
    picture = Picture("Training loss by step and by bytes sent, one curve per hook", light, dark)
    return Section(_table(task, rows), [picture])


def _table(task: Task, rows: Sequence[Row]) -> Table:
    reference = next((row["final_loss"] for row in rows if row["hook"] == _REFERENCE), None)
    first = rows[0]
    columns = (
        Column("hook", lambda row: str(row["hook"]), is_number=False),
        Column("initial\nloss", lambda row: f"{row['initial_loss']:.4f}"),
        Column("final\nloss", lambda row: f"{row['final_loss']:.4f}"),
        Column("against\nfp32", lambda row: _against(row["final_loss"], reference)),
        Column("bytes\nsent ", lambda row: _bytes_sent(row)),
        Column("bytes by\nformula", lambda row: f"{row['wire_bytes_formula']:,}"),
        Column("fp32 /\nsent", lambda row: f"{row['ratio']:.2f}" if row["ratio"] else "-"),
        Column("ms per\nstep", lambda row: f"{row['ms_per_step']:.1f}"),
    )
    return Table(
        title=f"gradferry demo: task {task.name}, {first['ranks']} ranks, "
        f"{first['steps']} steps, seed {first['seed']}",
        columns=columns,
        rows=rows,
        notes=_notes(task, rows),
    )


def _against(loss: float, reference: float | None) -> str:
    return "-" if reference is None else f"{100 * (loss / reference - 1):+.2f} %"


def _bytes_sent(row: Row) -> str:
    mark = " " if row["wire_bytes_measured"] else "*"
    return f"{row['wire_bytes_per_step']:,}{mark}"


def _notes(task: Task, rows: Sequence[Row]) -> list[str]:
    notes = [
        f"Losses are of the validation data, in {task.metric}. Bytes are per step, of the rank "
        f"that sends most; milliseconds are the median step of the slowest rank."
    ]
    if not all(row["wire_bytes_measured"] for row in rows):
        notes.append("* computed for a ring all-reduce: PyTorch does not count what it sends.")
    compared = _compared(rows)
    if compared:
        notes.append(compared)
    times = ", ".join(f"{row['hook']} {_wire_ms(row):.1f} ms" for row in rows)
    notes.append(f"A link of 1 Gb/s would need, for these bytes in each step: {times}.")
    return notes


def _compared(rows: Sequence[Row]) -> str:
    """What this run measured of every codec, for the network that it had. Empty without both kinds
    of hooks.
    """
    backend = [row for row in rows if row["hook"] == OFF or row["hook"].startswith("torch:")]
    codecs = [row for row in rows if row not in backend]
    if not backend or not codecs:
        return ""
    best = min(backend, key=lambda row: float(row["ms_per_step"]))
    ratios = ", ".join(
        f"{row['hook']} {row['ms_per_step'] / best['ms_per_step']:.2f} times" for row in codecs
    )
    return (
        f"In this run a step took, of the {best['ms_per_step']:.1f} ms with {best['hook']}, the "
        f"fastest without a codec: {ratios}. That is what it is on the network between these ranks "
        f"(loopback, unless torchrun started them elsewhere); `gradferry doctor` looks at others."
    )


def _wire_ms(row: Row) -> float:
    return 1000 * 8 * int(row["wire_bytes_per_step"]) / _GIGABIT
