"""Verdicts of `gradferry converge`: pairs, spreads, bands, controls. No training."""

from __future__ import annotations

import math
from statistics import stdev

import pytest
from gradferry_lab.converge.suite import (
    DENSE,
    MOMENTUM,
    RULER,
    Contest,
    Contestant,
    Misses,
    Near,
    Reaches,
    Suite,
)
from gradferry_lab.converge.summary import (
    CONTROL_FAILS,
    CONTROL_STANDS,
    IS_RULER,
    OUTSIDE,
    REPORTED,
    WITHIN,
    summarize,
)

RULER_LOSSES = [2.00, 2.01, 1.99, 2.02, 1.98]
SIGMA = stdev(RULER_LOSSES) / 2.0


def row(one: Contestant, seed: int, loss: float | None, wire_bytes: int = 100) -> dict:
    return {
        "task": "digits",
        **one.facts(),
        "seed": seed,
        "final_loss": loss,
        "final_metric": 0.5,
        "wire_bytes": wire_bytes,
    }


def summary_of(demand, losses, sigmas=2.0, ruler=RULER_LOSSES):
    """The summary of a codec with these losses for seeds 0, 1, ..."""
    dense, one = Contestant("SGD", RULER, DENSE), Contestant("SGD", "q4", "owner", demand)
    contest = Contest("digits", 10, 1.0, (dense, one), ruler_seeds=5, seeds=3)
    rows = [row(dense, seed, loss) for seed, loss in enumerate(ruler)]
    rows += [row(one, seed, loss, wire_bytes=10) for seed, loss in enumerate(losses)]
    first, second = summarize(Suite("x", (contest,), sigmas), contest, rows[::-1])
    assert first.verdict == IS_RULER
    return second


def test_excess_is_the_mean_of_pairs_and_not_of_means():
    # Unpaired, three seeds that each lie 1 % above their own would be 1.00 % +- the spread.
    summary = summary_of(Near(0.003), [1.01 * loss for loss in RULER_LOSSES[:3]])
    assert summary.excess == pytest.approx(0.01, abs=1e-12)
    assert summary.spread == pytest.approx(1.01 * stdev(RULER_LOSSES[:3]))
    assert summary.ratio == 10


@pytest.mark.parametrize(
    ("floor", "sigmas", "band"),
    [(0.003, 2.0, 2 * SIGMA), (0.003, 0.1, 0.003), (0.06, 2.0, 0.06)],
)
def test_band_is_the_floor_or_the_spread_of_the_ruler(floor, sigmas, band):
    for excess, verdict in ((0.99 * band, WITHIN), (1.01 * band, OUTSIDE), (-0.5, WITHIN)):
        losses = [(1 + excess) * loss for loss in RULER_LOSSES[:3]]
        summary = summary_of(Near(floor), losses, sigmas)
        assert summary.band == pytest.approx(band)
        assert summary.verdict == verdict


@pytest.mark.parametrize(("ratio", "verdict"), [(10, WITHIN), (10.1, OUTSIDE)])
def test_a_demand_can_ask_for_fewer_bytes(ratio, verdict):
    # The ruler sends 100 bytes, the codec 10.
    assert summary_of(Near(0.5, ratio=ratio), RULER_LOSSES[:3]).verdict == verdict


def test_contestants_that_differ_in_warm_up_or_momentum_alone_keep_their_rows():
    dense = Contestant("SGD", RULER, DENSE)
    others = [
        Contestant("SGD", "sign1", MOMENTUM, warmup=warmup, momentum=momentum)
        for warmup in (None, "exact", "q8")
        for momentum in (0.8, 0.9)
    ]
    contest = Contest("digits", 10, 1.0, (dense, *others), ruler_seeds=1, seeds=1)
    rows = [row(one, 0, 2.0 + number) for number, one in enumerate(contest.contestants)]
    found = summarize(Suite("x", (contest,), 2.0), contest, rows)
    assert [summary.loss for summary in found] == [2.0 + number for number in range(7)]
    assert len({one.hook(100) for one in contest.contestants}) == 7


@pytest.mark.parametrize(
    ("demand", "loss", "verdict"),
    [
        (Reaches(1e-6), 1e-6, WITHIN),
        (Reaches(1e-6), 1.1e-6, OUTSIDE),
        (Misses(1e-6), 1.1e-6, CONTROL_STANDS),
        (Misses(1e-6), 1e-6, CONTROL_FAILS),
        (None, 1e9, REPORTED),
    ],
)
def test_verdict_of_gaps(demand, loss, verdict):
    summary = summary_of(demand, [loss] * 3)
    assert summary.verdict == verdict
    assert summary.is_bad is (verdict in (OUTSIDE, CONTROL_FAILS))


@pytest.mark.parametrize(
    ("demand", "verdict"),
    [(Near(0.5), OUTSIDE), (Reaches(1.0), OUTSIDE), (Misses(1.0), CONTROL_STANDS)],
)
def test_a_loss_that_is_not_finite_is_far_away(demand, verdict):
    summary = summary_of(demand, [2.0, None, 2.0])
    assert math.isinf(summary.loss)
    assert summary.verdict == verdict
