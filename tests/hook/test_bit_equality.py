"""Gradients that leave the hook equal the reference's to the bit, however DDP is configured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mixed import EVERY_DTYPE
from on_ranks import on_ranks
from scenario import (
    Run,
    Scenario,
    Weight,
    assert_all_bit_equal,
    assert_bit_equal,
    hooked,
    train,
    train_all,
)
from torch.nn.parallel import DistributedDataParallel
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
CHANNELS_LAST = (
    Weight("convolution", (32, 20, 3, 3), channels_last=True),
    Weight("plain", (32, 20, 3, 3)),
    Weight("bf16", (16, 12, 5, 5), torch.bfloat16, channels_last=True),
)
WITHOUT_ELEMENTS = (
    (Weight("empty", (0, 5)), *SMALL, Weight("nothing", (0,))),
    (Weight("fp32", (40, 40)), Weight("b", (0, 2), torch.bfloat16)),
)
RULES = (("em*", "exact"), ("b*", "bf16"), ("just_exact", "q4"), ("*e*", "bf16"))
UNUSED = (
    ("both", {0: ("odd", "bias")}),  # by one rank
    ("none", {0: ("odd",), 1: ("odd",)}),  # by all
    ("both", {0: ("embedding", "wide"), 1: ("wide",)}),
)
FIND_UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": 0.02}
WARMUP = {"warmup_steps": 2}
BOTH = {"error_feedback": "both"}


def row(*scenarios: Scenario, core: bool = False, id: str) -> Any:
    """Trainings of one world, one after the other. core: on every torch that is supported."""
    return pytest.param(scenarios, id=id, marks=pytest.mark.torch_core if core else ())


@pytest.mark.parametrize(
    "scenarios",
    [
        *(
            row(
                *(Scenario(SMALL, size, codec=codec) for codec in ("exact", "bf16", "q4")),
                Scenario(SMALL, size, native=False),
                core=True,
                id=f"a world of {size}",
            )
            for size in (1, 2, 3)
        ),
        row(
            *(Scenario(EVERY_DTYPE, 3, codec=codec, **BOTH) for codec in ("q4", "bf16", "exact")),
            core=True,
            id="every dtype",
        ),
        row(*map(Scenario, WITHOUT_ELEMENTS), id="a parameter without elements"),
        row(Scenario(SMALL, rules=RULES, **BOTH), id="rules"),
        row(
            # Warm-up steps are exact, leave residuals alone, and count for the signs of rht.
            *(
                Scenario(SMALL, codec=codec, options=WARMUP, **BOTH)
                for codec in ("q4", "rht:bits=2")
            ),
            id="warm-up",
        ),
        row(
            *(
                Scenario(SMALL, error_feedback=feedback, unused=unused, ddp=FIND_UNUSED)
                for feedback, unused in UNUSED
            ),
            id="unused parameters",
        ),
        row(
            *(Scenario(CHANNELS_LAST, native=native, **BOTH) for native in (True, False)),
            id="channels last",
        ),
    ],
)
def test_gradients_equal_reference(worlds: Worlds, scenarios: tuple[Scenario, ...]) -> None:
    answers = worlds(scenarios[0].world_size).run(train_all, scenarios=scenarios)
    assert_all_bit_equal(answers, scenarios)


@pytest.mark.parametrize("ranks", [(0, 2), (1, 2)])
def test_gradients_equal_reference_in_a_subgroup(worlds: Worlds, ranks: tuple[int, ...]) -> None:
    scenario = Scenario(SMALL, 2, group_ranks=ranks, error_feedback="both")
    assert_bit_equal(worlds(3).run(train, scenario=scenario), scenario)


@pytest.mark.parametrize(
    ("cap", "options"),
    [
        (0.1, {}),
        (0.1, {"gradient_as_bucket_view": True}),
        (0.1, {"static_graph": True}),
        (1, {}),
        (25, {}),
    ],
)
def test_gradients_equal_reference_whatever_the_buckets(
    worlds: Worlds, cap: float, options: dict[str, bool]
) -> None:
    scenario = Scenario(LARGE, steps=3, ddp={"bucket_cap_mb": cap, **options}, **BOTH)
    answers = worlds(2).run(train, scenario=scenario)
    assert_bit_equal(answers, scenario)
    # DDP's first bucket holds at most 1 MB, so 25 still makes two once the buckets are rebuilt.
    assert len(answers[0]["buckets"][-1]) >= {0.1: 3, 1: 2, 25: 1}[cap]
    if not options:
        assert answers[0]["buckets"][0] != answers[0]["buckets"][-1]


class FirstPassAlone(Scenario):
    """Accumulates from step 1 on: DDP takes no other beginning of a static graph."""

    def accumulated(self, step: int, rank: int, index: int) -> np.ndarray:
        passes = self.passes if step > 0 else 1
        return Scenario.accumulated(dataclasses.replace(self, passes=passes), step, rank, index)


def case_accumulates_later(scenarios: list[FirstPassAlone]) -> list[dict[str, Any]]:
    answers = []
    for scenario in scenarios:
        run = Run(dataclasses.replace(scenario, passes=1))
        gradients = [run.step(0)]
        run.scenario = scenario
        gradients += [run.step(step) for step in range(1, scenario.steps)]
        answers.append(run.answer(gradients))
    return answers


def test_gradients_equal_reference_with_accumulation_in_a_static_graph(worlds: Worlds) -> None:
    ddp = {"static_graph": True, "bucket_cap_mb": 0.02}
    scenarios = [
        FirstPassAlone(SMALL, 2, passes=3, ddp={**ddp, **options}, **BOTH)
        for options in ({}, {"gradient_as_bucket_view": True})
    ]
    assert_all_bit_equal(worlds(2).run(case_accumulates_later, scenarios=scenarios), scenarios)


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
    return [run.answer(g) for run, g in zip(runs, gradients, strict=True)]


def test_gradients_equal_reference_with_two_models_in_one_backward(worlds: Worlds) -> None:
    first = Scenario(SMALL, 2, ddp={"bucket_cap_mb": 0.02}, **BOTH)
    second = Scenario(SMALL[:5], 2, codec="bf16", seed=9)
    answers = worlds(2).run(case_two_models, first=first, second=second)
    assert_all_bit_equal(answers, [first, second])


# --- the mean of `exact`, beside that of DistributedDataParallel without a hook

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of either sign, from 2^-12 to 2^3, with 24 random bits, rounded to dtype."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-12, 3, (40, 64), generator=generator)
    mantissas = 1 + torch.rand(40, 64, generator=generator)
    signs = torch.randint(0, 2, (40, 64), generator=generator) * 2 - 1
    return (signs * torch.ldexp(mantissas, exponents)).to(dtype)


def averaged(gradient: torch.Tensor, codec: str | None) -> torch.Tensor:
    """By the hook with a codec; None: by DDP without a hook."""
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    model = torch.nn.Module()
    model.weight = weight
    model.forward = lambda: (weight * gradient).sum()
    ddp = DistributedDataParallel(model)
    if codec is not None:
        hooked(ddp, codec)
    ddp().backward()
    return weight.grad


def check_means() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for dtype in DTYPES:
        exact, plain = (averaged(drawn(rank, dtype), codec) for codec in ("exact", None))
        given = [drawn(rank, dtype).float() for rank in range(world_size)]
        total = given[0]
        for gradient in given[1:]:
            total = total + gradient
        mean = total * torch.tensor(1 / world_size, dtype=torch.float32)
        assert torch.equal(exact, mean.to(dtype)), dtype
        if world_size == 2:
            # Half of each is exact, since none is near the smallest number of its dtype.
            assert torch.equal(exact, plain), dtype
        # Every addition and division rounds, in the dtype at the worst, a number that is at most
        # the sum of the magnitudes: half a unit each, 2 * W of them.
        bound = torch.stack(given).abs().sum(0) * world_size * torch.finfo(dtype).eps
        assert ((exact.float() - plain.float()).abs() <= bound).all(), dtype


@pytest.mark.torch_core
@pytest.mark.parametrize("world_size", [2, 3])
def test_exact_adds_in_rank_order_and_rounds_once(worlds: Worlds, world_size: int) -> None:
    worlds(world_size).run(check_means)


@on_ranks()
def test_sum_beyond_fp32_is_no_finite_mean() -> None:
    gradient = torch.full((40, 64), 1.0)
    gradient[0, 0] = 3e38
    plain, exact, q4 = (averaged(gradient, codec) for codec in (None, "exact", "q4"))
    assert plain.isfinite().all()
    assert exact[0, 0] == float("inf")
    assert exact.flatten()[1:].eq(1).all()
    # A group of q4 has 1024 elements.
    assert q4.flatten()[:1024].isnan().all()
    assert q4.flatten()[1024:].isfinite().all()
