"""Ranks of DiLoCo that are lost around an average or in a rejoin, and ranks that come. Averages and
residuals are exact.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry import diloco
from gradferry.diloco import _OuterReducer
from on_ranks import of_all, on_ranks
from outcomes import attempt
from own_groups import own_group
from saved import same
from torch import nn
from training_alone import Plain, are_equal, make, move, movements, residuals, still, summed
from world import World, WorldError

SHAPE = (96, 128)  # three tiles, so that three ranks own one


class Alone:
    """A model that moves as a test says, under DiLoCo. The outer optimizer adds up averages."""

    def __init__(
        self, codec: str, group: dist.ProcessGroup | None, start: float = 0.0, nodes: Any = "auto"
    ) -> None:
        self.model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        nn.init.constant_(self.model.weight, start)
        self.number = dist.get_rank()  # which stays, whatever process groups come
        self.optimizer = still(self.model)
        self.diloco = gradferry.DiLoCo(
            self.model,
            self.optimizer,
            sync_every=1,
            codec=codec,
            outer=lambda common: torch.optim.SGD(common, lr=1.0),
            group=group,
            nodes=nodes,
        )
        self.diloco.outer.register_step_pre_hook(self._keep_average)

    def _keep_average(self, outer: torch.optim.Optimizer, *_: object) -> None:
        self._average = outer.param_groups[0]["params"][0].grad.double()

    def step(self, number: int) -> None:
        """Moves by minus `change(rank, number)`: an outer step."""
        self.model.weight.grad = change(self.number, number)
        self.optimizer.step()

    def applied(self) -> torch.Tensor:
        """The average of the last outer step."""
        return self._average

    def withheld(self) -> torch.Tensor:
        """This rank's part of what the averages of all lack: worker / W + owner."""
        saved = self.diloco.state_dict()["reducer"]
        worker, owner = residuals(saved, self.diloco._reducer._started.tiles())
        return (worker / saved["world_size"] + owner).view(SHAPE)


def change(rank: int, number: int) -> torch.Tensor:
    """Integers times 2^-8, of which fp32 holds sums and means over 2 and 4 ranks exactly."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(-500, 500, SHAPE, generator=generator) * 2.0**-8


def mean_of(ranks: list[int], number: int) -> torch.Tensor:
    return torch.stack([change(rank, number).double() for rank in ranks]).mean(0)


def die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


@contextlib.contextmanager
def dying_inside() -> Iterator[None]:
    """An average of this rank sends to the others, and ends before they have all."""

    def send_and_die(reducer: gradferry.Reducer, tensors: Any) -> None:
        gradferry.Reducer.all_reduce(reducer, tensors, async_op=True)
        die()

    with mock.patch.object(_OuterReducer, "all_reduce", send_and_die):
        yield


def run_until_lost(
    lost: list[int], case: Callable[..., None], /, size: int = 4, **how: Any
) -> None:
    """Runs a case in which exactly these ranks are killed, and the others return."""
    world = World(size)
    try:
        with pytest.raises(WorldError) as raised:
            world.run(case, **how)
    finally:
        world.stop()
    rows = [line for line in str(raised.value).splitlines() if line.startswith("rank ")]
    assert rows == [f"rank {rank}: process ended with code -9" for rank in lost], raised.value


# Ranks that come to a rejoin wait half as long for one that has ended before they heard of it.
GROUP_TIMEOUT = timedelta(seconds=10)


def expect_conserved(
    alone: Alone, before: torch.Tensor, group: Any, ranks: list[int], number: int
) -> None:
    """Outer step `number` is over, of the changes of these ranks, and nothing has come to it or
    gone. Each rank keeps worker / W and owner of before, whatever the number of ranks is now.
    Collective.

    Args:
        before: what this rank has withheld before.
        group: of ranks.
    """
    assert alone.diloco.stats()["outer_steps"] == number + 1
    added, withheld = summed(before, group), summed(alone.withheld(), group)
    applied = of_all(alone.applied(), group)[0]  # of a rank that did not get it from another
    assert torch.equal(applied + withheld, added + mean_of(ranks, number))
    assert are_equal(of_all(alone.diloco._global.hashes(), group))


def expect_next_conserved(alone: Alone, group: Any, ranks: list[int], number: int) -> None:
    before = alone.withheld()
    alone.step(number)
    expect_conserved(alone, before, group, ranks, number)


# --- lost in an outer step ------------------------------------------------------------------------


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
        self.patch = mock.patch.object(diloco, "on_all_ranks", self)
        self.patch.start()

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


on_all_ranks = diloco.on_all_ranks


def hear_nothing(*arguments: Any) -> NoReturn:
    """The others hear from this rank, which hears from nobody."""
    on_all_ranks(*arguments)
    raise gradferry.PeerError("lost contact")


def die_inside(alone: Alone) -> None:
    with dying_inside():
        alone.step(1)


def die_unheard(alone: Alone) -> None:
    with Confirming(die):
        alone.step(1)


def die_after(alone: Alone) -> None:
    alone.step(1)
    die()


DEATHS: dict[str, Callable[[Alone], None]] = {
    "before": die,
    "inside": die_inside,
    "heard by nobody": die_unheard,
    "heard by one": die_after,
}


def case_lost(when: str, codec: str, lost: list[int], groups: str, store: str) -> None:
    """Two of four ranks are lost around the second outer step; the others go on without them."""
    rank = dist.get_rank()
    left = [each for each in range(4) if each not in lost]
    file = dist.FileStore(store, -1)
    group = own_group("all", file, rank, 4) if groups == "unknown to torch" else None
    alone = Alone(codec, group)
    alone.step(0)
    before = alone.withheld()
    if rank in lost:
        DEATHS[when](alone)
    common, changes = alone.diloco.state_dict()["global"]["weight"], alone.diloco._global.changes
    is_deaf = when == "heard by one" and rank == left[1]
    with Confirming(hear_nothing if is_deaf else on_all_ranks):
        outcome = attempt(lambda: alone.step(1))
    held = alone.diloco.state_dict()["reducer"]
    saved = copy.deepcopy(held)
    took_it = when == "heard by one" and not is_deaf
    assert outcome.error == (None if took_it else "PeerError"), outcome
    if not took_it:
        assert "outer step 1 is not over, and has changed nothing on this rank" in outcome.text
        assert "diloco.rejoin(group)" in outcome.text
        assert torch.equal(alone.diloco.state_dict()["global"]["weight"], common)
        assert torch.equal(alone.withheld(), before)
        assert attempt(alone.optimizer.step).error == "PeerError"  # nobody trains on alone unseen
    number = left.index(rank)
    if groups == "unknown to torch":
        group = own_group("left", file, number, len(left))
    elif groups == "default":
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=file, rank=number, world_size=len(left))
    else:
        group = dist.new_group(left, use_local_synchronization=True)
    alone.diloco.rejoin(group)
    if when != "heard by one":
        expect_conserved(alone, before, group, left, 1)
    elif codec == "exact":  # of the ranks that are gone, too
        expect_conserved(alone, before, group, [*left, *lost], 1)
    else:
        assert not torch.equal(alone.withheld(), before)  # it is what the step has left
    expect_next_conserved(alone, group, left, 2)
    assert same(held, saved)  # a state that was handed out stays as it is
    # What a collective of the failed average may still write to is no memory of later ones.
    assert changes[0].data_ptr() != alone.diloco._global.changes[0].data_ptr()


@pytest.mark.parametrize(
    ("when", "codec", "lost", "groups"),
    [
        ("heard by nobody", "q4", [2, 3], "new"),
        ("heard by one", "q4", [2, 3], "new"),
        ("heard by one", "exact", [2, 3], "new"),
        # Rank 0 serves the store.
        ("before", "q4", [0, 2], "default"),
        ("inside", "q4", [0, 2], "default"),
        ("inside", "q4", [0, 2], "unknown to torch"),
    ],
)
def test_ranks_that_are_left_go_on_with_the_same_changes(
    tmp_path: Path, when: str, codec: str, lost: list[int], groups: str
) -> None:
    how = {"when": when, "codec": codec, "lost": lost, "groups": groups}
    run_until_lost(lost, case_lost, store=str(tmp_path / "store"), **how)


def fail_alone(alone: Alone) -> None:
    """The average reaches the others, and not this rank."""
    reducer = alone.diloco._reducer
    begin = type(reducer).all_reduce

    def average_and_fail(tensors: Any) -> None:
        begin(reducer, tensors)
        raise gradferry.PeerError("lost contact")

    with mock.patch.object(reducer, "all_reduce", average_and_fail):
        alone.step(1)


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


@pytest.mark.parametrize("how", FAILURES)
@on_ranks(3)
def test_ranks_end_a_step_that_one_of_them_cannot(how: str) -> None:
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


@on_ranks(2)
def test_momentum_that_is_applied_in_part_comes_from_others() -> None:
    """Rank 0 does not know whether all have the average, and rank 1 fails with it."""
    model, rank, again = Plain(), dist.get_rank(), dist.new_group()
    outer = functools.partial(torch.optim.SGD, lr=1.0, momentum=0.5)
    optimizer, diloco = make(model, "exact", outer=outer)

    def step(number: int) -> None:
        move(model, movements(model, rank, number))
        optimizer.step()

    def fail(outer: torch.optim.Optimizer, *_: object) -> None:
        for kept in outer.state.values():
            kept["momentum_buffer"].add_(1.0)
        raise ZeroDivisionError

    step(0)
    with Confirming(on_all_ranks if rank else hear_nothing):
        handle = diloco.outer.register_step_pre_hook(fail if rank else lambda *_: None)
        assert attempt(lambda: step(1)).error == ("StateError" if rank else "PeerError")
    handle.remove()
    diloco.rejoin(again)
    step(2)
    assert diloco.stats()["outer_steps"] == 3
    assert are_equal(of_all(diloco._global.hashes()))


@on_ranks(2)
def test_step_that_was_got_in_a_rejoin_that_failed_is_over() -> None:
    """Rank 1 does not know whether all have the average, and gets what rank 0 has."""
    alone, rank, groups = Alone("q4", None), dist.get_rank(), [dist.new_group() for _ in range(2)]
    alone.step(0)
    before = alone.withheld()
    with Confirming(hear_nothing if rank else on_all_ranks):
        assert attempt(lambda: alone.step(1)).error == ("PeerError" if rank else None)
    failing = mock.patch.object(diloco, "take_up", side_effect=gradferry.StateError("full"))
    with contextlib.nullcontext() if rank else failing:
        assert attempt(lambda: alone.diloco.rejoin(groups[0])).error == "StateError"
    alone.diloco.rejoin(groups[1])
    expect_conserved(alone, before, groups[1], [0, 1], 1)


# --- lost in a rejoin -----------------------------------------------------------------------------


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
    "has compared": lambda: dying_after(diloco, "on_all_ranks"),
    "is connected": lambda: dying_after(diloco, "_OuterReducer"),
    "has rejoined": lambda: dying_after(diloco, "on_all_ranks", 2),
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
    expect_conserved(alone, before, two, left, 1)
    expect_next_conserved(alone, two, left, 2)


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
        with dying_after(diloco, "content_of"):
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
    expect_next_conserved(alone, groups[2], [0, 1], 1)


def test_a_newcomer_that_ends_keeps_nobody_out() -> None:
    run_until_lost([2], case_newcomer_lost, size=3)


# --- others than before ---------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_with_different_pasts_go_on_with_one() -> None:
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


@on_ranks(3)
def test_rank_that_differs_after_one_outer_step_gets_what_most_have() -> None:
    alone, again = Alone("q4", None), dist.new_group()
    alone.step(0)
    common = alone.diloco.state_dict()["global"]["weight"]
    if dist.get_rank() == 0:
        with torch.no_grad():
            alone.diloco._global.tensors[0][3, 4] += 1
        with pytest.warns(gradferry.GradferryWarning, match="or with other parameters"):
            alone.diloco.rejoin(again)
    else:
        alone.diloco.rejoin(again)
    assert torch.equal(alone.diloco.state_dict()["global"]["weight"], common)
    assert torch.equal(alone.model.weight, common)
    alone.step(1)


@on_ranks(4)
def test_what_a_node_has_withheld_is_dropped_with_a_warning() -> None:
    """Ranks of a node withhold for each other: without one of them they begin anew."""
    rank, left = dist.get_rank(), dist.new_group([0, 1])
    alone = Alone("q4", None, nodes=2)
    alone.step(0)
    if rank > 1:
        return
    with pytest.warns(gradferry.GradferryWarning, match="has withheld is dropped"):
        alone.diloco.rejoin(left)
    slot = alone.diloco.state_dict()["reducer"][f"slot_{rank}"]
    assert not slot["worker"].any()
    assert not slot["owner"].any()
    alone.step(1)
    assert are_equal(of_all(alone.diloco._global.hashes(), left))
