"""The mean that `exact` delivers, beside that of DistributedDataParallel without a hook."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Of either sign, with magnitudes from 2^-12 to 2^3 and 24 random bits, rounded to dtype."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-12, 3, (40, 64), generator=generator)
    mantissas = 1 + torch.rand(40, 64, generator=generator)
    signs = torch.randint(0, 2, (40, 64), generator=generator) * 2 - 1
    return (signs * torch.ldexp(mantissas, exponents)).to(dtype)


def averaged(gradient: torch.Tensor, codec: str | None) -> torch.Tensor:
    """By the hook with a codec; None: by DDP without a hook."""
    import gradferry

    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    model = torch.nn.Module()
    model.weight = weight
    model.forward = lambda: (weight * gradient).sum()
    ddp = DistributedDataParallel(model)
    if codec is not None:
        gradferry.attach(ddp, codec)
    ddp().backward()
    return weight.grad


def case_means() -> dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]]:
    rank = dist.get_rank()
    return {
        dtype: (averaged(drawn(rank, dtype), "exact"), averaged(drawn(rank, dtype), None))
        for dtype in DTYPES
    }


@pytest.mark.torch_core
@pytest.mark.parametrize("world_size", [2, 3])
def test_exact_adds_in_rank_order_and_rounds_once(worlds: Worlds, world_size: int) -> None:
    for answer in worlds(world_size).run(case_means):
        for dtype, (exact, plain) in answer.items():
            given = [drawn(rank, dtype).float() for rank in range(world_size)]
            total = given[0]
            for gradient in given[1:]:
                total = total + gradient
            mean = total * torch.tensor(1 / world_size, dtype=torch.float32)
            assert torch.equal(exact, mean.to(dtype)), dtype
            if world_size == 2:
                # Half of each is exact, since none is near the smallest number of its dtype.
                assert torch.equal(exact, plain), dtype
            # Every addition and division rounds, in the dtype at the worst, a number that is at
            # most the sum of the magnitudes: half a unit each, 2 * W of them.
            bound = torch.stack(given).abs().sum(0) * world_size * torch.finfo(dtype).eps
            assert ((exact.float() - plain.float()).abs() <= bound).all(), dtype


def case_large() -> list[torch.Tensor]:
    gradient = torch.full((40, 64), 1.0)
    gradient[0, 0] = 3e38
    return [averaged(gradient, codec) for codec in (None, "exact", "q4")]


def test_sum_beyond_fp32_is_no_finite_mean(worlds: Worlds) -> None:
    for plain, exact, q4 in worlds(2).run(case_large):
        assert plain.isfinite().all()
        assert exact[0, 0] == float("inf")
        assert exact.flatten()[1:].eq(1).all()
        # A group of q4 has 1024 elements.
        assert q4.flatten()[:1024].isnan().all()
        assert q4.flatten()[1024:].isfinite().all()
