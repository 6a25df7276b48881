"""Steps under one candidate after the other: the clocks of the ranks say which is fastest.

`codec="auto"` tries candidates in a training, `doctor` on copies of a model. The candidate that
sends the fewest bytes comes first, so that on a slow link the others are known to be hopeless after
few steps. A device runs behind the host, so the host's clock says nothing about the work on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import torch

from gradferry.core.nodes import FLAT

# What "auto" and `doctor` compare with no compression, unless they are asked for more: trainings
# with these end where fp32 ends. Recommendations come from here, and from `most_precise`.
CODECS = ("q4", "q8")
# By codec that may be asked for, and needs no momentum mode: the loss that it cost in the trainings
# of docs/results/convergence.md.
LOSSES = {"rht:bits=3": "with AdamW it ended 0.73 % above fp32 on text and 1.72 % on images"}

SETTLING_STEPS = 2  # they connect ranks and touch new memory
COUNTED_STEPS = 5
# A candidate whose first counted step takes so many times what the fastest takes gets no further.
HOPELESS = 1.5
TOLERANCE = 0.02  # within this share of the fastest, precision decides


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
        seconds: the median of the counted steps, on the slowest rank.
        steps: how many were counted: `COUNTED_STEPS`, or 1 where the first was hopeless.
    """

    candidate: Candidate
    seconds: float
    steps: int

    @property
    def shown(self) -> str:
        """ "q4 52.1 ms", or "off 310.0 ms (1 step)"."""
        few = " (1 step)" if self.steps == 1 else ""
        return f"{self.candidate.name} {1e3 * self.seconds:,.1f} ms{few}"


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
    """The candidates, in the order in which they are tried, and what came of those before.

    Every rank makes one with the same candidates, and calls the same methods at the same steps.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        clock: Clock,
        slowest: Callable[[float], float],
    ) -> None:
        """
        Args:
            candidates: what to choose from.
            clock: of the device that computes.
            slowest: the greatest of what all ranks pass. Collective.
        """
        # With two levels fewer bytes leave a node.
        self._waiting = sorted(candidates, key=lambda c: (c.bits, c.exchange == FLAT))
        self._clock = clock
        self._slowest = slowest
        self._marks: list[Any] = []
        self.outcomes: list[Outcome] = []

    @property
    def current(self) -> Candidate | None:
        """What is to be tried now; None: everything was."""
        return self._waiting[0] if self._waiting else None

    @property
    def waiting(self) -> tuple[Candidate, ...]:
        """What is to be tried, in order, with the current one."""
        return tuple(self._waiting)

    def leave_out(self, candidate: Candidate) -> None:
        """Takes out a candidate that cannot run."""
        self._waiting = [each for each in self._waiting if each != candidate]
        self.outcomes = [each for each in self.outcomes if each.candidate != candidate]
        self._marks.clear()

    def step_begins(self) -> bool:
        """Notes that a step begins, at the same point of every step; the first is the first under
        the current candidate. Collective. Returns whether the candidate has had its steps before.
        """
        self._marks.append(self._clock.mark())
        counted = len(self._marks) - 1 - SETTLING_STEPS
        if counted not in (1, COUNTED_STEPS):
            return False
        times = [self._clock.seconds(*pair) for pair in pairwise(self._marks[SETTLING_STEPS:])]
        seconds = self._slowest(median(times))
        least = min((outcome.seconds for outcome in self.outcomes), default=seconds)
        if counted == 1 and seconds <= HOPELESS * least:
            return False
        self.outcomes.append(Outcome(self._waiting.pop(0), seconds, counted))
        self._marks.clear()
        return True


class Clock(Protocol):
    """Marks instants, and tells the time between two of them."""

    def mark(self) -> Any:
        """This instant; on a device, of its current stream."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to a later one. Waits until the device is there."""

    def wait(self) -> None:
        """Waits until the device has done what its current stream holds."""


class HostClock:
    """The clock of the processor."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self) -> None:
        """The host does one thing after another."""


class DeviceClock:
    """The clock of a device, by events in its current stream."""

    def __init__(self, place: torch.device) -> None:
        self._place = place

    def mark(self) -> torch.Event:
        event = torch.Event(self._place, enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.Event, end: torch.Event) -> float:
        begin.synchronize()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        self.mark().synchronize()


def computing_on(place: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one: events are recorded in the streams of that."""
    if place.type == "cpu":
        return nullcontext()
    return torch.accelerator.device_index(place.index)


def clock_of(place: torch.device) -> Clock:
    """The clock of what computes on a device."""
    return HostClock() if place.type == "cpu" else DeviceClock(place)
