"""What `attach` keeps of what a codec withholds when nobody says, and what that promises."""

from __future__ import annotations

from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from residual_sums import still_missing
from scenario import Scenario, Weight
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

STEPS = 100
SIDE = 64


@pytest.mark.parametrize(
    ("codec", "worker", "owner"),
    [
        ("exact", False, False),
        ("bf16", False, True),
        ("q8", False, True),
        ("q4", True, True),
        ("rht:bits=4", True, True),
        ("rht:bits=2", True, True),
        ("sign1", True, True),
        ("topk:ratio=0.01", True, True),
    ],
)
def test_below_8_bits_both_residuals_are_kept(
    world_of_2: World, codec: str, worker: bool, owner: bool
) -> None:
    elements = world_of_2.run(case_residual_elements, codec=codec)
    # Of one tile: every rank has the worker's, one the owner's.
    assert [size for size, _ in elements] == [SIDE * SIDE * worker] * 2
    assert sorted(size for _, size in elements) == [0, SIDE * SIDE * owner]


def case_residual_elements(codec: str) -> tuple[int, int]:
    ddp = DistributedDataParallel(nn.Linear(SIDE, SIDE, bias=False))
    state = gradferry.attach(ddp, codec).state_dict()[f"slot_{dist.get_rank()}"]
    return state["worker"].numel(), state["owner"].numel()


@pytest.mark.parametrize("codec", ["q4", "rht:bits=4"])
def test_equal_gradients_arrive_in_full(world_of_2: World, codec: str) -> None:
    """The mean of what was applied goes to the gradient as 1 / steps, whatever rounding does."""
    answers = world_of_2.run(case_equal_gradients, codec=codec)
    true = np.mean([answer["gradient"] for answer in answers], axis=0)
    applied = answers[0]["applied"]
    scenario = Scenario((Weight("weight", (SIDE, SIDE)),), codec=codec)
    (missing,) = still_missing([answer["state"] for answer in answers], scenario)
    # A step rounds five times (gradient + residual, what is left, twice, and the mean), each off by
    # at most 2**-24 of numbers below 16.
    assert np.abs(true).max() < 8
    assert np.abs(STEPS * true - applied - missing).max() <= STEPS * 5 * 16 * 2.0**-24
    error = np.linalg.norm(applied / STEPS - true)
    assert error < 0.1 * np.linalg.norm(answers[0]["first"] - true)


def case_equal_gradients(codec: str) -> dict[str, Any]:
    model = nn.Linear(SIDE, SIDE, bias=False)
    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, codec)
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradient = torch.randn(SIDE, SIDE, generator=generator)
    applied, first = torch.zeros(SIDE, SIDE, dtype=torch.float64), None
    for _ in range(STEPS):
        ddp.zero_grad()
        # d/dW of sum(gradient * W x) with x one unit vector after another: the gradient itself.
        (ddp(torch.eye(SIDE)).t() * gradient).sum().backward()
        applied += model.weight.grad
        first = model.weight.grad.clone() if first is None else first
    assert first is not None
    return {
        "gradient": gradient.double().numpy().reshape(-1),
        "applied": applied.numpy().reshape(-1),
        "first": first.double().numpy().reshape(-1),
        "state": state.state_dict(),
    }
