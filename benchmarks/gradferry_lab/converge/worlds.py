"""Runs trainings in several worlds at once, and keeps each result as soon as it is there."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gradferry.errors import ConfigError

from gradferry_lab.converge.suite import Training
from gradferry_lab.output.json_file import finite
from gradferry_lab.output.progress import PartDone, PieceDone, WorkProgress
from gradferry_lab.ranks.launch import Emit, run_worlds, torchrun_placement
from gradferry_lab.workloads import load_task
from gradferry_lab.workloads.training import TrainingRun, train

_CURVE_POINTS = 50
_SHOWN_EVERY = 20  # steps

_task = functools.cache(load_task)  # reads files


@dataclass(frozen=True)
class _Finished:
    world: int
    training: Training
    row: dict[str, Any]


def run_trainings(
    trainings: Sequence[Training],
    num_worlds: int,
    keep: Callable[[Training, dict[str, Any]], None],
    progress: WorkProgress,
) -> None:
    """Trains all, at most `num_worlds` at a time, and hands each row to `keep`.

    Raises ConfigError under torchrun, and what a rank raises; rows that were kept stay.
    """
    if torchrun_placement():
        raise ConfigError("converge starts its own ranks; call it without torchrun")
    if not trainings:
        return

    def on_event(event: Any) -> None:
        if isinstance(event, _Finished):
            keep(event.training, event.row)
            loss = event.row["final_loss"]
            title = (
                f"{event.training.title}: loss {'not finite' if loss is None else f'{loss:.5g}'}"
            )
            progress.piece_done(PieceDone(event.world, title, event.training.cost))
        else:
            progress.part_done(event)

    for num_ranks in sorted({training.num_ranks for training in trainings}):
        alike = [training for training in trainings if training.num_ranks == num_ranks]
        hands = [hand for hand in deal(alike, num_worlds) if hand]
        run_worlds(train_all, list(enumerate(hands)), num_ranks, on_event)


def deal(trainings: Sequence[Training], num_worlds: int) -> list[list[Training]]:
    """Deals trainings to worlds, first seeds and among them costly ones first, always to the world
    with the least to do. So an interrupted run has something of every contestant.
    """
    hands: list[list[Training]] = [[] for _ in range(num_worlds)]
    costs = [0.0] * num_worlds
    for training in sorted(trainings, key=lambda one: (one.seed, -one.cost)):
        world = costs.index(min(costs))
        hands[world].append(training)
        costs[world] += training.cost
    return hands


def train_all(emit: Emit, world: int, trainings: Sequence[Training]) -> None:
    """Trains one after the other; runs on every rank of a world."""
    # Plain Adam behind sign1 and topk is among what is measured.
    warnings.filterwarnings("ignore", message=".*trains worse behind", category=UserWarning)
    for training in trainings:
        row = _row(training, _train(emit, world, training))
        emit(_Finished(world, training, finite(row)))


def _train(emit: Emit, world: int, training: Training) -> TrainingRun:
    def on_step(step: int, loss: float) -> None:
        if step % _SHOWN_EVERY == 0:
            emit(PartDone(world, training.title, step / training.steps, training.cost))

    contestant = training.contestant
    return train(
        _task(training.task),
        contestant.hook(training.steps),
        steps=training.steps,
        seed=training.seed,
        optimizer=contestant.optimizer,
        parallel=contestant.parallel,
        device=training.device,
        on_step=on_step,
    )


def _row(training: Training, run: TrainingRun) -> dict[str, Any]:
    """One row of the JSON file. `wire_bytes`: sent by the rank that sends most, in all steps."""
    task = _task(training.task)
    gathered = {} if run.gathered_loss is None else {"gathered_loss": run.gathered_loss}
    return {
        **training.facts(),
        "source": task.source,
        "final_loss": run.final_loss,
        **gathered,
        "final_metric": run.final_score,
        "wire_bytes": run.cumulative_wire_bytes[-1],
        "initial_loss": run.initial_loss,
        "curve": _curve(run, task.lowest_loss),
    }


def _curve(run: TrainingRun, lowest_loss: float) -> dict[str, list[Any]]:
    """The training loss above the lowest one, as means of equal stretches of steps."""
    num_steps = len(run.losses)
    ends = [
        num_steps * (point + 1) // _CURVE_POINTS
        for point in range(_CURVE_POINTS)
        if num_steps * (point + 1) // _CURVE_POINTS > num_steps * point // _CURVE_POINTS
    ]
    starts = [0, *ends[:-1]]
    return {
        "steps": ends,
        "losses": [
            float(f"{fmean(run.losses[start:end]) - lowest_loss:.5g}")
            for start, end in zip(starts, ends, strict=True)
        ],
        "wire_bytes": [run.cumulative_wire_bytes[end - 1] for end in ends],
    }
