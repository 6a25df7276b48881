"""Steps under several candidates, one after the other: they decide where a forecast cannot.

A forecast is off by tens of percent where ranks compete for processors or for a link. The
candidates that this leaves open train for a few steps each, and their steps are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from gradferry.forecast.clock import Clock
from gradferry.forecast.predict import Prediction

SETTLING_STEPS = 2  # they connect ranks and touch new memory
TRIAL_STEPS = SETTLING_STEPS + 5  # of each candidate


@dataclass
class Trial:
    """The candidates, and when their steps began.

    Attributes:
        candidates: in the order in which they train.
        held: the choice so far; None: there is none.
        predicted_ms: of all predictions, by name.
    """

    candidates: list[Prediction]
    held: Prediction | None
    predicted_ms: dict[str, float]
    clock: Clock
    _began: list[list[Any]] = field(default_factory=list)  # by candidate; the last one trains

    def next(self) -> Prediction | None:
        """The candidate that trains from this step on; None: all have."""
        if len(self._began) == len(self.candidates):
            return None
        self._began.append([self.clock.mark()])
        return self.candidates[len(self._began) - 1]

    def drop(self, candidate: Prediction) -> None:
        """Takes out the candidate that was to train from this step on."""
        self.candidates.remove(candidate)
        self._began.pop()

    def goes_on(self) -> bool:
        """Notes that a step begins; whether the current candidate takes it."""
        steps = self._began[-1]
        steps.append(self.clock.mark())
        return len(steps) <= TRIAL_STEPS

    def outcome(self, most: Callable[[Sequence[float]], list[float]]) -> list[Prediction]:
        """The candidates, with the median length of their steps on the slowest rank. Collective.

        The true median is between the least and the greatest of n steps but for a chance of
        2 * 0.5**n, 6 % of five: how far these are from the median is the doubt.

        most: the elementwise maximum over all ranks.
        """
        typical, doubt = [], []
        for steps in self._began:
            seconds = [self.clock.seconds(*pair) for pair in pairwise(steps[SETTLING_STEPS:])]
            typical.append(median(seconds))
            doubt.append(max(abs(each - typical[-1]) for each in seconds))
        return [
            each.took(*found)
            for each, *found in zip(self.candidates, most(typical), most(doubt), strict=True)
        ]
