"""The harness itself: what a rank raises reaches the test that caused it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from world import World, WorldError


def case_sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def case_raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"trouble on {rank}")


@pytest.fixture
def own_world() -> World:
    world = World(2)
    yield world
    world.stop()


def test_error_names_rank_and_traceback_and_world_recovers(own_world: World) -> None:
    with pytest.raises(
        WorldError, match=r"(?s)rank 1: Traceback.*ValueError: trouble on 1"
    ) as info:
        own_world.run(case_raise_on, rank=1)
    assert "rank 0" not in str(info.value)
    assert own_world.run(case_sum_of_ranks) == [1, 1]
