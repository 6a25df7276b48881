"""What `gradferry converge` trains, deals to worlds and demands, and its verdicts. No training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import stdev
from typing import Any

import pytest
from gradferry.core.codec_spec import parse_codec
from gradferry.core.config import make_config
from gradferry.errors import ConfigError
from gradferry_lab.converge.suite import (
    DENSE,
    MOMENTUM,
    RULER,
    SUITES,
    Contest,
    Contestant,
    Misses,
    Near,
    Reaches,
    Suite,
    select,
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

TOPK = "topk:ratio=0.01"
FULL, QUICK, SHARDED = SUITES["full"], SUITES["quick"], SUITES["sharded"]
RULER_LOSSES = [2.00, 2.01, 1.99, 2.02, 1.98]
SIGMA = stdev(RULER_LOSSES) / 2.0
CONTESTS = [contest for suite in SUITES.values() for contest in suite.contests]


def demands(contests: Iterable[Contest], kind: type) -> dict[tuple[str, str, str, str], Any]:
    """Demands of this kind, by task, optimizer, codec and mode."""
    return {
        (contest.task, one.optimizer, one.codec, one.mode): one.demand
        for contest in contests
        for one in contest.contestants
        if isinstance(one.demand, kind)
    }


def auto_mode(codec: str) -> str:
    """The error feedback that a user gets without asking."""
    config = make_config(codec)
    return {(False, True): "owner", (True, True): "both"}[config.residuals_of(parse_codec(codec))]


def is_of_images(contest: Contest) -> bool:
    first = contest.contestants[0]
    return (contest.task, first.optimizer) == ("tiny_vision", "AdamW")


def images() -> Contest:
    (contest,) = filter(is_of_images, FULL.contests)
    return contest


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


@pytest.mark.parametrize("suite", [QUICK, FULL], ids=lambda suite: suite.name)
def test_judged_codecs_run_as_users_get_them_and_gaps_are_missed_without_feedback(suite):
    judged = [who for who in demands(suite.contests, Near) if who[3] != MOMENTUM]
    assert judged
    for _, _, codec, mode in judged:
        assert mode == auto_mode(codec)
    reached = demands(suite.contests, Reaches)
    missed = demands(suite.contests, Misses)
    assert {codec for _, _, codec, _ in reached} >= {"sign1", TOPK}
    for (task, optimizer, codec, _), demand in reached.items():
        assert missed[task, optimizer, codec, "none"] == Misses(demand.gap)


def test_quick_judges_every_codec_and_the_momentum_mode_outside_its_text():
    judged = [who for who in demands(QUICK.contests, Near) if who[0] != "tiny_text"]
    assert {codec for _, _, codec, _ in judged} == {"q8", "q4", "rht:bits=4", "sign1", TOPK}
    assert {(opt, codec) for _, opt, codec, mode in judged if mode == MOMENTUM} == {
        ("OneBitAdam", "sign1"), ("OneBitAdam", TOPK), ("SGD", TOPK),
    }  # fmt: skip
    reached = demands(QUICK.contests, Reaches)
    assert {codec: demand.gap for (_, _, codec, _), demand in reached.items()} == {
        "sign1": 1e-6, TOPK: 1e-6,
    }  # fmt: skip


def test_full_demands_what_was_promised():
    demanded = {who: demand.floor for who, demand in demands(FULL.contests, Near).items()}
    for task in ("tiny_text", "tiny_vision"):
        for codec in ("q8", "q4", "rht:bits=4"):
            for optimizer in ("AdamW", "SGD"):
                assert demanded[task, optimizer, codec, auto_mode(codec)] == 0.003
        assert demanded[task, "OneBitAdam", "sign1", MOMENTUM] == 0.02
        for optimizer in ("OneBitAdam", "SGD"):
            assert demanded[task, optimizer, TOPK, MOMENTUM] == 0.06
        for codec in ("q8", "q4", "rht:bits=4"):
            assert demanded["tiny_text", "Muon", codec, auto_mode(codec)] == 0.005
    assert FULL.sigmas == 2
    # The spread of images is wide: their AdamW has five seeds of every codec.
    for contest in FULL.contests:
        assert (contest.ruler_seeds, contest.seeds) == (5, 5 if is_of_images(contest) else 3)
    whole_run = {
        one.codec: one.demand
        for one in images().contestants
        if (one.optimizer, one.mode) == ("AdamW", MOMENTUM)
    }
    assert whole_run["sign1"] == Near(0.02, ratio=20)
    assert whole_run["topk:ratio=0.04"] == Near(0.02)


def test_sharded_judges_what_users_get_and_reports_coarser_gathers():
    (contest,) = SHARDED.contests
    judged = {who[2:]: demand.floor for who, demand in demands([contest], Near).items()}
    hooks = ("off+all_gather=q8", "q4+all_gather=off", "q4")
    assert judged == {(hook, "fsdp"): 0.003 for hook in hooks}
    reported = {one.codec for one in contest.contestants if one.demand is None}
    assert reported >= {"off+all_gather=bf16", "off+all_gather=q4", "torch:bf16"}
    assert (contest.steps, contest.ruler_seeds, contest.seeds) == (400, 3, 3)


def test_trainings_of_a_codec_share_seeds_with_the_ruler():
    seeds = {}
    for training in FULL.trainings():
        seeds.setdefault((training.task, training.contestant), []).append(training.seed)
    of_images = {("tiny_vision", one) for one in images().contestants}
    for who, found in seeds.items():
        most = who[1].codec == RULER or who in of_images
        assert found == list(range(5 if most else 3))


@pytest.mark.parametrize(
    ("one", "hook"),
    [
        (Contestant("SGD", "torch:bf16", DENSE), "torch:bf16"),
        (Contestant("AdamW", "q4", "owner"), "q4+error_feedback=owner"),
        (Contestant("SGD", "sign1", MOMENTUM), "sign1+momentum=0.9"),
        (Contestant("AdamW", "q4+all_gather=off", "fsdp"), "q4+all_gather=off"),
        (
            Contestant("OneBitAdam", "sign1", MOMENTUM, warmup="exact"),
            "sign1+momentum=0.9+warmup_steps=25",
        ),
        (
            Contestant("SGD", "sign1", MOMENTUM, warmup="q8", momentum=0.8),
            "sign1+momentum=0.8+warmup_steps=25+warmup=q8",
        ),
    ],
)
def test_hook_of_a_contestant(one, hook):
    assert one.hook(100) == hook


def test_select_keeps_rulers():
    part = select(FULL, ["tiny_vision"], ["q4"], ["AdamW"])
    (contest,) = part.contests
    assert [(one.optimizer, one.codec) for one in contest.contestants] == [
        ("AdamW", RULER),
        ("AdamW", "q4"),
    ]
    frozen = select(FULL, ["tiny_vision"], None, ["OneBitAdam"]).contests[0].contestants
    assert frozen[0].optimizer == "AdamW"
    assert select(FULL) == FULL


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["tiny_visoin"],), "--tasks.*did you mean 'tiny_vision'"),
        ((None, ["q5"]), "--codecs.*'q5' is not in this suite, which has torch:fp32"),
        ((None, None, ["Adam"]), "--optimizers.*did you mean 'AdamW'"),
    ],
)
def test_select_refuses_what_is_not_there(arguments, message):
    with pytest.raises(ConfigError, match=message):
        select(FULL, *arguments)


@pytest.mark.parametrize("num_worlds", [1, 2, 3])
def test_deal_gives_every_training_once_and_equal_work(num_worlds):
    trainings = list(FULL.trainings())
    hands = deal(trainings, num_worlds)
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
