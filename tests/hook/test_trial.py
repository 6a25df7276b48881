"""Which candidates are tried, in what order, for how long, and which one is taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gradferry.core.codec_spec import parse_codec
from gradferry.core.config import make_config
from gradferry.core.nodes import Exchange, Nodes, flat
from gradferry.ddp.auto import candidates
from gradferry.ddp.trial import (
    COUNTED_STEPS,
    HOPELESS,
    SETTLING_STEPS,
    Candidate,
    Outcome,
    Trial,
    most_precise,
)

ONE = [Exchange(flat(2), "")]
TWO = [Exchange(flat(4), ""), Exchange(Nodes(((0, 1), (2, 3))), "")]


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
        ({"off": 200, "q8": 111, "q4": 100}, "q4"),
        ({"off": 101, "exact": 100}, "off"),  # as precise, and needs no memory
        # 3 bits where they save more than 2 %, or 4 bits cost no more.
        ({"q4": 103, "rht:bits=3": 100}, "rht:bits=3"),
        ({"q4": 101, "rht:bits=4": 102, "rht:bits=3": 100}, "q4"),
        # q4 has 4.3 bits and rht 4.1, and loses no less: the faster of the two.
        ({"q4": 101, "rht:bits=4": 100.5, "rht:bits=3": 100}, "rht:bits=4"),
        ({"q4 flat": 101, "q4 two-level": 100}, "q4 (two-level)"),
        ({"q4 flat": 100, "q8 two-level": 101}, "q8 (two-level)"),
        ({"off": 101, "q4 two-level": 100}, "off"),
    ],
)
def test_the_most_precise_within_2_percent_is_chosen(ms: dict[str, float], chosen: str) -> None:
    outcomes = [Outcome(candidate(name), value, 5) for name, value in ms.items()]
    assert most_precise(outcomes).candidate.name == chosen


class ListedClock:
    """A clock by which steps take these seconds, one after the other."""

    def __init__(self, seconds: list[float]) -> None:
        self._steps = iter(seconds)
        self._now = 0.0

    def mark(self) -> float:
        self._now += next(self._steps)
        return self._now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def tried(trial: Trial) -> Iterator[Candidate]:
    """The candidate of every step."""
    while (current := trial.current) is not None:
        if not trial.step_begins():
            yield current


def trial_of(seconds: dict[str, list[float]]) -> Trial:
    """The seconds that each candidate's steps take; the first number is between two candidates."""
    steps = [each for name in seconds for each in [0.0, *seconds[name]]]
    clock: Any = ListedClock(steps)
    return Trial(map(candidate, reversed(seconds)), clock, lambda value: value)


def test_the_median_of_five_counts_after_two_that_settle() -> None:
    trial = trial_of({"q4": [100, 100, 7, 1, 2, 3, 4]})
    assert len(list(tried(trial))) == SETTLING_STEPS + COUNTED_STEPS == 7
    assert trial.outcomes == [Outcome(candidate("q4"), 3, 5)]


def test_the_fewest_bytes_come_first_and_what_is_hopeless_gets_one_counted_step() -> None:
    trial = trial_of(
        {
            "rht:bits=3 two-level": [9, 9, 2, 2, 2, 2, 2],
            "rht:bits=3 flat": [9, 9, HOPELESS * 2, 2, 2, 2, 2],  # at the limit it goes on
            "q4": [9, 9, HOPELESS * 2 + 0.125],
            "off": [9, 9, 100],
        }
    )
    steps = list(tried(trial))
    assert [(o.candidate.name, o.seconds, o.steps) for o in trial.outcomes] == [
        ("rht:bits=3 (two-level)", 2, 5),
        ("rht:bits=3 (flat)", 2, 5),
        ("q4", 3.125, 1),
        ("off", 100, 1),
    ]
    assert [steps.count(outcome.candidate) for outcome in trial.outcomes] == [7, 7, 3, 3]
    assert trial.outcomes[-1].shown == "off 100,000.0 ms (1 step)"


def test_the_slowest_rank_counts() -> None:
    clock: Any = ListedClock([0, 1, 1, 1, 1, 1, 1, 1])
    trial = Trial([candidate("q4")], clock, lambda value: value + 5)
    assert len(list(tried(trial))) == 7
    assert trial.outcomes[0].seconds == 6


def test_what_is_left_out_is_neither_tried_nor_chosen() -> None:
    trial = trial_of({"q4": [0, 0, 1, 1, 1, 1, 1], "q8": [0]})
    assert not trial.step_begins()
    trial.leave_out(candidate("q8"))
    trial.leave_out(candidate("q4"))
    assert trial.current is None
    assert trial.outcomes == []


def names(exchanges: list[Exchange], **options: Any) -> set[str]:
    config = make_config("auto", options)
    return {each.name for each in candidates(config, exchanges)}


def test_candidates_are_codecs_of_3_bits_or_more_and_off() -> None:
    assert names(ONE) == {str(parse_codec("rht:bits=3")), "q4", "q8", "off"}


@pytest.mark.parametrize(
    "options", [{"nonfinite": "raise"}, {"check_every": 5}, {"exact_skip": True}]
)
def test_exact_replaces_off_where_only_an_engine_does_what_was_asked(options: Any) -> None:
    assert names(ONE, **options) == {str(parse_codec("rht:bits=3")), "q4", "q8", "exact"}


def test_codecs_below_3_bits_are_for_momentum_mode_which_off_cannot_deliver() -> None:
    found = names(ONE, momentum=0.9)
    assert {"q8", "q4"} < found
    assert {"sign1", "topk"} < {name.partition(":")[0] for name in found}
    assert not {"off", "exact"} & found


def test_every_codec_is_tried_with_both_exchanges() -> None:
    found = names(TWO)
    assert found >= {"off", "q4 (flat)", "q4 (two-level)", "q8 (flat)", "q8 (two-level)"}
    assert len(found) == 7
