"""Derives the profile of a training step from the counters of a hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median
from typing import Any

from gradferry.forecast.costs import StepProfile

MEASURED_STEPS = 6
_FEWEST_STEPS = 1  # the events of a model with many buckets cover few steps


@dataclass(frozen=True)
class ObservedSteps:
    """Medians over a few steps, in seconds; times count from the first bucket of the step.

    Attributes:
        buckets: indices of the parameters by bucket.
        ready_s: time of each bucket, minus earlier delays of DDP's thread by the hook.
        without_s: from a step's first bucket to that of the next, minus the delay by the hook.
        exposed_s: delay of DDP's thread by the hook.
    """

    buckets: tuple[tuple[int, ...], ...]
    ready_s: tuple[float, ...]
    without_s: float
    exposed_s: float

    def of_slowest(self, most: Callable[[Sequence[float]], list[float]]) -> ObservedSteps:
        """The maxima over all ranks. `most` computes a maximum over ranks. Collective."""
        without, exposed, *ready = most([self.without_s, self.exposed_s, *self.ready_s])
        return ObservedSteps(self.buckets, tuple(ready), without, exposed)

    def profile(self, num_parameters: int, spare_cores: float) -> StepProfile:
        """A profile of steps that begin at their first bucket; a bucket makes parameters ready."""
        ready = [0.0] * num_parameters
        for instant, bucket in zip(self.ready_s, self.buckets, strict=True):
            for index in bucket:
                ready[index] = instant
        return StepProfile(self.without_s, max(self.ready_s), tuple(ready), spare_cores)


def observe(events: Sequence[Mapping[str, Any]], stats: Mapping[str, Any]) -> ObservedSteps | None:
    """Observes steps from `HookState.events` and `HookState.stats`; None if there are too few.

    Uses the last steps with the current buckets.
    """
    buckets = tuple(map(tuple, stats["step_buckets"]))
    steps = [list(rows) for _, rows in groupby(events, key=lambda event: event["step"])]
    seen = []
    for rows, following in pairwise(steps):
        alike = len(rows) == len(buckets) == len(following)
        if alike and following[0]["step"] == rows[0]["step"] + 1:
            seen.append(_observe_step(rows, following[0]["begin_ms"]))
    seen = seen[-MEASURED_STEPS:]
    if len(seen) < _FEWEST_STEPS:
        return None
    by_bucket = zip(*(ready for ready, _, _ in seen), strict=True)
    return ObservedSteps(
        buckets=buckets,
        ready_s=tuple(1e-3 * median(instants) for instants in by_bucket),
        without_s=1e-3 * median(period - exposed for _, period, exposed in seen),
        exposed_s=1e-3 * median(exposed for _, _, exposed in seen),
    )


def _observe_step(
    rows: Sequence[Mapping[str, Any]], next_begin_ms: float
) -> tuple[list[float], float, float]:
    """The times of buckets, the length, and the delay by the hook, of one step in ms."""
    begin = rows[0]["begin_ms"]
    held = 0.0
    ready = []
    for row in rows:
        ready.append(row["begin_ms"] - begin - held)
        held += row["encoded_ms"] - row["begin_ms"]
    tail = max(row["complete_ms"] for row in rows) - rows[-1]["encoded_ms"]
    return ready, next_begin_ms - begin, held + max(0.0, tail)
