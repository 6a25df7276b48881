"""Gradients that leave the hook equal the reference's to the bit, however DDP is configured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scenario import Run, Scenario, Weight, assert_bit_equal, assert_same_parameters, train
from world import World

Worlds = Callable[[int], World]

SMALL = (
    Weight("embedding", (70, 64)),
    Weight("prime", (1031,)),
    Weight("odd", (61, 67)),
    Weight("one", (1,)),
    Weight("below_world_size", (2,)),
    Weight("just_compressed", (32, 32)),
    Weight("just_exact", (31, 33)),
    Weight("wide", (3, 4099)),
    Weight("bias", (67,)),
)
# 1.9 MB: one, two or many buckets.
LARGE = (*SMALL, Weight("hidden", (401, 613)), Weight("output", (613, 331)))


def check(worlds: Worlds, scenario: Scenario) -> list[dict]:
    answers = worlds(scenario.world_size).run(train, scenario=scenario)
    assert_bit_equal(answers, scenario)
    return answers


@pytest.mark.torch_core
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("codec", ["exact", "bf16", "q4"])
def test_gradients_equal_reference(
    worlds: Worlds, world_size: int, native: bool, codec: str
) -> None:
    check(worlds, Scenario(SMALL, world_size, codec=codec, native=native))


@pytest.mark.parametrize("feedback", ["none", "worker", "owner", "both"])
@pytest.mark.parametrize("codec", ["bf16", "q4"])
def test_gradients_equal_reference_in_every_error_feedback_mode(
    worlds: Worlds, feedback: str, codec: str
) -> None:
    check(worlds, Scenario(SMALL, 3, codec=codec, error_feedback=feedback))


@pytest.mark.parametrize("cap", [0.1, 1, 25])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_gradients_equal_reference_whatever_the_buckets(
    worlds: Worlds, cap: float, options: dict[str, bool]
) -> None:
    scenario = Scenario(LARGE, 2, error_feedback="both", ddp={"bucket_cap_mb": cap, **options})
    answers = check(worlds, scenario)
    # DDP's first bucket holds at most 1 MB, so 25 still makes two once the buckets are rebuilt.
    assert len(answers[0]["buckets"][-1]) >= {0.1: 3, 1: 2, 25: 1}[cap]
    if not options:
        assert answers[0]["buckets"][0] != answers[0]["buckets"][-1]


@pytest.mark.torch_core
def test_gradients_equal_reference_with_mixed_dtypes(worlds: Worlds) -> None:
    weights = (
        Weight("fp32", (50, 100)),
        Weight("bf16", (90, 50), torch.bfloat16),
        Weight("bf16_bias", (50,), torch.bfloat16),
        Weight("fp16", (64, 65), torch.float16),
        Weight("fp64", (80, 60), torch.float64),
        Weight("complex64", (40, 60), torch.complex64),
        Weight("complex128", (5, 6), torch.complex128),
    )
    for codec in ("q4", "bf16", "exact"):
        check(worlds, Scenario(weights, 3, codec=codec, error_feedback="both"))


def test_gradients_equal_reference_with_a_parameter_without_elements(worlds: Worlds) -> None:
    check(worlds, Scenario((Weight("empty", (0, 5)), *SMALL, Weight("nothing", (0,)))))
    check(worlds, Scenario((Weight("fp32", (40, 40)), Weight("b", (0, 2), torch.bfloat16))))


def test_gradients_equal_reference_with_rules(worlds: Worlds) -> None:
    rules = (("em*", "exact"), ("b*", "bf16"), ("just_exact", "q4"), ("*e*", "bf16"))
    check(worlds, Scenario(SMALL, 2, error_feedback="both", rules=rules))


@pytest.mark.parametrize("feedback", ["none", "both"])
@pytest.mark.parametrize(
    "unused",
    [{0: ("odd", "bias")}, {0: ("odd",), 1: ("odd",)}, {0: ("embedding", "wide"), 1: ("wide",)}],
    ids=["one_rank", "all_ranks", "both_kinds"],
)
def test_gradients_equal_reference_with_unused_parameters(
    worlds: Worlds, unused: dict[int, tuple[str, ...]], feedback: str
) -> None:
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.02}
    check(worlds, Scenario(SMALL, 2, error_feedback=feedback, unused=unused, ddp=options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
    ],
)
def test_gradients_equal_reference_with_accumulation(
    worlds: Worlds, options: dict[str, bool]
) -> None:
    weights = (*SMALL, Weight("bf16", (90, 50), torch.bfloat16))
    check(worlds, Scenario(weights, 2, passes=3, error_feedback="both", ddp=options))


class FirstPassAlone(Scenario):
    """Accumulates from step 1 on: DDP takes no other beginning of a static graph."""

    def accumulated(self, step: int, rank: int, index: int) -> np.ndarray:
        passes = self.passes if step > 0 else 1
        return Scenario.accumulated(dataclasses.replace(self, passes=passes), step, rank, index)


def case_accumulates_later(scenarios: list[FirstPassAlone]) -> list[dict[str, Any]]:
    return [accumulates_later(scenario) for scenario in scenarios]


def accumulates_later(scenario: FirstPassAlone) -> dict[str, Any]:
    run = Run(dataclasses.replace(scenario, passes=1))
    gradients = [run.step(0)]
    run.scenario = scenario
    gradients += [run.step(step) for step in range(1, scenario.steps)]
    return run.answer(gradients)


def test_gradients_equal_reference_with_accumulation_in_a_static_graph(worlds: Worlds) -> None:
    ddp = {"static_graph": True, "bucket_cap_mb": 0.02}
    scenarios = [
        FirstPassAlone(SMALL, 2, passes=3, error_feedback="both", ddp={**ddp, **options})
        for options in ({}, {"gradient_as_bucket_view": True})
    ]
    answers = worlds(2).run(case_accumulates_later, scenarios=scenarios)
    for index, scenario in enumerate(scenarios):
        assert_bit_equal([answer[index] for answer in answers], scenario)


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_gradients_equal_reference_with_uneven_inputs(worlds: Worlds, native: bool) -> None:
    scenario = Scenario(
        SMALL,
        3,
        error_feedback="both",
        steps_by_rank=(5, 7, 4),
        native=native,
        ddp={"bucket_cap_mb": 0.02},
    )
    check(worlds, scenario)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
def test_gradients_equal_reference_with_checkpointing(worlds: Worlds, reentrant: bool) -> None:
    # DDP supports the reentrant kind with a static graph only.
    options = {"static_graph": reentrant, "bucket_cap_mb": 0.02}
    check(worlds, Scenario(SMALL, 2, checkpointed=reentrant, ddp=options))


def test_gradients_equal_reference_with_channels_last(worlds: Worlds) -> None:
    weights = (
        Weight("convolution", (32, 20, 3, 3), channels_last=True),
        Weight("plain", (32, 20, 3, 3)),
        Weight("bf16", (16, 12, 5, 5), torch.bfloat16, channels_last=True),
    )
    for native in (True, False):
        check(worlds, Scenario(weights, 2, error_feedback="both", native=native))


@pytest.mark.parametrize("ranks", [(0, 2), (1, 2)])
def test_gradients_equal_reference_in_a_subgroup(worlds: Worlds, ranks: tuple[int, ...]) -> None:
    scenario = Scenario(SMALL, 2, group_ranks=ranks, error_feedback="both")
    assert_bit_equal(worlds(3).run(train, scenario=scenario), scenario)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_gradient_of_one_rank_reaches_all_as_the_reference_says(
    worlds: Worlds, poison: float
) -> None:
    places = {(1, 1, "wide"): poison, (2, 0, "prime"): poison, (2, 2, "odd"): poison}
    check(worlds, Scenario(SMALL, 3, error_feedback="both", poison=places))
    check(worlds, Scenario(SMALL, 3, codec="bf16", error_feedback="both", poison=places))


def case_two_models(first: Scenario, second: Scenario) -> list[dict]:
    """Both in flight at once: two backward passes before any gradient is looked at."""
    runs = [Run(first), Run(second)]
    gradients: list[list] = [[], []]
    for step in range(first.steps):
        losses = [run.ddp(run.targets(step)) for run in runs]
        for run in runs:
            run.ddp.zero_grad()
        (losses[0] + losses[1]).backward()
        for run, collected in zip(runs, gradients, strict=True):
            pairs = zip(run.scenario.weights, run.model.parameters(), strict=True)
            collected.append([w.to_flat(p.grad) for w, p in pairs])
    return [
        {"gradients": g, "hashes": [], "final_hash": run.parameter_hash()}
        for run, g in zip(runs, gradients, strict=True)
    ]


def test_gradients_equal_reference_with_two_models_in_one_backward(worlds: Worlds) -> None:
    first = Scenario(SMALL, 2, error_feedback="both", ddp={"bucket_cap_mb": 0.02})
    second = Scenario(SMALL[:5], 2, codec="bf16", seed=9)
    answers = worlds(2).run(case_two_models, first=first, second=second)
    assert_bit_equal([answer[0] for answer in answers], first)
    assert_bit_equal([answer[1] for answer in answers], second)


def test_result_does_not_depend_on_how_the_hook_was_registered(worlds: Worlds) -> None:
    scenario = Scenario(SMALL, 2, error_feedback="both")
    native = check(worlds, scenario)
    python = check(worlds, dataclasses.replace(scenario, native=False))
    assert_same_parameters([*native, *python])
