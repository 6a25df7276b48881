"""A convex problem whose workers disagree: without error feedback compression stalls beside its
optimum, with it training arrives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

N = 1024
START_RATE = 0.01
FULL_RATE_STEPS = 600
DECAY = 0.998  # per step: slow, since what is withheld at one rate is applied at later ones


class Quadratic(nn.Module):
    """sum of h (x - center)^2 / 2, with another center on every rank; their mean is the optimum."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.x = nn.Parameter(torch.zeros(N // 32, 32))
        self.h = 1 + torch.rand(self.x.shape, generator=generator)
        self.optimum = torch.randn(self.x.shape, generator=generator)
        # At the optimum the workers' gradients cancel, but neither is near zero.
        apart = 0.15 * torch.randn(self.x.shape, generator=generator)
        apart[torch.rand(self.x.shape, generator=generator) < 0.1] *= 3
        self.apart = apart

    def forward(self, sign: int) -> torch.Tensor:
        return (self.h * (self.x - self.optimum - sign * self.apart).square()).sum() / 2

    def excess(self) -> float:
        """How far the mean of the ranks' losses is above its minimum."""
        return float((self.h * (self.x - self.optimum).square()).double().sum() / 2)


def case_descend(codec: str, feedback: str, steps: int) -> float:
    """What is left of the excess loss, as a fraction of that at the start."""
    import gradferry

    model = Quadratic()
    ddp = DistributedDataParallel(model)
    gradferry.attach(ddp, codec, error_feedback=feedback)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=START_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: DECAY ** max(0, step - FULL_RATE_STEPS)
    )
    start = model.excess()
    sign = 1 - 2 * dist.get_rank()
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(sign).backward()
        optimizer.step()
        schedule.step()
    return model.excess() / start


@pytest.mark.parametrize("codec", ["sign1", "topk:ratio=0.1"])
def test_error_feedback_reaches_the_optimum(world_of_2: World, codec: str) -> None:
    for left in world_of_2.run(case_descend, codec=codec, feedback="both", steps=2000, seconds=300):
        assert left < 1e-6


@pytest.mark.parametrize("codec", ["sign1", "topk:ratio=0.1"])
def test_without_error_feedback_the_same_stalls(world_of_2: World, codec: str) -> None:
    half = world_of_2.run(case_descend, codec=codec, feedback="none", steps=1000, seconds=300)[0]
    end = world_of_2.run(case_descend, codec=codec, feedback="none", steps=2000, seconds=300)[0]
    assert end > 0.01
    assert end > 0.8 * half
