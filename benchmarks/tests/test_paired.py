"""Medians with intervals, and comparisons within rounds."""

from __future__ import annotations

import random
from math import comb

import pytest
from gradferry_lab.output.paired import (
    coverage_note,
    coverage_of,
    coverage_text,
    interval_of_median,
    paired_difference,
    paired_ratio,
)


@pytest.mark.parametrize(
    ("n", "k"),
    # From tables of the binomial distribution: k - 1 is its 2.5 % point for n fair coins.
    [(6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (25, 8), (30, 10)],
)
def test_interval_runs_between_the_right_order_statistics(n: int, k: int) -> None:
    values = [float(i) for i in range(1, n + 1)]
    random.Random(n).shuffle(values)
    interval = interval_of_median(values)
    assert (interval.low, interval.high) == (k, n + 1 - k)
    assert interval.median == (n + 1) / 2
    below = sum(comb(n, i) for i in range(k)) / 2**n
    assert 2 * below <= 0.05 < 2 * (below + comb(n, k) / 2**n)
    assert coverage_of(n) == 1 - 2 * below


@pytest.mark.parametrize("n", [1, 2, 5])
def test_interval_of_few_values_is_all_of_them(n: int) -> None:
    assert interval_of_median(range(n))[1:] == (0, n - 1)


@pytest.mark.parametrize(
    # Of n fair coins, all show the same side with probability 2 / 2^n.
    ("n", "coverage", "text"),
    [(1, 0, "0 %"), (2, 0.5, "50 %"), (3, 0.75, "75 %"), (5, 0.9375, "93 %"), (6, 0.96875, "96 %")],
)
def test_few_rounds_promise_no_more_than_they_hold(n: int, coverage: float, text: str) -> None:
    assert coverage_of(n) == coverage
    assert coverage_text(n) == text
    assert coverage_note(n).startswith(f"{text}: ")
    assert ("6 give" in coverage_note(n)) == (n < 6)


def test_pairs_are_compared_within_their_round() -> None:
    # A machine that slows down tenfold meanwhile changes no ratio of a round.
    baseline = [1.0, 10.0, 100.0]
    times = [2.0, 20.0, 200.0]
    assert paired_ratio(times, baseline) == (2.0, 2.0, 2.0)
    assert paired_difference(times, baseline) == (10.0, 1.0, 100.0)
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio(times, baseline[:2])
