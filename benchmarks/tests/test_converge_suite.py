"""What `gradferry converge` trains, deals to worlds and demands, and its verdicts. No training."""

from __future__ import annotations

from statistics import stdev

import pytest
from gradferry_lab.converge.suite import (
    DENSE,
    RULER,
    SUITES,
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
from gradferry_lab.converge.worlds import deal
from gradferry_lab.workloads import TASKS
from gradferry_lab.workloads.optimizers import OPTIMIZERS
from gradferry_lab.workloads.parallel import check_parallel

FULL = SUITES["full"]
RULER_LOSSES = [2.00, 2.01, 1.99, 2.02, 1.98]
SIGMA = stdev(RULER_LOSSES) / 2.0
CONTESTS = [contest for suite in SUITES.values() for contest in suite.contests]


def test_every_contestant_can_be_trained_and_every_contest_starts_with_its_ruler():
    for contest in CONTESTS:
        assert contest.task in TASKS
        first = contest.contestants[0]
        assert (first.codec, first.demand) == (RULER, None)
        assert first.mode == (DENSE if first.parallel == "ddp" else first.parallel)
        assert len(set(contest.contestants)) == len(contest.contestants)
        for one in contest.contestants:
            assert one.parallel == first.parallel
            assert one.optimizer in OPTIMIZERS
            check_parallel(one.parallel, one.hook(contest.steps))


def test_deal_gives_every_training_once_and_equal_work():
    trainings = list(FULL.trainings())
    hands = deal(trainings, 3)
    assert sorted((t for hand in hands for t in hand), key=str) == sorted(trainings, key=str)
    work = [sum(training.cost for training in hand) for hand in hands]
    # Costly ones first: no world is ahead by more than the last training dealt to it.
    assert max(work) - min(work) <= max(training.cost for training in trainings)


# --- verdicts -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("demand", "losses", "verdict"),
    [
        (Near(0.5, ratio=10), [2.0] * 3, WITHIN),  # the ruler sends 100 bytes, the codec 10
        (Near(0.5, ratio=10.1), [2.0] * 3, OUTSIDE),
        (Reaches(1e-6), [1e-6] * 3, WITHIN),
        (Reaches(1e-6), [1.1e-6] * 3, OUTSIDE),
        (Misses(1e-6), [1.1e-6] * 3, CONTROL_STANDS),
        (Misses(1e-6), [1e-6] * 3, CONTROL_FAILS),
        (None, [1e9] * 3, REPORTED),
        # What is not finite is far away.
        (Near(0.5), [2.0, None, 2.0], OUTSIDE),
        (Reaches(1.0), [2.0, None, 2.0], OUTSIDE),
        (Misses(1.0), [2.0, None, 2.0], CONTROL_STANDS),
    ],
)
def test_verdict_of_a_demand(demand, losses, verdict):
    summary = summary_of(demand, losses)
    assert summary.verdict == verdict
    assert summary.is_bad is (verdict in (OUTSIDE, CONTROL_FAILS))
