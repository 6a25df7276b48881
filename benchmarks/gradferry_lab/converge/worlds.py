"""Runs trainings in several worlds at once, and keeps each result as soon as it is there."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Sequence
from typing import Any

from gradferry.errors import ConfigError

from gradferry_lab.converge.results import Results
from gradferry_lab.converge.suite import Training
from gradferry_lab.output.json_file import finite
from gradferry_lab.output.progress import Doing, StatusLine
from gradferry_lab.ranks.launch import Emit, run_worlds, torchrun_placement
from gradferry_lab.workloads import load_task
from gradferry_lab.workloads.training import Stopped, TrainingRun, train

_SHOWN_EVERY = 20  # steps

_task = functools.cache(load_task)  # reads files


# A world, its training, and the row when it is finished, else the share that is done, 0 to 1.
_Event = tuple[int, Training, "float | dict[str, Any]"]


def run_trainings(
    trainings: Sequence[Training],
    num_worlds: int,
    results: Results,
    status: StatusLine,
    deadline: float,
) -> None:
    """Trains all, at most `num_worlds` at a time, into `results`, until the deadline in seconds of
    `time.time`.

    Raises ConfigError under torchrun, and what a rank raises; what was saved stays.
    """
    if torchrun_placement():
        raise ConfigError("converge starts its own ranks; call it without torchrun")
    if not trainings:
        return

    whole = sum(training.cost for training in trainings)
    under_way: dict[int, float] = {}  # cost done, by world
    finished: list[Training] = []

    def on_event(event: _Event) -> None:
        world, training, news = event
        if isinstance(news, dict):
            results.add(training, news)
            finished.append(training)
            under_way.pop(world, None)
            loss = news["final_loss"]
            said = "not finite" if loss is None else f"{loss:.5g}"
            status.print(f"{len(finished)}/{len(trainings)} {training.title}: loss {said}")
            return
        under_way[world] = news * training.cost
        done = sum(each.cost for each in finished) + sum(under_way.values())
        text = f"{len(finished)}/{len(trainings)} {training.title}: {news:.0%}"
        status(Doing(text, done / whole))

    for num_ranks in dict.fromkeys(training.num_ranks for training in trainings):
        alike = [training for training in trainings if training.num_ranks == num_ranks]
        hands = [hand for hand in deal(alike, num_worlds) if hand]
        arguments = [(world, hand, results, deadline) for world, hand in enumerate(hands)]
        run_worlds(train_all, arguments, num_ranks, on_event)


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


def train_all(
    emit: Emit, world: int, trainings: Sequence[Training], results: Results, deadline: float
) -> None:
    """Trains one after the other until the deadline; runs on every rank of a world."""
    # Plain Adam behind sign1 and topk is among what is measured.
    warnings.filterwarnings("ignore", message=".*trains worse behind", category=UserWarning)
    with contextlib.suppress(Stopped):
        for training in trainings:
            row = _row(training, _train(emit, world, training, results, deadline))
            emit((world, training, finite(row)))


def _train(
    emit: Emit, world: int, training: Training, results: Results, deadline: float
) -> TrainingRun:
    def on_step(step: int, loss: float) -> None:
        if step % _SHOWN_EVERY == 0:
            emit((world, training, step / training.steps))

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
        progress=results.progress(training, deadline),
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
    }
