"""What a hook's own numbers say about a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median
from typing import Any

from gradferry.forecast.costs import StepProfile

MEASURED_STEPS = 6
_FEWEST_STEPS = 1  # of models with many buckets, more do not fit into the events


@dataclass(frozen=True)
class ObservedSteps:
    """Medians over a few steps, in seconds; instants from the first bucket of the step.

    Attributes:
        buckets: indices of the parameters by bucket.
        ready_s: when each bucket came, less what the hook held DDP's thread up before.
        without_s: from a step's first bucket to the next one's, less what the hook held up.
        exposed_s: what the hook held up.
    """

    buckets: tuple[tuple[int, ...], ...]
    ready_s: tuple[float, ...]
    without_s: float
    exposed_s: float

    def of_slowest(self, most: Callable[[Sequence[float]], list[float]]) -> ObservedSteps:
        """With the largest of all ranks' values. `most` gives those; collective."""
        without, exposed, *ready = most([self.without_s, self.exposed_s, *self.ready_s])
        return ObservedSteps(self.buckets, tuple(ready), without, exposed)

    def profile(self, num_parameters: int, spare_cores: float) -> StepProfile:
        """A step that begins with its first bucket. Parameters are ready when their bucket is."""
        ready = [0.0] * num_parameters
        for instant, bucket in zip(self.ready_s, self.buckets, strict=True):
            for index in bucket:
                ready[index] = instant
        return StepProfile(self.without_s, max(self.ready_s), tuple(ready), spare_cores)


def observe(events: Sequence[Mapping[str, Any]], stats: Mapping[str, Any]) -> ObservedSteps | None:
    """From `HookState.events` and `HookState.stats`; None when they tell of too few steps.

    Takes the last steps with the present buckets.
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
    """Of one step, in ms: when buckets came, its length, and what the hook held up."""
    begin = rows[0]["begin_ms"]
    held = 0.0
    ready = []
    for row in rows:
        ready.append(row["begin_ms"] - begin - held)
        held += row["encoded_ms"] - row["begin_ms"]
    tail = max(row["complete_ms"] for row in rows) - rows[-1]["encoded_ms"]
    return ready, next_begin_ms - begin, held + max(0.0, tail)
