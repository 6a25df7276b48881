"""Trainings with codec="auto" whose steps take what a test says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from gradferry.averaging import running
from gradferry.ddp import auto
from gradferry.ddp.auto import TRY_AGAIN_AFTER
from gradferry.ddp.state import bound_to
from gradferry.ddp.trial import COUNTED_STEPS, HOPELESS_STEPS, SETTLING_STEPS
from scenario import Run, Scenario, Weight, on_nodes
from stepping import logged
from world import World

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))
Members = tuple[tuple[int, ...], ...]
AUTO = Scenario(WEIGHTS, codec="auto", ddp={"bucket_cap_mb": 0.02})
FOUND = ((0, 1), (2,))  # nodes
TRIAL = SETTLING_STEPS + COUNTED_STEPS  # steps of a turn
CUT = SETTLING_STEPS + HOPELESS_STEPS  # of a hopeless one


class CodecClock:
    """A clock by which a step takes what `ms` says of the codec that runs in it, else 1000; ten
    times as long while a candidate settles. Every second step takes longer by the share `varies`.
    """

    def __init__(self, state: Any, ms: dict[str, float], varies: float = 0.0) -> None:
        self._running = bound_to(state).running
        self._ms, self._varies = ms, varies
        self._before, self._steps, self._now = "", 0, 0.0

    def mark(self) -> float:
        self._now += 1e-3 * self._length()
        codec = str(self._running.config.codec)
        exchange = self._running.exchange.name
        name = codec if codec in self._ms else f"{codec} {exchange}"
        self._steps = self._steps + 1 if name == self._before else 0
        self._before = name
        return self._now

    def _length(self) -> float:
        settles = self._steps < SETTLING_STEPS
        longer = (1 + self._varies * (self._steps % 2)) * (10 if settles else 1)
        return self._ms.get(self._before, 1000.0) * longer

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self) -> None:
        pass


def run_on(scenario: Scenario, found: Members | None) -> Run:
    """A run whose ranks seem to be on these nodes."""
    with on_nodes(found):
        return Run(scenario)


@contextmanager
def timed(state: Any, ms: dict[str, float], varies: float = 0.0) -> Iterator[None]:
    """Steps of this state's model take what `CodecClock` says."""
    with mock.patch.object(auto, "Clock", return_value=CodecClock(state, ms, varies)):
        yield


def case_tried(
    scenario: Scenario,
    ms: Sequence[dict[str, float]],
    steps: int,
    found: Members | None = None,
    broken: tuple[str, str] = ("start_engine", ""),
    again: int = TRY_AGAIN_AFTER,
    varies: float = 0.0,
) -> dict[str, Any]:
    """Trains with steps that take what `ms` says of this rank (or of all).

    broken: what fails on rank 1 when it turns to which codec.
    again: when it tries again.
    """
    run = run_on(scenario, found)
    bound = bound_to(run.state)
    bound.chooser.choice.interval = again
    name, codec = broken
    whole = getattr(running, name)

    def fail_if_broken(*arguments: Any, **options: Any) -> Any:
        made = whole(*arguments, **options)
        # Once ranks are connected: the other one would wait for that until half of the timeout.
        if run.rank == 1 and str(bound.running.config.codec) == codec:
            raise MemoryError(f"{name} fails here")
        return made

    seen: list[tuple[str, str]] = []
    gradients, states, reasons = [], [], []
    with (
        logged() as messages,
        mock.patch.object(running, name, fail_if_broken),
        timed(run.state, ms[run.rank % len(ms)], varies),
    ):
        for step in range(steps):
            gradients.append(run.step(step))
            stats = run.state.stats()
            choice = stats["choice"]
            seen.append((choice["codec"], choice["exchange"]))
            reasons.append(choice["reason"])
            states.append(run.state.state_dict())
    return {
        "seen": seen,
        "codecs": [codec for codec, _ in seen],
        "reasons": reasons,
        "gradients": gradients,
        "hashes": run.hashes,
        "choice": choice,
        "stats": stats,
        "states": states,
        "log": messages,
        "text": str(run.state),
        "config_hash": bound.running.config_hash,
    }


def try_all(
    world: World, scenario: Scenario, *ms: dict[str, float], steps: int, **options: Any
) -> list[dict[str, Any]]:
    """`case_tried` on a world, whose ranks must agree at every step."""
    answers = world.run(case_tried, scenario=scenario, ms=list(ms), steps=steps, **options)
    for field in ("hashes", "seen", "choice", "config_hash"):
        assert all(answer[field] == answers[0][field] for answer in answers), field
    return answers


def case_given(scenario: Scenario, begin: int, steps: int) -> list[Any]:
    """The same gradients with a codec that begins at step `begin`."""
    run = Run(scenario)
    engine = bound_to(run.state).running.engine
    if engine is not None:  # with codec "off" there is none
        worker, owner = (torch.zeros(size) for size in engine.residual_sizes())
        engine.load_state(steps=begin, worker_residual=worker, owner_residual=owner, loss_scale=0.0)
    return [run.step(step) for step in range(begin, steps)]


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(
        np.array_equal(a, b)
        for step, step_of_other in zip(one, other, strict=True)
        for a, b in zip(step, step_of_other, strict=True)
    )


def residuals_by_element(engine: Any, kind: str) -> np.ndarray:
    """Residuals of workers or owners in the order of parameters; 0 where this rank has none."""
    number = ("worker", "owner").index(kind)
    tiles, residual = engine.tiles(), engine.state()[1 + number].numpy()
    whole = np.zeros(sum(tile[1] for tile in tiles), np.float32)
    begin = 0
    for tile in tiles:
        count, offset = tile[1], tile[2 + number]
        if offset >= 0:
            whole[begin : begin + count] = residual[offset : offset + count]
        begin += count
    return whole
