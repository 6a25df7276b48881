"""Ranks that disagree all get the same error, at attach, and it says who, what and which values."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from outcomes import Outcome, attempt
from scenario import ChosenGradients, Run, Scenario, Weight, attach
from torch.nn.parallel import DistributedDataParallel
from world import World

WEIGHTS = (Weight("first", (40, 40)), Weight("second", (9,)))
RENAMED = (Weight("first", (40, 40)), Weight("other", (9,)))
MOST_SECONDS = 2.0


def case_differ(native: bool, usual: dict[str, Any], odd_rank: int, odd: dict[str, Any]) -> Outcome:
    """One rank attaches with other arguments; afterwards all of them agree and train."""
    import gradferry

    mine = {**usual, **odd} if dist.get_rank() == odd_rank else usual
    weights = mine.pop("weights", WEIGHTS)
    codec = mine.pop("codec", "q4")
    ddp = DistributedDataParallel(ChosenGradients(Scenario(weights)))
    entry = gradferry.attach if native else gradferry.HookState
    arguments = (ddp, codec) if native else (codec, ddp)
    outcome = attempt(lambda: entry(*arguments, **mine))
    if "weights" not in odd:
        attach(ddp, Scenario(weights, native=native))
    return outcome


def assert_same_error(outcomes: list[Outcome], error: str, *parts: str) -> None:
    assert [o.error for o in outcomes] == [error] * len(outcomes), outcomes
    assert len({o.text for o in outcomes}) == 1, outcomes
    for part in parts:
        assert part in outcomes[0].text, outcomes[0].text
    assert max(o.seconds for o in outcomes) < MOST_SECONDS


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize(
    ("usual", "odd", "parts"),
    [
        ({}, {"codec": "bf16"}, ("codec", "q4", "bf16")),
        ({"seed": 5}, {"seed": 6}, ("seed", "5", "6")),
        ({}, {"rules": [{"name": "first", "codec": "exact"}]}, ("rules", "first", "exact")),
        ({}, {"error_feedback": "both"}, ("error_feedback", "auto", "both")),
        ({}, {"nonfinite": "raise"}, ("nonfinite", "propagate", "raise")),
        ({}, {"warmup_steps": 3}, ("warmup_steps", "0", "3")),
        ({"warmup_steps": 3}, {"warmup": "q8"}, ("in warmup", "exact", "q8")),
        ({}, {"weights": RENAMED}, ("second", "other")),
    ],
    ids=[
        "codec",
        "seed",
        "rules",
        "error_feedback",
        "nonfinite",
        "warmup_steps",
        "warmup",
        "names",
    ],
)
def test_same_error_on_all_ranks_when_one_differs(
    world_of_2: World, native: bool, usual: dict, odd: dict, parts: tuple[str, ...]
) -> None:
    outcomes = world_of_2.run(case_differ, native=native, usual=usual, odd_rank=1, odd=odd)
    assert_same_error(outcomes, "RankMismatchError", "rank 1", *parts)


@pytest.mark.parametrize("odd_rank", [0, 1, 2])
def test_same_error_on_three_ranks_whichever_is_odd(world_of_3: World, odd_rank: int) -> None:
    outcomes = world_of_3.run(
        case_differ, native=True, usual={}, odd_rank=odd_rank, odd={"codec": "exact"}
    )
    assert_same_error(outcomes, "RankMismatchError", "codec", "q4", "exact", "rank ")


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_local_failure_on_one_rank_is_the_same_error_on_all(
    world_of_2: World, native: bool
) -> None:
    outcomes = world_of_2.run(
        case_differ, native=native, usual={}, odd_rank=1, odd={"codec": "q44"}
    )
    assert all(o.is_ours for o in outcomes), outcomes
    assert len({(o.error, o.text) for o in outcomes}) == 1, outcomes
    assert "rank 1" in outcomes[0].text
    assert "q44" in outcomes[0].text
    assert max(o.seconds for o in outcomes) < MOST_SECONDS


def case_train_after_failed_attach() -> bool:
    import gradferry

    scenario = Scenario(WEIGHTS)
    ddp = DistributedDataParallel(ChosenGradients(scenario))
    first = attempt(lambda: gradferry.attach(ddp, "q4", seed=dist.get_rank()))
    run = Run(scenario)
    run.step(0)
    return first.error == "RankMismatchError"


def test_another_model_trains_after_a_failed_attach(world_of_2: World) -> None:
    assert world_of_2.run(case_train_after_failed_attach) == [True, True]


def case_allocation_fails(native: bool) -> tuple[Outcome, Outcome]:
    """Rank 1 has no memory for its engine; then it has, and both attach to the same model."""
    import gradferry
    from gradferry import _native

    ddp = DistributedDataParallel(ChosenGradients(Scenario(WEIGHTS)))
    entry = gradferry.attach if native else gradferry.HookState
    arguments = (ddp, "q4") if native else ("q4", ddp)
    engine = _native.HostEngine
    if dist.get_rank() == 1:
        engine = mock.Mock(side_effect=MemoryError("no memory for residuals"))
    with mock.patch.object(_native, "HostEngine", engine):
        first = attempt(lambda: entry(*arguments))
    return first, attempt(lambda: entry(*arguments))


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_failed_allocation_is_the_same_error_on_all_and_leaves_the_model_alone(
    world_of_2: World, native: bool
) -> None:
    answers = world_of_2.run(case_allocation_fails, native=native)
    first, second = [a[0] for a in answers], [a[1] for a in answers]
    assert all(o.is_ours for o in first), first
    assert len({(o.error, o.text) for o in first}) == 1, first
    assert "rank 1" in first[0].text
    assert "no memory for residuals" in first[0].text
    assert [o.error for o in second] == [None, None], second
