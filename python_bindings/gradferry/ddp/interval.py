"""The median of a few numbers, and how far it may be off, whatever their distribution."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import NamedTuple

WANTED_COVERAGE = 0.95


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
