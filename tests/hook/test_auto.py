"""codec="auto": which candidates are tried, in what order and for how long, and which one is taken;
all ranks try them at the same steps, and change at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from auto_trials import AUTO, CUT, FOUND, TRIAL, case_given, equal, timed, try_all
from gradferry.core.codec_spec import parse_codec
from gradferry.core.config import make_config
from gradferry.core.nodes import Exchange, Nodes, choose_exchange, exchanges_to_choose_from, flat
from gradferry.ddp.auto import TRY_AGAIN_AFTER, Choice, candidates, chooses
from gradferry.ddp.state import bound_to
from gradferry.ddp.trial import (
    HOPELESS,
    MARGIN,
    MOST_TURNS,
    TOLERANCE,
    Candidate,
    Trial,
    most_precise,
)
from gradferry.ddp.trial import Outcome as Measured
from gradferry_lab.workloads.hooks import chosen_by
from on_ranks import on_ranks
from outcomes import attempt
from scenario import Run
from world import World, Worlds

ALIKE = dict.fromkeys(("q4", "q8", "off"), 100.0)


@pytest.mark.torch_core
def test_all_ranks_try_every_candidate_at_the_same_steps(world_of_2: World) -> None:
    # Without residuals, so that every codec's steps are those of a training that begins there.
    scenario = dataclasses.replace(AUTO, error_feedback="none")
    spans = {"q4": (0, 2 + TRIAL), "q8": (9, 9 + TRIAL), "off": (16, 16 + TRIAL + 2)}
    answers = try_all(world_of_2, scenario, ALIKE, steps=25)
    assert answers[0]["codecs"] == [
        name for name, (first, end) in spans.items() for _ in range(first, end)
    ]
    for name, (begin, end) in spans.items():
        given = dataclasses.replace(scenario, codec=name)
        begun = world_of_2.run(case_given, scenario=given, begin=begin, steps=end)
        for answer, expected in zip(answers, begun, strict=True):
            assert equal(answer["gradients"][begin:end], expected), name
    made = answers[0]["choice"]
    assert (made["codec"], made["step"]) == ("off", 2 + 3 * TRIAL)
    assert made["next_check"] == made["step"] + TRY_AGAIN_AFTER
    assert made["measured_ms"] == pytest.approx(ALIKE)
    assert made["reason"].startswith("the most precise of the fastest: q4 100.0 ms")
    assert answers[0]["stats"]["steps"] == 25
    # DDP makes one bucket in its first step, then two, and `off` had 9 of the 25 steps.
    buckets, fallbacks = (answers[0]["stats"][key] for key in ("buckets", "fallbacks"))
    assert (buckets, fallbacks) == (1 + 2 * 15, 2 * 9)
    (line,) = answers[0]["log"]
    assert line.startswith("codec='auto' takes off from step 23 on")
    assert answers[1]["log"] == []


def test_on_a_slow_link_precise_candidates_are_given_up_early(world_of_2: World) -> None:
    first = {"q4": 20.0, "q8": 160.0, "off": 20.0}
    second = {"q4": 101.0, "q8": 20.0, "off": 900.0}
    answers = try_all(world_of_2, AUTO, first, second, steps=25)
    # Between q4, which keeps both residuals, and q8, which keeps one, a step delivers, and one
    # between q8 and off, which keeps none.
    assert answers[0]["codecs"] == [
        *["q4"] * (2 + TRIAL + 1), *["q8"] * (CUT + 1), *["off"] * CUT, *["q4"] * 6,
    ]  # fmt: skip
    made = answers[0]["choice"]
    assert made["measured_ms"] == pytest.approx({"q4": 101, "q8": 160, "off": 900})
    assert "q8 160.0 ms (2 steps)" in made["reason"]
    assert made["codec"] == "q4"
    text, stats = answers[0]["text"], answers[0]["stats"]
    assert "chosen by 'auto': the most precise of the fastest" in text
    # Steps of `off` sent nothing that is counted.
    sent, delay = (stats[key] / 25 for key in ("wire_bytes", "exposed_ms"))
    assert text.splitlines()[-1] == (
        f"  mean of 25 steps: {sent:,.0f} bytes sent, {stats['ratio']:.2f} times fewer "
        f"than uncompressed, {delay:.1f} ms exposed; {stats['fallbacks']} buckets passed through"
    )


def test_it_tries_again_as_soon_where_nothing_has_changed(world_of_2: World) -> None:
    ms = {"q4": 100.0, "q8": 160.0, "off": 900.0}
    trial = TRIAL + 2 * CUT + 2
    answers = try_all(world_of_2, AUTO, ms, steps=2 + 2 * trial + 9, again=5)
    made = answers[0]["choice"]
    assert made["codec"] == "q4"
    assert made["step"] == 2 + trial  # as chosen first
    assert made["next_check"] == 2 + trial + 5 + trial + 5
    assert len(answers[0]["log"]) == 1  # nothing has changed


@on_ranks()
def test_a_change_doubles_the_time_until_the_next_trial() -> None:
    """q8 had been chosen, and other figures come now."""
    run = Run(AUTO)
    bound = bound_to(run.state)
    bound.running.switch(bound.hook, parse_codec("q8"), 0)
    bound.chooser.choice = Choice(codec=parse_codec("q8"), made=True, interval=10)
    bound.chooser.start(bound.hook)
    with timed(run.state, {"q4": 100.0, "q8": 160.0, "off": 900.0}):
        for step in range(20):
            run.step(step)
    choice = run.state.stats()["choice"]
    assert choice["codec"] == "q4"
    assert choice["next_check"] - (2 + TRIAL + 2 * CUT + 2) == 20


@pytest.mark.parametrize("moment", ["start_engine", "spread"])
def test_a_candidate_that_one_rank_cannot_turn_to_is_left_out(
    world_of_2: World, moment: str
) -> None:
    answers = try_all(world_of_2, AUTO, {"q4": 90.0, "q8": 90.0}, steps=16, broken=(moment, "q8"))
    made = answers[0]["choice"]
    assert made["codec"] == "q4"
    assert set(made["measured_ms"]) == {"q4", "off"}
    reason = f"rank 1: MemoryError: {moment} fails here"
    assert f"codec='auto' leaves out q8: {reason}" in answers[1]["log"]


def test_nothing_is_tried_in_a_warm_up(world_of_2: World) -> None:
    scenario = dataclasses.replace(AUTO, options={"warmup_steps": 4, "warmup": "q8"})
    answers = try_all(world_of_2, scenario, ALIKE, steps=6)
    assert [reason.partition(" ")[0] for reason in answers[0]["reasons"]] == (
        ["no"] * 4 + ["trains"] * 2
    )


def test_all_ranks_change_the_exchange_at_the_same_step(worlds: Worlds) -> None:
    scenario = dataclasses.replace(AUTO, world_size=3, error_feedback="none")
    ms = {"q4 two-level": 100.0, "q4 flat": 130.0, "q8 two-level": 110.0}
    world = worlds(3)
    answers = try_all(world, scenario, ms, steps=33, found=FOUND)
    # Two levels come first, whichever attach took; of the same codec they send less.
    assert answers[0]["seen"] == [
        *[("q4", "two-level")] * (2 + TRIAL), *[("q4", "flat")] * TRIAL,
        *[("q8", "two-level")] * TRIAL, *[("q8", "flat")] * CUT, *[("off", "flat")] * CUT,
        *[("q4", "two-level")] * 2,
    ]  # fmt: skip
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
    # So the exchange of a named codec is chosen with "auto" alone, and on a device.
    transport = SimpleNamespace(on_host=on_host)
    for codec, nodes in itertools.product(("auto", "q4", "off"), ("auto", option)):
        config = make_config(codec, {"nodes": nodes})
        running = SimpleNamespace(config=config, nodes=found, transport=transport, world_size=4)
        wanted = codec == "auto" or (codec == "q4" and nodes == "auto" and not on_host)
        assert chooses(running) == wanted
    for nodes in (flat(3), Nodes(((0, 1, 2),))):
        (alone,) = exchanges_to_choose_from("auto", nodes, on_host=on_host)
        assert alone.nodes.is_flat


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_an_error_in_a_choice_is_the_steps_error(native: bool) -> None:
    run = Run(dataclasses.replace(AUTO, native=native))

    def fail(*_: Any) -> None:
        raise ArithmeticError("not today")

    bound_to(run.state).hook.call_at(1, fail, "test")
    run.step(0)
    outcome = attempt(lambda: run.step(1))
    assert outcome.error == "ArithmeticError"
    assert "not today" in outcome.text


def candidate(name: str) -> Candidate:
    """By "codec" or "codec exchange"."""
    codec, _, exchange = name.partition(" ")
    backend = codec in ("off", "torch:fp32")
    bits = 32.0 if backend else parse_codec(codec).bits()
    return Candidate(codec, bits, exchange or None, needs_memory=not backend)


@pytest.mark.parametrize(
    ("ms", "chosen"),
    [
        ({"off": 100, "q8": 99, "q4": 98.1}, "off"),  # all within 2 % of the fastest
        ({"off": 103, "q8": 99, "q4": 98.1}, "q8"),
        ({"off": 101, "exact": 100}, "off"),  # as precise, and needs no memory
        # 3 bits where they save more than 2 %, or 4 bits cost no more.
        ({"q4": 103, "rht:bits=3": 100}, "rht:bits=3"),
        # q4 has 4.3 bits and rht 4.1, and loses no less: the faster of the two.
        ({"q4": 101, "rht:bits=4": 100.5, "rht:bits=3": 100}, "rht:bits=4"),
        ({"q4 flat": 101, "q4 two-level": 100}, "q4 (two-level)"),
        ({"off": 101, "q4 two-level": 100}, "off"),
    ],
)
def test_the_most_precise_within_2_percent_is_chosen(ms: dict[str, float], chosen: str) -> None:
    outcomes = [Measured(candidate(name), ((value,) * 5,)) for name, value in ms.items()]
    assert most_precise(outcomes).candidate.name == chosen


class Steps:
    """A trial and its clock, by which the next step under a candidate takes `length(name)`."""

    def __init__(self, names: Sequence[str], length: Callable[[str], float]) -> None:
        self._now, self._length = 0.0, length
        self.trial = Trial(map(candidate, names), self, list)

    def mark(self) -> float:
        assert self.trial.current is not None
        self._now += self._length(self.trial.current.name)
        return self._now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self) -> None:
        pass

    def run(self) -> list[str]:
        """The candidate of every step."""
        names = []
        while (current := self.trial.current) is not None:
            if not self.trial.step_begins():
                names.append(current.name)
        return names


def listed(seconds: dict[str, list[float]]) -> Steps:
    """Steps that take these seconds, after one for each turn that lies between two candidates."""
    left = {name: iter(each) for name, each in seconds.items()}
    return Steps([*reversed(seconds)], lambda name: next(left[name]))


def test_the_fewest_bytes_come_first_and_two_slow_steps_in_a_row_end_a_turn() -> None:
    seconds = {
        "q4": [0, 9, 9, 2, 2, 2, 2, 2],
        "q8": [0, 9, 9, 100, HOPELESS * 2, 2, 2, 2],  # at the limit it goes on
        "off": [0, 9, 9, 100, HOPELESS * 2 + 0.125],
    }
    # The spread of q8 asks for further turns, which are as the first.
    steps = listed({name: each * MOST_TURNS for name, each in seconds.items()})
    tried = steps.run()
    both = ["q4"] * TRIAL + ["q8"] * TRIAL
    assert tried == both + ["off"] * CUT + both * (MOST_TURNS - 1)
    seen = {o.candidate.name: (o.seconds, o.steps) for o in steps.trial.outcomes}
    assert seen == {"q4": (2, 15), "q8": (2, 15), "off": (51.5625, 2)}
    assert steps.trial.outcomes[-1].shown == "off 51,562.5 (3,125.0..100,000.0) ms (2 steps)"


def test_the_slowest_rank_counts_and_a_pause_is_one_slow_step_on_each() -> None:
    """Another rank notes the pause one step later."""
    mine = {"q4": [0, 1, 1, 1, 1, 1, 1, 1], "q8": [0, 1, 1, 50, 1, 1, 1, 1]}
    steps = listed({name: each * MOST_TURNS for name, each in mine.items()})
    theirs = [2.0, 50.0, 2.0, 2.0, 2.0]
    steps.trial._slowest = lambda mine: [*map(max, mine, sorted(theirs[: len(mine)]))]
    steps.run()
    assert [(each.seconds, each.is_hopeless) for each in steps.trial.outcomes] == [(2, False)] * 2


def noise(kind: str, draw: random.Random) -> Iterator[float]:
    """By what factor each step takes longer."""
    phase, fast = draw.randrange(10), draw.choice((-1, 1))
    for step in itertools.count():
        factor = 1 + draw.gauss(0, 0.02)
        if kind == "evaluations" and step % 10 == phase:
            factor = 6.0
        elif kind == "heavy tails":
            factor = draw.lognormvariate(0, 0.15)
            factor *= draw.paretovariate(1.5) if draw.random() < 0.15 else 1
        elif kind == "drift":
            factor *= 1.004 ** (fast * (step % 100))
        for _ in range(draw.randrange(2, 6) if kind == "bursts" and draw.random() < 1 / 20 else 0):
            yield factor * 1.6
        yield factor


@pytest.mark.parametrize(
    ("kind", "least"),
    [("quiet", 1), ("evaluations", 1), ("heavy tails", 0.97), ("drift", 1), ("bursts", 0.95)],
)
def test_the_choice_is_near_the_best_whatever_disturbs_the_steps(kind: str, least: float) -> None:
    """Within `MARGIN` and what precision is worth, in this share of trials at least."""
    near = []
    for seed in range(300):
        draw = random.Random(seed)
        true = {name: draw.uniform(1, 1.6) for name in ("q4", "q8", "off")}
        factors = noise(kind, draw)
        steps = Steps([*true], lambda name, true=true, factors=factors: true[name] * next(factors))
        assert len(steps.run()) <= 3 * TRIAL * MOST_TURNS
        chosen = most_precise(steps.trial.outcomes).candidate.name
        near.append(true[chosen] <= min(true.values()) * (1 + MARGIN) * (1 + TOLERANCE))
    assert sum(near) >= least * len(near), sum(near)


ALONE = [Exchange(flat(2), "")]
ON_NODES = [Exchange(flat(4), ""), Exchange(Nodes(((0, 1), (2, 3))), "")]


@pytest.mark.parametrize(
    ("options", "exchanges", "expected"),
    [
        ({}, ALONE, {"q4", "q8", "off"}),
        ({"nonfinite": "raise"}, ALONE, {"q4", "q8", "exact"}),
        ({"check_every": 5}, ALONE, {"q4", "q8", "exact"}),
        (
            {},
            ON_NODES,
            {"off", "q4 (flat)", "q4 (two-level)", "q8 (flat)", "q8 (two-level)"},
        ),
    ],
)
def test_candidates_are_codecs_that_cost_no_loss_and_off(
    options: dict[str, Any], exchanges: list[Exchange], expected: set[str]
) -> None:
    config = make_config("auto", options)
    assert {each.name for each in candidates(config, exchanges)} == expected


def test_coarser_codecs_are_for_momentum_mode_which_off_cannot_deliver() -> None:
    found = {each.name for each in candidates(make_config("auto", {"momentum": 0.9}), ALONE)}
    assert {"q8", "q4", "rht:bits=3"} < found
    assert {"sign1", "topk"} < {name.partition(":")[0] for name in found}
    assert not {"off", "exact"} & found


def test_the_first_choice_is_made_when_benchmarks_expect_it(world_of_2: World) -> None:
    """At the latest: no candidate is hopeless, and none is the fastest for sure."""
    config = make_config("auto")
    tried = [each.name for each in candidates(config, ALONE)]
    latest = chosen_by(config)
    scenario = dataclasses.replace(AUTO, weights=AUTO.weights[:1])
    ms = dict.fromkeys(tried, 100.0)
    choice = try_all(world_of_2, scenario, ms, steps=latest + 1, varies=0.4)[0]["choice"]
    assert set(choice["measured_ms"]) == set(tried)
    assert len(tried) * MOST_TURNS * TRIAL <= choice["step"] <= latest
