"""Summarizes rows: means, spreads, and whether every demand is met.

A codec is compared with the uncompressed training of the same seed, which has the same model and
batches. A band narrower than the spread between seeds would judge luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from gradferry_lab.converge.suite import Contest, Contestant, Misses, Near, Reaches, Suite
from gradferry_lab.output.table import Row

WITHIN = "within"
OUTSIDE = "OUTSIDE"
CONTROL_STANDS = "stalls, as it must"
CONTROL_FAILS = "MUST STALL"
REPORTED = "reported"
IS_RULER = "baseline"


@dataclass(frozen=True)
class Summary:
    """All seeds of one contestant."""

    contestant: Contestant
    rows: Sequence[Row]  # one per seed
    loss: float  # mean of the final losses; infinite when one is not finite
    spread: float  # their standard deviation; 0 for a single one
    metric: float  # mean of the final metrics
    wire_bytes: float  # mean bytes of a whole training
    ratio: float  # bytes of the baseline over these
    excess: float  # mean over the seeds: loss over the baseline's with that seed, minus 1
    band: float | None  # the largest excess, or the gap, that meets the demand; None without one
    verdict: str  # one of the constants above

    @property
    def is_bad(self) -> bool:
        """Whether a demand is not met."""
        return self.verdict in (OUTSIDE, CONTROL_FAILS)


def summarize(suite: Suite, contest: Contest, rows: Sequence[Row]) -> list[Summary]:
    """One summary per contestant of the contest that has rows, in the suite's order.

    The baseline is the contest's first contestant. Its standard deviation is relative to its mean.
    """
    found = {one: _rows_of(contest, one, rows) for one in contest.contestants}
    ruler = found[contest.contestants[0]]
    return [
        _summarize(one, seeds, ruler, suite.sigmas)
        for one, seeds in found.items()
        if seeds and ruler
    ]


def _rows_of(contest: Contest, one: Contestant, rows: Sequence[Row]) -> list[Row]:
    facts = {"task": contest.task, **one.facts()}
    seeds = [row for row in rows if all(row[name] == value for name, value in facts.items())]
    return sorted(seeds, key=lambda row: int(row["seed"]))


def _summarize(
    one: Contestant, rows: Sequence[Row], ruler: Sequence[Row], sigmas: float
) -> Summary:
    losses = [_number(row["final_loss"]) for row in rows]
    base = {row["seed"]: _number(row["final_loss"]) for row in ruler}
    excesses = [
        loss / base[row["seed"]] - 1
        for loss, row in zip(losses, rows, strict=True)
        if row["seed"] in base
    ]
    excess = fmean(excesses) if excesses else float("inf")
    loss = fmean(losses)
    sigma = _spread(list(base.values())) / fmean(base.values())
    wire_bytes = fmean(row["wire_bytes"] for row in rows)
    ratio = fmean(row["wire_bytes"] for row in ruler) / wire_bytes if wire_bytes else 0.0
    band, verdict = _judge(one, loss, excess, sigmas * sigma, ratio)
    return Summary(
        contestant=one,
        rows=rows,
        loss=loss,
        spread=_spread(losses),
        metric=fmean(_number(row["final_metric"]) for row in rows),
        wire_bytes=wire_bytes,
        ratio=ratio,
        excess=excess,
        band=band,
        verdict=verdict,
    )


def _judge(
    one: Contestant, loss: float, excess: float, spread_band: float, ratio: float
) -> tuple[float | None, str]:
    demand = one.demand
    if one.codec.startswith("torch:"):
        return None, IS_RULER
    if isinstance(demand, Near):
        band = max(demand.floor, spread_band)
        return band, WITHIN if excess <= band and ratio >= demand.ratio else OUTSIDE
    if isinstance(demand, Reaches):
        return demand.gap, WITHIN if loss <= demand.gap else OUTSIDE
    if isinstance(demand, Misses):
        return demand.gap, CONTROL_STANDS if loss > demand.gap else CONTROL_FAILS
    return None, REPORTED


def _number(value: float | None) -> float:
    return float("inf") if value is None else float(value)


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    return stdev(values) if max(values) < float("inf") else float("inf")
