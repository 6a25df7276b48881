"""Ranks of DiLoCo that end where most hangs on them: one that serves the store, or in a rejoin."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gradferry import diloco
from gradferry.averaging import global_parameters
from members import Alone, die, dying_inside, mean_of, run_until_lost
from outcomes import attempt
from own_groups import own_group
from training_alone import are_equal, of_all, summed

# Ranks that come to a rejoin wait half as long for one that has ended before they heard of it.
GROUP_TIMEOUT = timedelta(seconds=10)


def expect_step_taken_again(
    alone: Alone, before: torch.Tensor, group: Any, ranks: list[int]
) -> None:
    """Outer step 1 is over, of the changes of these ranks, and nothing has come to it or gone; and
    so is the next one. Collective.

    Args:
        before: what this rank has withheld before.
        group: of these ranks.
    """
    for number in (1, 2):
        if number == 2:
            before = alone.withheld()
            alone.step(number)
        assert alone.diloco.stats()["outer_steps"] == number + 1
        added, withheld = summed(before, group), summed(alone.withheld(), group)
        # Each rank keeps worker / W and owner of before, whatever the number of ranks is now.
        assert torch.equal(alone.applied() + withheld, added + mean_of(ranks, number))
        assert are_equal(of_all(alone.diloco._global.hashes(), group))


def case_store_lost(store: str, where: str, when: str) -> None:
    """Rank 0, and another one, are lost in the second outer step."""
    rank, left = dist.get_rank(), [1, 3]
    file = dist.FileStore(store, -1)
    group = own_group("all", file, rank, 4) if where == "elsewhere" else None
    alone = Alone("q4", group)
    alone.step(0)
    before = alone.withheld()
    if rank not in left:
        if when == "before":
            die()
        with dying_inside():
            alone.step(1)
    outcome = attempt(lambda: alone.step(1))
    assert outcome.error == "PeerError", outcome
    assert "outer step 1 is not over, and has changed nothing on this rank" in outcome.text
    assert torch.equal(alone.withheld(), before)
    number = left.index(rank)
    if where == "elsewhere":
        group = own_group("left", file, number, len(left))
    else:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=file, rank=number, world_size=len(left))
    alone.diloco.rejoin(group)
    expect_step_taken_again(alone, before, group, left)


@pytest.mark.parametrize(
    ("where", "when"), [("on rank 0", "before"), ("on rank 0", "inside"), ("elsewhere", "inside")]
)
def test_ranks_go_on_without_rank_0_and_its_store(tmp_path: Path, where: str, when: str) -> None:
    store = str(tmp_path / "store")
    run_until_lost([0, 2], case_store_lost, store=store, where=where, when=when)


def dying_after(module: Any, name: str, calls: int = 1) -> Any:
    """This rank ends when a function of the module has returned so many times."""
    function, seen = getattr(module, name), 0

    def call_and_die(*arguments: Any, **options: Any) -> Any:
        nonlocal seen
        result, seen = function(*arguments, **options), seen + 1
        return die() if seen == calls else result

    return mock.patch.object(module, name, call_and_die)


# Where a rank ends that has come to a rejoin.
PLACES: dict[str, Callable[[], Any]] = {
    "has come": lambda: dying_after(diloco, "meet"),
    "has compared": lambda: dying_after(diloco, "gather_records"),
    "is connected": lambda: dying_after(diloco, "_OuterReducer"),
    "has caught up": lambda: dying_after(global_parameters.GlobalParameters, "hand_on"),
    "has its residuals": lambda: dying_after(diloco, "take_up"),
    "has rejoined": lambda: dying_after(diloco, "on_all_ranks"),
    "averages": dying_inside,
}


def case_rejoin_lost(place: str) -> None:
    """Rank 3 is lost in an outer step, and rank 2 in the rejoin of those that are left."""
    rank, left = dist.get_rank(), [0, 1]
    alone = Alone("q4", None)
    alone.step(0)
    before, common = alone.withheld(), alone.diloco.state_dict()["global"]["weight"]
    if rank == 3:
        with dying_inside():
            alone.step(1)
    assert attempt(lambda: alone.step(1)).error == "PeerError"
    three = dist.new_group([0, 1, 2], timeout=GROUP_TIMEOUT, use_local_synchronization=True)
    if rank == 2:
        with PLACES[place]():
            alone.diloco.rejoin(three)
    outcome = attempt(lambda: alone.diloco.rejoin(three))
    assert outcome.error == "PeerError", outcome
    assert torch.equal(alone.diloco.state_dict()["global"]["weight"], common)
    assert torch.equal(alone.withheld(), before)
    assert attempt(alone.optimizer.step).error == "PeerError"  # nobody trains on alone unseen
    two = dist.new_group(left, use_local_synchronization=True)
    alone.diloco.rejoin(two)
    expect_step_taken_again(alone, before, two, left)


@pytest.mark.parametrize("place", PLACES)
def test_ranks_go_on_without_one_that_ended_in_a_rejoin(place: str) -> None:
    run_until_lost([2, 3], case_rejoin_lost, place=place)


def case_newcomer_lost() -> None:
    """Of two newcomers one ends while it gets what rank 0 has. The other one comes again."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks, timeout=GROUP_TIMEOUT) for ranks in ([0], [0, 1, 2], [0, 1])]
    alone = Alone("q4", groups[0]) if rank == 0 else None
    if alone is not None:
        alone.step(0)
    if rank == 2:
        with dying_after(global_parameters, "wait_or_hear"):
            Alone("q4", groups[1], start=7.0)

    def come(group: Any) -> Alone:
        if alone is None:
            return Alone("q4", group, start=7.0)
        alone.diloco.rejoin(group)
        return alone

    outcome = attempt(lambda: come(groups[1]))
    assert outcome.error == "PeerError", outcome
    alone = come(groups[2])
    assert torch.equal(alone.model.weight, alone.diloco.state_dict()["global"]["weight"])
    before = alone.withheld()
    alone.step(1)
    expect_step_taken_again(alone, before, groups[2], [0, 1])


def test_a_newcomer_that_ends_keeps_nobody_out() -> None:
    run_until_lost([2], case_newcomer_lost, size=3)
