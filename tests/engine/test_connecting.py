"""Ranks that do not all come to attach, or cannot connect: a named error, and nothing lost.

Whoever came gets the same PeerError, long before the timeout of the process group, and can go on
using the group: afterwards all ranks attach and train.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from unittest import mock

import gradferry
import pytest
import torch.distributed as dist
from gradferry import _native
from gradferry.core import rendezvous
from gradferry.core.rendezvous import store_of
from on_ranks import of_all, on_ranks
from outcomes import Outcome, attempt, interrupted, little_patience
from scenario import ChosenGradients, Run, Scenario, Weight
from stepping import warned
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel
from world import open_files, thread_names

SCENARIO = Scenario((Weight("first", (40, 40)), Weight("second", (9,))))
FREED_SECONDS = 60.0


def attached(ddp: DistributedDataParallel | None = None) -> Outcome:
    ddp = ddp or DistributedDataParallel(ChosenGradients(SCENARIO))
    return attempt(lambda: gradferry.attach(ddp, "q4"))


def interrupted_at_attach(ddp: DistributedDataParallel, *wait: Callable[[], object]) -> None:
    with interrupted(*wait), contextlib.suppress(KeyboardInterrupt):
        gradferry.attach(ddp, "q4")
        raise AssertionError("it was not interrupted")


def assert_named(outcome: Outcome, text: str) -> None:
    assert outcome.error == "PeerError", outcome
    assert outcome.text.startswith(text), outcome


def assert_trains() -> None:
    """Attach and a step work now, on all ranks."""
    dist.barrier()
    assert Run(SCENARIO).step(0)[0] is not None


@pytest.mark.torch_core
@pytest.mark.parametrize("absent", [0, 1])
@on_ranks(3)
def test_ranks_that_attach_without_one_name_it_and_keep_the_group(absent: int) -> None:
    ddp, mine = DistributedDataParallel(ChosenGradients(SCENARIO)), []
    at_once = mock.patch.object(rendezvous, "SAY_AFTER_SECONDS", 0.0)
    if dist.get_rank() != absent:
        with warned() as caught, little_patience(), at_once:
            assert_named(attached(ddp), f"rank {absent} did not call attach within 1 s")
        mine = [str(w.message) for w in caught if w.category is gradferry.GradferryWarning]
    texts = list(itertools.chain(*of_all(mine)))
    # One of them at least, the first; it may have come before the other.
    assert 1 <= len(texts) <= 2
    assert all(str(absent) in text.partition(" did not call attach yet")[0] for text in texts)
    assert_trains()


@on_ranks(3)
def test_rank_that_comes_late_does_not_believe_that_the_others_are_there() -> None:
    ddp, late = DistributedDataParallel(ChosenGradients(SCENARIO)), dist.get_rank() == 1
    with little_patience():
        if late:
            dist.barrier()  # until the others have given up
        assert_named(attached(ddp), "ranks 0 and 2 did" if late else "rank 1 did")
        if not late:
            dist.barrier()
    assert_trains()


@on_ranks(2)
def test_interrupted_rank_is_not_counted() -> None:
    ddp = DistributedDataParallel(ChosenGradients(SCENARIO))
    if dist.get_rank() == 0:
        interrupted_at_attach(ddp)
        dist.barrier()
    else:
        dist.barrier()
        with little_patience():
            assert_named(attached(ddp), "rank 0 did not call")
    assert_trains()


@on_ranks(3)
def test_rank_that_is_interrupted_while_it_connects_is_named_at_once() -> None:
    """While it waits for connections of rank 2: both others hear of it."""
    ddp = DistributedDataParallel(ChosenGradients(SCENARIO))

    def wait_to_hear(*_: object, between_polls: Callable[[], None], **__: object) -> None:
        while True:
            between_polls()
            time.sleep(0.01)

    if dist.get_rank() == 1:
        interrupted_at_attach(ddp)
    else:
        waits = mock.patch.object(_native, "connect_lanes", wait_to_hear)
        with waits if dist.get_rank() == 2 else contextlib.nullcontext():
            assert_named(attached(ddp), "rank 1: interrupted while it connected")
    assert_trains()


@on_ranks(3)
def test_rank_that_is_interrupted_while_it_waits_is_named() -> None:
    """Rank 2 does not come; rank 0 is interrupted, and rank 1 need not wait for the rest."""
    ddp = DistributedDataParallel(ChosenGradients(SCENARIO))
    store = PrefixStore("gradferry/rendezvous", store_of(dist.group.WORLD))
    both = [f"{store.add('number', 0)}/rank/{rank}" for rank in (0, 1)]

    def until_both_came() -> None:
        while not store.check(both):  # wait() would keep this rank from the store
            pass

    dist.barrier()
    if dist.get_rank() == 0:
        interrupted_at_attach(ddp, until_both_came)
    elif dist.get_rank() == 1:
        assert_named(attached(ddp), "rank 0 was interrupted while it waited for others")
    assert_trains()


def resources() -> tuple[int, int]:
    """Open files and threads of this process."""
    return open_files(), len(thread_names())


def freed(before: tuple[int, int]) -> bool:
    """Whether there are no more than before, in the end: lanes are closed later."""
    deadline = time.monotonic() + FREED_SECONDS
    while time.monotonic() < deadline:
        if all(now <= then for now, then in zip(resources(), before, strict=True)):
            return True
        time.sleep(0.05)
    return False


def settled() -> tuple[int, int]:
    """What is left when nothing has changed for longer than lanes take to close."""
    last, since = resources(), time.monotonic()
    while time.monotonic() - since < 4.0:
        time.sleep(0.1)
        if (now := resources()) != last:
            last, since = now, time.monotonic()
    return last


POISON = {(0, 0, "first"): float("nan")}


def attach_and_fail() -> None:
    """Every rank raises in a step; then rank 1 has no memory for its engine, when all have
    connected.
    """
    run = Run(Scenario(SCENARIO.weights, options={"nonfinite": "raise"}, poison=POISON))
    assert attempt(lambda: run.step(0)).error == "StateError"
    engine = mock.Mock(side_effect=MemoryError) if dist.get_rank() == 1 else _native.HostEngine
    with mock.patch.object(_native, "HostEngine", engine):
        assert attached().error == "PeerError"


@on_ranks(2)
def test_files_and_threads_are_freed_after_an_error() -> None:
    attach_and_fail()
    before = settled()  # with what torch, Python and DDP make once
    for _ in range(3):
        attach_and_fail()
    held = resources()
    assert held > before
    assert freed(before), (before, held)


@on_ranks(3)
def test_trainings_leave_no_keys_in_the_store() -> None:
    scenario = dataclasses.replace(SCENARIO, world_size=3, nodes=((0, 1), (2,)))
    counts = []
    for _ in range(4):
        assert Run(scenario).step(0)[0] is not None
        dist.barrier()
        counts.append(store_of(dist.group.WORLD).num_keys())
        dist.barrier()
    assert len(set(counts[1:])) == 1, counts
