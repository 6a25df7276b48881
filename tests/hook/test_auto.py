"""codec="auto": all ranks try candidates at the same steps, and change at once."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gradferry.core.codec_spec import parse_codec
from gradferry.core.nodes import Nodes, choose_exchange, exchanges_to_choose_from, flat
from gradferry.ddp import auto
from gradferry.ddp.auto import FIRST_TRIAL, TRY_AGAIN_AFTER, Choice
from gradferry.ddp.state import bound_to
from gradferry.ddp.trial import COUNTED_STEPS, SETTLING_STEPS
from gradferry.errors import ConfigError
from gradferry.reduction import running, start
from outcomes import attempt
from scenario import Run, Scenario, Weight
from world import World

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))
RHT3 = str(parse_codec("rht:bits=3"))
Members = tuple[tuple[int, ...], ...]
AUTO = Scenario(WEIGHTS, codec="auto", ddp={"bucket_cap_mb": 0.02})
TRIAL = SETTLING_STEPS + COUNTED_STEPS  # steps of a candidate
CUT = SETTLING_STEPS + 1  # of a hopeless one


class CodecClock:
    """A clock by which a step takes what `ms` says of the codec that runs in it, else `other`; ten
    times as long while a candidate settles.
    """

    def __init__(self, state: Any, ms: dict[str, float], other: float = 1000.0) -> None:
        self._running = bound_to(state).running
        self._ms, self._other = ms, other
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
        return self._ms.get(self._before, self._other) * (10 if settles else 1)

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self) -> None:
        pass


def run_on(scenario: Scenario, found: Members | None) -> Run:
    """As if ranks were found on these nodes."""
    if found is None:
        return Run(scenario)
    with mock.patch.object(start, "resolve", return_value=Nodes(found)):
        return Run(scenario)


@contextmanager
def timed(state: Any, ms: dict[str, float]) -> Iterator[None]:
    """Steps of this state's model take what `ms` says."""
    with mock.patch.object(auto, "clock_of", return_value=CodecClock(state, ms)):
        yield


@contextmanager
def logged() -> Iterator[list[str]]:
    """What gradferry logs meanwhile, from INFO on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradferry")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def case_tried(
    scenario: Scenario,
    ms: Sequence[dict[str, float]],
    steps: int,
    found: Members | None = None,
    broken: str = "",
    again: int = TRY_AGAIN_AFTER,
) -> dict[str, Any]:
    """Trains with steps that take what `ms` says of this rank (or of all).

    broken: the codec whose engine does not start on rank 1.
    again: when it tries again.
    """
    run = run_on(scenario, found)
    bound = bound_to(run.state)
    bound.chooser.choice.interval = again
    make = running.start_engine

    def start_unless_broken(config: Any, *arguments: Any, **options: Any) -> Any:
        engine = make(config, *arguments, **options)
        # Once ranks are connected: the other one would wait for that until half of the timeout.
        if run.rank == 1 and str(config.codec) == broken:
            raise ConfigError(f"{broken} does not start here")
        return engine

    seen: list[tuple[str, str]] = []
    gradients, states = [], []
    with (
        logged() as messages,
        mock.patch.object(running, "start_engine", start_unless_broken),
        timed(run.state, ms[run.rank % len(ms)]),
    ):
        for step in range(steps):
            gradients.append(run.step(step))
            choice = run.state.stats()["choice"]
            seen.append((choice["codec"], choice["exchange"]))
            states.append(run.state.state_dict())
    return {
        "seen": seen,
        "codecs": [codec for codec, _ in seen],
        "gradients": gradients,
        "hashes": run.hashes,
        "choice": run.state.stats()["choice"],
        "stats": run.state.stats(),
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


def case_given(
    scenario: Scenario, begin: int, steps: int, found: Members | None = None
) -> list[Any]:
    """The same gradients with a codec that begins at step `begin`."""
    run = run_on(scenario, found)
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


ALIKE = dict.fromkeys((RHT3, "q4", "q8", "off"), 100.0)


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_all_ranks_try_every_candidate_at_the_same_steps(world_of_2: World, native: bool) -> None:
    # Nothing is withheld, so that every codec's steps are those of a training that begins there.
    scenario = dataclasses.replace(AUTO, native=native, error_feedback="none")
    spans = {
        "q4 first": (0, 2), RHT3: (2, 9), "q4": (9, 16), "q8": (16, 23), "off": (23, 32),
    }  # fmt: skip
    answers = try_all(world_of_2, scenario, ALIKE, steps=32)
    assert answers[0]["codecs"] == [
        name.partition(" ")[0] for name, (first, end) in spans.items() for _ in range(first, end)
    ]
    for name, (begin, end) in spans.items():
        given = dataclasses.replace(scenario, codec=name.partition(" ")[0])
        begun = world_of_2.run(case_given, scenario=given, begin=begin, steps=end)
        for answer, expected in zip(answers, begun, strict=True):
            assert equal(answer["gradients"][begin:end], expected), name
    made = answers[0]["choice"]
    assert (made["codec"], made["step"]) == ("off", 2 + 4 * TRIAL)
    assert made["next_check"] == made["step"] + TRY_AGAIN_AFTER
    assert made["measured_ms"] == pytest.approx(ALIKE)
    assert made["reason"].startswith("the most precise of the fastest: rht:bits=3")
    assert answers[0]["stats"]["steps"] == 32
    assert answers[0]["stats"]["fallbacks"] > 0
    (line,) = answers[0]["log"]
    assert line.startswith("codec='auto' takes off from step 30 on: the most precise of the")
    assert "q4 100.0 ms" in line
    assert answers[1]["log"] == []
    assert "codec 'off', the most precise" in answers[0]["text"]


def test_on_a_slow_link_precise_candidates_are_given_up_early(world_of_2: World) -> None:
    first = {RHT3: 100.0, "q4": 20.0, "q8": 160.0, "off": 20.0}
    second = {RHT3: 20.0, "q4": 101.0, "q8": 20.0, "off": 900.0}
    answers = try_all(world_of_2, AUTO, first, second, steps=30)
    # Between q4, which keeps both residuals, and q8, which keeps one, a step delivers, and one
    # between q8 and off, which keeps none.
    assert answers[0]["codecs"] == [
        *["q4"] * 2, *[RHT3] * TRIAL, *["q4"] * (TRIAL + 1), *["q8"] * (CUT + 1), *["off"] * CUT,
        *["q4"] * 6,
    ]  # fmt: skip
    made = answers[0]["choice"]
    assert made["measured_ms"] == pytest.approx({RHT3: 100, "q4": 101, "q8": 160, "off": 900})
    assert "q8 160.0 ms (1 step)" in made["reason"]
    assert made["codec"] == "q4"  # within 2 %
    assert "chosen by 'auto': the most precise of the fastest" in answers[0]["text"]


def test_it_tries_again_and_less_often_after_a_change(world_of_2: World) -> None:
    ms = {RHT3: 100.0, "q4": 110.0, "q8": 160.0, "off": 900.0}
    trial = 2 * TRIAL + 2 * CUT + 2
    answers = try_all(world_of_2, AUTO, ms, steps=2 + 2 * trial + 9, again=5)
    made = answers[0]["choice"]
    assert made["codec"] == RHT3
    assert made["step"] == 2 + trial  # as chosen first
    assert made["next_check"] == 2 + trial + 5 + trial + 5
    assert len(answers[0]["log"]) == 1  # nothing has changed


def case_changed(scenario: Scenario, before: str) -> dict[str, Any]:
    """As if `before` had been chosen, and other figures come now."""
    run = Run(scenario)
    bound = bound_to(run.state)
    bound.running.switch(bound.hook, parse_codec(before), 0)
    bound.chooser.choice = Choice(codec=parse_codec(before), made=True, interval=10)
    bound.chooser.start(bound.hook)
    with timed(run.state, {RHT3: 100.0, "q4": 110.0, "q8": 160.0, "off": 900.0}):
        for step in range(27):
            run.step(step)
    return run.state.stats()["choice"]


def test_a_change_doubles_the_time_until_the_next_trial(world_of_2: World) -> None:
    for before, interval in (("q4", 20), (RHT3, 10)):
        for choice in world_of_2.run(case_changed, scenario=AUTO, before=before):
            assert choice["codec"] == RHT3
            assert choice["next_check"] - (2 + 2 * TRIAL + 2 * CUT + 2) == interval


def test_a_candidate_that_cannot_start_on_a_rank_is_left_out(world_of_2: World) -> None:
    ms = {RHT3: 100.0, "q4": 90.0, "q8": 90.0}
    answers = try_all(world_of_2, AUTO, ms, steps=24, broken="q8")
    made = answers[0]["choice"]
    assert made["codec"] == "q4"
    assert set(made["measured_ms"]) == {RHT3, "q4", "off"}
    assert "codec='auto' leaves out q8: rank 1: q8 does not start here" in answers[1]["log"]


@pytest.mark.parametrize("options", [{"warmup_steps": 4}, {"warmup_steps": 4, "warmup": "q8"}])
def test_nothing_is_tried_in_a_warm_up(world_of_2: World, options: dict[str, Any]) -> None:
    scenario = dataclasses.replace(AUTO, options=options)
    answers = try_all(world_of_2, scenario, ALIKE, steps=6)
    assert answers[0]["codecs"] == ["q4"] * 4 + [RHT3] * 2
    plain = dataclasses.replace(scenario, codec="q4")
    given = world_of_2.run(case_given, scenario=plain, begin=0, steps=4)
    for answer, expected in zip(answers, given, strict=True):
        assert equal(answer["gradients"][:4], expected)


# --- where ranks share nodes

FOUND = ((0, 1), (2,))


def test_all_ranks_change_the_exchange_at_the_same_step(worlds: Callable[[int], World]) -> None:
    scenario = dataclasses.replace(AUTO, world_size=3, error_feedback="none")
    ms = {f"{RHT3} two-level": 120.0, "q4 two-level": 100.0, "q8 two-level": 110.0}
    flat = {f"{RHT3} flat": 101.0, "q4 flat": 130.0}
    world = worlds(3)
    answers = try_all(world, scenario, {**ms, **flat}, steps=45, found=FOUND)
    # Two levels come first, whichever attach took; of the same codec they send less.
    assert answers[0]["seen"] == [
        *[("q4", "two-level")] * 2,
        *[(RHT3, "two-level")] * TRIAL, *[(RHT3, "flat")] * TRIAL,
        *[("q4", "two-level")] * TRIAL, *[("q4", "flat")] * TRIAL,
        *[("q8", "two-level")] * TRIAL, *[("q8", "flat")] * CUT, *[("off", "flat")] * CUT,
        *[("q4", "two-level")] * 2,
    ]  # fmt: skip
    for name, found, (begin, end) in (
        (RHT3, ((0,), (1,), (2,)), (9, 16)),
        ("q4", FOUND, (16, 23)),
    ):
        given = dataclasses.replace(scenario, codec=name)
        begun = world.run(case_given, scenario=given, begin=begin, steps=end, found=found)
        for answer, expected in zip(answers, begun, strict=True):
            assert equal(answer["gradients"][begin:end], expected), name
    assert answers[0]["choice"]["exchange"] == "two-level"
    assert "exchange: two levels, 2 nodes" in answers[0]["text"]
    assert "because codec='auto' chose it" in answers[0]["text"]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(("option", "exchange"), [("flat", "flat"), (2, "two-level")])
def test_the_option_nodes_leaves_one_exchange_to_choose_from(
    option: str | int, exchange: str, on_host: bool
) -> None:
    found = Nodes(((0, 1), (2, 3)))
    (only,) = exchanges_to_choose_from(option, found, on_host=on_host)
    assert only.name == exchange
    both = exchanges_to_choose_from("auto", found, on_host=on_host)
    assert {each.name for each in both} == {"flat", "two-level"}
    assert both[-1] == choose_exchange("auto", found, on_host=on_host)
    for nodes in (flat(3), Nodes(((0, 1, 2),))):
        (alone,) = exchanges_to_choose_from("auto", nodes, on_host=on_host)
        assert alone.is_flat


# --- no choice


def case_disabled(scenario: Scenario) -> dict[str, Any]:
    with mock.patch.dict("os.environ", {"GRADFERRY_DISABLE": "1"}):
        run = Run(scenario)
    for step in range(FIRST_TRIAL + 2):
        run.step(step)
    return run.state.stats()


def test_disabled_it_chooses_nothing(world_of_2: World) -> None:
    for stats in world_of_2.run(case_disabled, scenario=AUTO):
        assert stats["choice"] == {
            "codec": "off",
            "exchange": "flat",
            "reason": "GRADFERRY_DISABLE=1",
        }
        assert stats["wire_bytes"] == 0


def case_failing(scenario: Scenario) -> Any:
    run = Run(scenario)

    def fail(*_: Any) -> None:
        raise ArithmeticError("not today")

    bound = bound_to(run.state)
    bound.hook.call_at(1, fail, "test")
    run.step(0)
    return attempt(lambda: run.step(1))


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_an_error_in_a_choice_is_the_steps_error(world_of_2: World, native: bool) -> None:
    for outcome in world_of_2.run(case_failing, scenario=dataclasses.replace(AUTO, native=native)):
        assert outcome.error == "ArithmeticError"
        assert "not today" in outcome.text
