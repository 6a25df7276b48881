"""Comparisons within one run: candidates take turns, and are compared round by round.

The speed of a machine drifts by as much as the differences of interest. Two times of one round
share most of the drift, so their ratio varies less than either. A median of ratios is robust
against single bad rounds, and its interval makes no assumption about the distribution of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import NamedTuple

from gradferry_lab.output.table import Column, Row

WANTED_COVERAGE = 0.95


class Interval(NamedTuple):
    """A median and its confidence interval; `coverage_of` gives the confidence."""

    median: float
    low: float
    high: float


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


def coverage_text(num_rounds: int) -> str:
    """The confidence as text for a heading, rounded down."""
    return f"{int(100 * coverage_of(num_rounds))} %"


def coverage_note(num_rounds: int) -> str:
    """What `coverage_text` in a heading means."""
    rounds = "1 round" if num_rounds == 1 else f"{num_rounds} rounds"
    note = f"{coverage_text(num_rounds)}: how surely the interval holds the median, by {rounds}"
    return note if coverage_of(num_rounds) >= WANTED_COVERAGE else f"{note}; 6 give 95 % and more"


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


def paired_ratio(times: Sequence[float], baseline: Sequence[float]) -> Interval:
    """`times` over `baseline`, round by round."""
    return interval_of_median([t / b for t, b in zip(times, baseline, strict=True)])


def paired_difference(times: Sequence[float], baseline: Sequence[float]) -> Interval:
    """`times` minus `baseline`, round by round."""
    return interval_of_median([t - b for t, b in zip(times, baseline, strict=True)])


def ratio_columns(rows: Sequence[Row], ruler: str, interval: str | None = None) -> list[Column]:
    """The columns of `ratio_to_RULER`; none where the ruler did not take part.

    interval: heading of a column for `ratio_to_RULER_low` and `_high`.
    """
    key = f"ratio_to_{ruler}"
    if all(row.get(key) is None for row in rows):
        return []
    columns = [Column(f"ratio to\n{ruler}", lambda row: f"{row[key]:.3f}", detail=3)]
    if interval:
        columns.append(Column(interval, lambda row: interval_text(row, key), detail=6))
    return columns


def interval_text(row: Row, key: str) -> str:
    """`key_low` and `key_high`."""
    low, high = row[f"{key}_low"], row[f"{key}_high"]
    return "-" if low is None else f"{low:.2f}..{high:.2f}"
