"""The harness itself: what ranks return, raise, or fail to do reaches the test that caused it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from world import World, WorldError


def case_sum_of_ranks(offset: int) -> tuple[int, float, int]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def case_raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"trouble on {rank}")


def case_hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def own_world() -> World:
    world = World(2)
    yield world
    world.stop()


def test_processes_are_kept_between_cases(world_of_2: World) -> None:
    first = world_of_2.run(case_sum_of_ranks, offset=0)
    assert world_of_2.run(case_sum_of_ranks, offset=0) == first


def test_error_names_rank_and_traceback_and_world_recovers(own_world: World) -> None:
    with pytest.raises(
        WorldError, match=r"(?s)rank 1: Traceback.*ValueError: trouble on 1"
    ) as info:
        own_world.run(case_raise_on, rank=1)
    assert "rank 0" not in str(info.value)
    assert own_world.run(case_sum_of_ranks, offset=1)[0][1] == 3


def test_hang_is_reported_with_stacks_and_killed(own_world: World) -> None:
    pids = [a[2] for a in own_world.run(case_sum_of_ranks, offset=0)]
    with pytest.raises(WorldError, match=r"(?s)rank 1: did not answer in time.*case_hang_on"):
        own_world.run(case_hang_on, rank=1, seconds=1)
    assert not any(map(alive, pids))
    assert own_world.run(case_sum_of_ranks, offset=1)[0][1] == 3
