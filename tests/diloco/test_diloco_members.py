"""Ranks of DiLoCo that are lost before, inside and after an average, and ranks that come."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry.averaging import global_parameters
from members import Alone, die, dying_inside, mean_of, run_until_lost
from outcomes import attempt
from reducing import same
from training_alone import are_equal, of_all, summed
from world import World

Worlds = Callable[[int], World]

LOST = (2, 3)
LEFT = [0, 1]


class Confirming:
    """Ends, or hears from nobody, where ranks confirm that they have an average: the second time
    that they agree in an outer step.
    """

    def __init__(self, then: Callable[..., Any]) -> None:
        self.calls, self.then = 0, then

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return (on_all_ranks if self.calls == 1 else self.then)(*arguments)

    def __enter__(self) -> None:
        self.patch = mock.patch.object(global_parameters, "on_all_ranks", self)
        self.patch.start()

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


on_all_ranks = global_parameters.on_all_ranks


def hear_nothing(*arguments: Any) -> NoReturn:
    """The others hear from this rank, which hears from nobody."""
    on_all_ranks(*arguments)
    raise gradferry.PeerError("lost contact")


def fail_alone(alone: Alone) -> None:
    """The average reaches the others, and not this rank."""
    reducer = alone.diloco._reducer
    begin = type(reducer).all_reduce

    def average_and_fail(tensors: Any) -> None:
        begin(reducer, tensors)
        raise gradferry.PeerError("lost contact")

    with mock.patch.object(reducer, "all_reduce", average_and_fail):
        alone.step(1)


def case_lost(where: str, codec: str) -> None:
    """Two of four ranks are lost around the second outer step; the others go on without them."""
    rank = dist.get_rank()
    alone = Alone(codec, None)
    alone.step(0)
    first, before = alone.applied(), alone.withheld()
    if rank in LOST:
        if where == "before":
            die()
        if where == "inside":
            with dying_inside():
                alone.step(1)
        if where == "heard by nobody":
            with Confirming(die):
                alone.step(1)
        alone.step(1)
        die()
    common, changes = alone.diloco.state_dict()["global"]["weight"], alone.diloco._global.changes
    deaf = where == "heard by one" and rank == 1
    with Confirming(hear_nothing if deaf else on_all_ranks):
        outcome = attempt(lambda: alone.step(1))
    held = alone.diloco.state_dict()["reducer"]
    saved = copy.deepcopy(held)
    took_it = where == "heard by one" and rank == 0
    assert outcome.error == (None if took_it else "PeerError"), outcome
    if not took_it:
        assert "outer step 1 is not over, and has changed nothing on this rank" in outcome.text
        assert "diloco.rejoin(group)" in outcome.text
        assert torch.equal(alone.diloco.state_dict()["global"]["weight"], common)
        assert torch.equal(alone.withheld(), before)
        assert attempt(alone.optimizer.step).error == "PeerError"  # nobody trains on alone unseen
    group = dist.new_group(LEFT, use_local_synchronization=True)
    alone.diloco.rejoin(group)
    assert alone.diloco.stats()["outer_steps"] == 2
    second = alone.applied()
    # Each rank keeps worker / W and owner of before, whatever the number of ranks is now.
    if where != "heard by one":
        lacks = summed(before, group)
        assert torch.equal(second + summed(alone.withheld(), group), lacks + mean_of(LEFT, 1))
    elif codec == "exact":
        assert torch.equal(second, mean_of([*LEFT, *LOST], 1))
    else:
        assert not torch.equal(alone.withheld(), before)  # it is what the step has left
    hashes = alone.diloco._global.hashes()
    answers: list[Any] = [None] * len(LEFT)
    dist.all_gather_object(answers, (hashes, second.sum().item(), first.sum().item()), group=group)
    assert answers[0] == answers[1]
    before = summed(alone.withheld(), group)
    alone.step(2)
    after = summed(alone.withheld(), group)
    assert torch.equal(alone.applied() + after, before + mean_of(LEFT, 2))
    assert same(held, saved)  # a state that was handed out stays as it is
    # What a collective of the failed average may still write to is no memory of later ones.
    assert changes[0].data_ptr() != alone.diloco._global.changes[0].data_ptr()


@pytest.mark.parametrize(
    ("where", "codec"),
    [
        ("before", "q4"),
        ("inside", "q4"),
        ("heard by nobody", "q4"),
        ("heard by one", "q4"),
        ("heard by one", "exact"),
    ],
)
def test_ranks_that_are_left_go_on_with_the_same_changes(where: str, codec: str) -> None:
    run_until_lost(list(LOST), case_lost, where=where, codec=codec)


def fail_outer(alone: Alone) -> None:
    """The outer optimizer of this rank fails, with the average of all."""
    handle = alone.diloco.outer.register_step_pre_hook(lambda *_: 1 / 0)
    try:
        alone.step(1)
    finally:
        handle.remove()


FAILURES: dict[str, tuple[Callable[[Alone], None], str | None, str]] = {
    # Two of three ranks would wait for the third.
    "average": (fail_alone, "PeerError", "PeerError"),
    "outer optimizer": (fail_outer, None, "StateError"),
}


def case_alone(how: str) -> None:
    """The average of all is there, and one of three ranks cannot end the outer step."""
    rank, group, everybody = dist.get_rank(), dist.new_group(), dist.new_group()
    fail, theirs, mine = FAILURES[how]
    alone = Alone("q4", group)
    alone.step(0)
    before = alone.withheld()
    outcome = attempt(lambda: fail(alone) if rank == 1 else alone.step(1))
    assert outcome.error == (mine if rank == 1 else theirs), outcome
    if outcome.error is not None:
        assert "rejoin(group)" in outcome.text
        again = attempt(lambda: alone.diloco.rejoin(group))
        assert again.error == "StateError"
        assert "make another one" in again.text
    alone.diloco.rejoin(everybody)
    assert alone.diloco.stats()["outer_steps"] == 2
    assert are_equal(of_all(alone.diloco._global.hashes()))
    sums = [summed(part, everybody) for part in (before, alone.withheld())]
    gap = alone.applied() + sums[1] - sums[0] - mean_of([0, 1, 2], 1)
    # A mean over 3 is rounded to fp32 once, at 2^-24 of at most 2, and so is what fold divides.
    assert gap.abs().max() <= 4 * 2.0**-23


@pytest.mark.parametrize("how", FAILURES)
def test_ranks_end_a_step_that_one_of_them_cannot(worlds: Worlds, how: str) -> None:
    worlds(3).run(case_alone, how=how)


def case_apart() -> None:
    """Ranks took one outer step each, without each other: the first of them stays."""
    mine = dist.get_rank()
    groups = [dist.new_group([rank]) for rank in range(2)]
    alone = Alone("q4", groups[mine])
    alone.step(0)
    first = alone.applied()
    if mine == 0:
        alone.diloco.rejoin()
        assert torch.equal(alone.model.weight, -first.float())
    else:
        with pytest.warns(gradferry.GradferryWarning, match="taken 1 outer steps, and others 1"):
            alone.diloco.rejoin()
        assert not torch.equal(alone.model.weight, -first.float())
    alone.step(1)


def test_ranks_with_different_pasts_go_on_with_one(worlds: Worlds) -> None:
    worlds(2).run(case_apart)


def case_diverged() -> None:
    alone, again = Alone("q4", None), dist.new_group()
    alone.step(0)
    if dist.get_rank() == 1:
        with torch.no_grad():
            alone.diloco._global.tensors[0][3, 4] += 1
    outcome = attempt(lambda: alone.diloco.rejoin(again))
    assert outcome.error == "DivergedError"
    assert "the global parameter 'weight' of rank 1 differs from that of rank 0" in outcome.text


def test_ranks_that_differ_after_one_outer_step_are_named(worlds: Worlds) -> None:
    worlds(2).run(case_diverged)


def case_two_levels() -> list[int]:
    """Ranks of a node withhold for each other: without one of them they begin anew."""
    rank, left = dist.get_rank(), dist.new_group(LEFT)
    alone = Alone("q4", None, nodes=2)
    alone.step(0)
    if rank in LOST:
        return []
    with pytest.warns(gradferry.GradferryWarning, match="has withheld is dropped"):
        alone.diloco.rejoin(left)
    slot = alone.diloco.state_dict()["reducer"][f"slot_{rank}"]
    assert not slot["worker"].any()
    assert not slot["owner"].any()
    alone.step(1)
    return alone.diloco._global.hashes()


def test_what_a_node_has_withheld_is_dropped_with_a_warning(worlds: Worlds) -> None:
    answers = worlds(4).run(case_two_levels)
    assert answers[0] == answers[1] != []
