"""What `gradferry converge` trains and demands, and how trainings are dealt to worlds."""

from __future__ import annotations

import pytest
from gradferry.core.codec_spec import parse_codec
from gradferry.core.config import make_config
from gradferry.errors import ConfigError
from gradferry_lab.converge.suite import (
    DENSE,
    MOMENTUM,
    RULER,
    SUITES,
    Contestant,
    Misses,
    Near,
    Reaches,
    select,
)
from gradferry_lab.converge.worlds import deal
from gradferry_lab.workloads import TASKS
from gradferry_lab.workloads.hook_names import check_hook
from gradferry_lab.workloads.optimizers import OPTIMIZERS

FULL = SUITES["full"]
EVERYONE = sorted(
    {
        (contest.task, contest.steps, one)
        for suite in SUITES.values()
        for contest in suite.contests
        for one in contest.contestants
    },
    key=str,
)


def auto_mode(codec: str) -> str:
    """The error feedback that a user gets without asking."""
    config = make_config(codec)
    return {(False, True): "owner", (True, True): "both"}[config.residuals_of(parse_codec(codec))]


@pytest.mark.parametrize(("task", "steps", "one"), EVERYONE, ids=str)
def test_contestant_can_be_trained(task, steps, one):
    assert task in TASKS
    assert one.optimizer in OPTIMIZERS
    check_hook(one.hook(steps))


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_judged_codecs_run_as_users_get_them(suite):
    judged = [
        one
        for contest in suite.contests
        for one in contest.contestants
        if isinstance(one.demand, Near) and one.mode != MOMENTUM
    ]
    assert judged
    for one in judged:
        assert one.mode == auto_mode(one.codec)


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_contest_starts_with_its_ruler(suite):
    for contest in suite.contests:
        first = contest.contestants[0]
        assert (first.codec, first.mode, first.demand) == (RULER, DENSE, None)
        assert len(set(contest.contestants)) == len(contest.contestants)


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_every_gap_demanded_with_feedback_is_missed_without(suite):
    demands = {
        (one.codec, one.mode): one.demand
        for contest in suite.contests
        for one in contest.contestants
        if contest.task == "convex"
    }
    reached = {codec: d.gap for (codec, _), d in demands.items() if isinstance(d, Reaches)}
    assert {"sign1", "topk:ratio=0.01"} <= set(reached)
    for codec, gap in reached.items():
        assert demands[codec, "none"] == Misses(gap)


def test_full_demands_what_was_promised():
    demanded = {
        (contest.task, one.optimizer, one.codec, one.mode): one.demand.floor
        for contest in FULL.contests
        for one in contest.contestants
        if isinstance(one.demand, Near)
    }
    for task in ("tiny_text", "tiny_vision"):
        for codec in ("q8", "q4", "rht:bits=4"):
            for optimizer in ("AdamW", "SGD"):
                assert demanded[task, optimizer, codec, auto_mode(codec)] == 0.003
        assert demanded[task, "OneBitAdam", "sign1", MOMENTUM] == 0.02
        for optimizer in ("OneBitAdam", "SGD"):
            assert demanded[task, optimizer, "topk:ratio=0.01", MOMENTUM] == 0.06
    assert FULL.sigmas == 2
    for contest in FULL.contests:
        assert (contest.ruler_seeds, contest.seeds) == (5, 3)


def test_trainings_of_a_codec_share_seeds_with_the_ruler():
    seeds = {}
    for training in FULL.trainings():
        seeds.setdefault((training.task, training.contestant), []).append(training.seed)
    for (_, one), found in seeds.items():
        assert found == list(range(5 if one.codec == RULER else 3))


@pytest.mark.parametrize(
    ("one", "hook"),
    [
        (Contestant("SGD", "torch:bf16", DENSE), "torch:bf16"),
        (Contestant("AdamW", "q4", "owner"), "q4+error_feedback=owner"),
        (Contestant("SGD", "sign1", MOMENTUM), "sign1+momentum=0.9"),
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
