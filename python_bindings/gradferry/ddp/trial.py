"""Candidates take turns of a few steps each: the clocks of the ranks say which is fastest.

`codec="auto"` tries candidates in a training, `doctor` on copies of a model. The candidate that
sends the fewest bytes comes first, so that on a slow link the others are known to be hopeless after
few steps. Where the steps of the fastest vary so much that their order is open, they take further
turns. A device runs behind the host, so the host's clock says nothing about the work on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from statistics import median
from typing import Any, NamedTuple

import torch

from gradferry.core.nodes import FLAT

# What "auto" and `doctor` compare with no compression, unless they are asked for more: trainings
# with these end where fp32 ends. Recommendations come from here, and from `most_precise`.
CODECS = ("q4", "q8")
# By codec that may be asked for, and needs no momentum mode: the loss that it cost in the trainings
# of docs/results/convergence.md.
LOSSES = {"rht:bits=3": "with AdamW it ended 0.73 % above fp32 on text and 1.72 % on images"}

SETTLING_STEPS = 2  # of a turn: they connect ranks and touch new memory
COUNTED_STEPS = 5
# A candidate is given up if two steps in a row, the first that count, take more than so many times
# what the fastest takes: one slow step may be an evaluation.
HOPELESS, HOPELESS_STEPS = 1.5, 2
MOST_TURNS = 3  # of a candidate
# No further turns once the one that would be chosen may be slower than another by this at most, as
# far as the intervals of the medians say.
MARGIN = 0.1
TOLERANCE = 0.02  # within this share of the fastest, precision decides
WANTED_COVERAGE = 0.95  # of an interval of a median


class Interval(NamedTuple):
    """A median and its confidence interval; `coverage_of` gives the confidence."""

    median: float
    low: float
    high: float

    def shown(self, form: str, factor: float = 1.0) -> str:
        """ "2.19 (2.05..2.31)", times a factor; the median alone if the numbers look the same."""
        middle, low, high = (format(factor * value, form) for value in self)
        return middle if low == high else f"{middle} ({low}..{high})"


def interval_of_median(values: Sequence[float]) -> Interval:
    """The distribution-free confidence interval of the median: from the k-th smallest value to the
    k-th largest, with the largest k that leaves at most 5 % outside. With fewer than 6 values even
    the whole range leaves more.
    """
    ordered = sorted(values)
    k, _ = _order_statistic(len(ordered))
    return Interval(median(ordered), ordered[k - 1], ordered[-k])


def coverage_of(num_rounds: int) -> float:
    """The confidence of an interval of that many rounds, for any distribution: 0 for one round,
    0.5 for two, 0.9375 for five, 0.95 or more from six on.
    """
    return 1 - _order_statistic(num_rounds)[1]


def _order_statistic(n: int) -> tuple[int, float]:
    """k, and the probability that the median is outside the k-th smallest and k-th largest of n.

    For each side, this is the probability that fewer than k of n fair coins show heads: the sum of
    C(n, i) / 2^n for i < k.
    """
    k, outside = 1, 2 / 2**n
    while k < n // 2 and outside + 2 * comb(n, k) / 2**n <= 1 - WANTED_COVERAGE:
        outside += 2 * comb(n, k) / 2**n
        k += 1
    return k, outside


@dataclass(frozen=True)
class Candidate:
    """What steps can be tried under.

    Attributes:
        hook: a codec string, or one of PyTorch's hooks.
        bits: per fp32 element that a worker sends.
        exchange: `FLAT` or `TWO_LEVEL`; None: there is one to choose from.
        needs_memory: for residuals and messages; false for an all-reduce of the backend.
    """

    hook: str
    bits: float
    exchange: str | None = None
    needs_memory: bool = True

    @property
    def name(self) -> str:
        """ "q4", or "q4 (two-level)"."""
        return self.hook if self.exchange is None else f"{self.hook} ({self.exchange})"


@dataclass(frozen=True)
class Outcome:
    """How long the steps of a candidate took, equal on all ranks.

    Attributes:
        turns: seconds of the counted steps of each turn in ascending order, each on the rank where
            it is greatest.
        is_hopeless: whether it was given up.
    """

    candidate: Candidate
    turns: tuple[tuple[float, ...], ...]
    is_hopeless: bool = False

    @property
    def steps(self) -> int:
        """How many were counted."""
        return sum(map(len, self.turns))

    @property
    def interval(self) -> Interval:
        """The median of the counted steps, and how far it may be off."""
        return interval_of_median([seconds for turn in self.turns for seconds in turn])

    @property
    def seconds(self) -> float:
        """The median of the counted steps, on the slowest rank."""
        return self.interval.median

    def over(self, other: Outcome) -> Interval:
        """How many times as long it takes as another one: steps of the same turns are compared, so
        that a machine which became slower between two turns made both slower. Where one was given
        up, its median and the worst of both intervals are used.
        """
        if self.is_hopeless or other.is_hopeless:
            mine, theirs = self.interval, other.interval
            return Interval(
                mine.median / theirs.median, mine.low / theirs.high, mine.high / theirs.low
            )
        pairs = zip(self.turns, other.turns, strict=False)
        return interval_of_median(
            [a / b for one, two in pairs for a, b in zip(one, two, strict=True)]
        )

    @property
    def shown(self) -> str:
        """ "q4 52.1 (50.9..53.0) ms", or "off 310.0 (301.0..319.0) ms (2 steps)"."""
        few = f" ({self.steps} steps)" if self.is_hopeless else ""
        return f"{self.candidate.name} {self.interval.shown(',.1f', 1e3)} ms{few}"


def most_precise(outcomes: Sequence[Outcome]) -> Outcome:
    """The one with the most bits within `TOLERANCE` of the fastest.

    Bits are compared as whole numbers: q4 (4.3) and rht:bits=4 (4.1) lose equally little. Among
    equals one that needs no memory is preferred, then the fastest.
    """
    least = min(outcome.seconds for outcome in outcomes)
    close = [outcome for outcome in outcomes if outcome.seconds <= least * (1 + TOLERANCE)]
    return max(
        close, key=lambda o: (int(o.candidate.bits), not o.candidate.needs_memory, -o.seconds)
    )


class Trial:
    """The candidates, in the order in which they are tried, and what came of their turns so far.

    Every rank makes one with the same candidates, and calls the same methods at the same steps.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        clock: Clock,
        slowest: Callable[[Sequence[float]], list[float]],
    ) -> None:
        """
        Args:
            candidates: what to choose from.
            clock: of the device that computes.
            slowest: of as many values on each rank, by place the greatest of all ranks. Collective.
        """
        # With two levels fewer bytes leave a node.
        self._waiting = sorted(candidates, key=lambda c: (c.bits, c.exchange == FLAT))
        self._turn = 1
        self._clock = clock
        self._slowest = slowest
        self._marks: list[Any] = []
        self._outcomes: dict[Candidate, Outcome] = {}

    @property
    def outcomes(self) -> list[Outcome]:
        """One for each candidate that has had a turn, in the order of their first turns."""
        return list(self._outcomes.values())

    @property
    def current(self) -> Candidate | None:
        """What is to be tried now; None: the trial is over."""
        return self._waiting[0] if self._waiting else None

    def leave_out(self, candidate: Candidate) -> None:
        """Takes out a candidate that cannot run."""
        self._waiting = [each for each in self._waiting if each != candidate]
        self._outcomes.pop(candidate, None)
        self._marks.clear()
        self._begin_round()

    def step_begins(self) -> bool:
        """Notes that a step begins, at the same point of every step; the first is the first under
        the current candidate. Collective. Returns whether the candidate has had its turn before.
        """
        self._marks.append(self._clock.mark())
        counted = len(self._marks) - 1 - SETTLING_STEPS
        if counted not in (HOPELESS_STEPS, COUNTED_STEPS):
            return False
        times = [self._clock.seconds(*pair) for pair in pairwise(self._marks[SETTLING_STEPS:])]
        # Where one rank has paused, the others wait for it a step earlier or later: so every rank
        # puts its own times in order first.
        turn = tuple(self._slowest(sorted(times)))
        least = min((outcome.seconds for outcome in self.outcomes), default=turn[0])
        is_hopeless = self._turn == 1 and turn[0] > HOPELESS * least
        if counted < COUNTED_STEPS and not is_hopeless:
            return False
        candidate = self._waiting.pop(0)
        before = self._outcomes[candidate].turns if candidate in self._outcomes else ()
        self._outcomes[candidate] = Outcome(candidate, (*before, turn), is_hopeless)
        self._marks.clear()
        self._begin_round()
        return True

    def _begin_round(self) -> None:
        """Gives further turns to all that may be as fast as the one that would be chosen."""
        rivals = [each for each in self.outcomes if len(each.turns) == self._turn]
        rivals = [each for each in rivals if not each.is_hopeless]
        if self._waiting or self._turn == MOST_TURNS or len(rivals) < 2:
            return
        slowest = most_precise(rivals).interval.high
        if slowest > (1 + MARGIN) * min(each.interval.low for each in rivals):
            self._turn += 1
            self._waiting = [each.candidate for each in rivals if each.interval.low <= slowest]


class Clock:
    """Marks instants and tells the time between two of them: by events in the current stream of the
    device that computes, or by the processor's clock.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place

    def mark(self) -> Any:
        """This instant; on a device, of its current stream."""
        if self._place.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._place, enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to a later one. Waits until the device is there."""
        if self._place.type == "cpu":
            return float(end - begin)
        begin.synchronize()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Waits until the device has done what its current stream holds."""
        if self._place.type != "cpu":
            self.mark().synchronize()


def computing_on(place: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one: events are recorded in the streams of that."""
    if place.type == "cpu":
        return nullcontext()
    return torch.accelerator.device_index(place.index)
