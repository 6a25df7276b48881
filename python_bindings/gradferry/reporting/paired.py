"""Comparisons within one run: contestants take turns, and each turn is compared with its own round.

A machine drifts, and its drift is as large as what is to be seen. Two times of one round share
most of it, so their ratio is steadier than either; a median of ratios shrugs off the odd bad
round, and its interval assumes nothing about how times are distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import NamedTuple

COVERAGE = 0.95


class Interval(NamedTuple):
    """A median and where it lies with 95 % confidence, or as much as few rounds allow."""

    median: float
    low: float
    high: float


def interval_of_median(values: Sequence[float]) -> Interval:
    """The distribution-free interval between two order statistics.

    The median of what the values are drawn from lies below the k-th smallest of n, or above the
    k-th largest, each with probability sum of C(n, i) / 2^n for i < k. The interval takes the
    largest k that leaves 5 % for both; with fewer than 6 values even k = 1 leaves more.
    """
    ordered = sorted(values)
    n = len(ordered)
    k, outside = 1, 2 / 2**n
    while k < n // 2 and outside + 2 * comb(n, k) / 2**n <= 1 - COVERAGE:
        outside += 2 * comb(n, k) / 2**n
        k += 1
    return Interval(median(ordered), ordered[k - 1], ordered[n - k])


def paired_ratio(times: Sequence[float], baseline: Sequence[float]) -> Interval:
    """`times` over `baseline`, round by round."""
    return interval_of_median([t / b for t, b in zip(times, baseline, strict=True)])


def paired_difference(times: Sequence[float], baseline: Sequence[float]) -> Interval:
    """`times` minus `baseline`, round by round."""
    return interval_of_median([t - b for t, b in zip(times, baseline, strict=True)])
