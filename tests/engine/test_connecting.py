"""Ranks that do not all come to attach, or cannot connect: a named error, and nothing lost.

Whoever came gets the same PeerError, long before the timeout of the process group, and can go on
using the group: afterwards all ranks attach and train.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from gradferry.errors import GradferryWarning
from outcomes import Outcome, attempt, interrupted, little_patience
from scenario import ChosenGradients, Run, Scenario, Weight
from torch._C._distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel
from world import World

SCENARIO = Scenario((Weight("first", (40, 40)), Weight("second", (9,))))
FREED_SECONDS = 60.0


def plain_ddp() -> DistributedDataParallel:
    return DistributedDataParallel(ChosenGradients(SCENARIO))


def train() -> bool:
    """Whether attach and a step work now, on all ranks."""
    return Run(SCENARIO).step(0)[0] is not None


def case_absent(absent: int) -> tuple[Outcome | None, list[str], bool]:
    """The outcome, what was said while ranks waited, and whether all train afterwards."""
    import gradferry
    from gradferry.core import rendezvous

    ddp, outcome = plain_ddp(), None
    at_once = mock.patch.object(rendezvous, "SAY_AFTER_SECONDS", 0.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if dist.get_rank() != absent:
            with little_patience(), at_once:
                outcome = attempt(lambda: gradferry.attach(ddp, "q4"))
    dist.barrier()
    return outcome, [str(w.message) for w in said if w.category is GradferryWarning], train()


@pytest.mark.torch_core
@pytest.mark.parametrize("absent", [0, 1])
def test_ranks_that_attach_without_one_name_it_and_keep_the_group(
    world_of_3: World, absent: int
) -> None:
    answers = world_of_3.run(case_absent, absent=absent)
    outcomes = [outcome for outcome, _, _ in answers if outcome is not None]
    assert [o.error for o in outcomes] == ["PeerError"] * 2, outcomes
    assert len({o.text for o in outcomes}) == 1, outcomes
    assert outcomes[0].text.startswith(f"rank {absent} did not call attach within 1 s")
    # One of them at least, the first; it may have come before the other.
    said = [text for _, texts, _ in answers for text in texts]
    assert 1 <= len(said) <= 2
    assert all(str(absent) in text.partition(" did not call attach yet")[0] for text in said)
    assert all(trained for _, _, trained in answers)


def case_late() -> tuple[Outcome, bool]:
    import gradferry

    ddp = plain_ddp()
    late = dist.get_rank() == 1
    with little_patience():
        if late:
            dist.barrier()  # until the others have given up
        outcome = attempt(lambda: gradferry.attach(ddp, "q4"))
        if not late:
            dist.barrier()
    return outcome, train()


def test_rank_that_comes_late_does_not_believe_that_the_others_are_there(
    world_of_3: World,
) -> None:
    answers = world_of_3.run(case_late)
    named = ["rank 1 did", "ranks 0 and 2 did", "rank 1 did"]
    for (outcome, trained), names in zip(answers, named, strict=True):
        assert outcome.error == "PeerError"
        assert outcome.text.startswith(names), outcome.text
        assert trained


def case_interrupted() -> bool:
    """A rank that was interrupted while it waited is not there any more."""
    import gradferry

    ddp = plain_ddp()
    if dist.get_rank() == 0:
        with interrupted(), contextlib.suppress(KeyboardInterrupt):
            gradferry.attach(ddp, "q4")
            raise AssertionError("it was not interrupted")
        dist.barrier()
    else:
        dist.barrier()
        with little_patience():
            outcome = attempt(lambda: gradferry.attach(ddp, "q4"))
        assert outcome.text.startswith("rank 0 did not call"), outcome
    dist.barrier()
    return train()


def test_interrupted_rank_is_not_counted(world_of_2: World) -> None:
    assert world_of_2.run(case_interrupted) == [True, True]


def case_interrupted_connecting() -> Outcome | None:
    """Rank 1 is interrupted while it waits for connections of rank 2: both others hear of it."""
    import gradferry
    from gradferry import _native

    ddp = plain_ddp()

    def wait_to_hear(*_: object, between_polls: Callable[[], None], **__: object) -> None:
        while True:
            between_polls()
            time.sleep(0.01)

    outcome = None
    if dist.get_rank() == 1:
        with interrupted(), contextlib.suppress(KeyboardInterrupt):
            gradferry.attach(ddp, "q4")
            raise AssertionError("it was not interrupted")
    elif dist.get_rank() == 2:
        with mock.patch.object(_native, "connect_lanes", wait_to_hear):
            outcome = attempt(lambda: gradferry.attach(ddp, "q4"))
    else:
        outcome = attempt(lambda: gradferry.attach(ddp, "q4"))
    dist.barrier()
    assert train()
    return outcome


def test_rank_that_is_interrupted_while_it_connects_is_named_at_once(world_of_3: World) -> None:
    first, none, third = world_of_3.run(case_interrupted_connecting)
    assert none is None
    for outcome in (first, third):
        assert outcome.error == "PeerError"
        assert outcome.text.startswith("rank 1: interrupted while it connected"), outcome


@contextlib.contextmanager
def few_files() -> Iterator[None]:
    """This process can open fewer files than its lanes need."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is of file numbers, of which those in use may leave gaps.
    in_use = {int(number) for number in os.listdir("/proc/self/fd")}  # noqa: PTH208
    free = (number for number in itertools.count() if number not in in_use)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, 4, None)), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def case_cannot_connect(kind: str) -> tuple[Outcome, bool, bool]:
    """Rank 1 cannot connect: its process is short of something."""
    import gradferry
    from gradferry import _native

    ddp = plain_ddp()
    connect = _native.connect_lanes

    def fail(*arguments: Any, **named: Any) -> Any:
        if kind == "memory":
            raise MemoryError("no memory")
        with few_files():
            return connect(*arguments, **named)

    before = settled()  # a file of an earlier test that is closed later would be one more to open
    dist.barrier()
    replaced = fail if dist.get_rank() == 1 else connect
    with little_patience(), mock.patch.object(_native, "connect_lanes", replaced):
        outcome = attempt(lambda: gradferry.attach(ddp, "q4"))
    return outcome, freed(before), train()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("files", "rank 1: cannot connect to the other ranks: "),
        ("memory", "rank 1: MemoryError: no memory"),
    ],
)
def test_rank_that_cannot_connect_is_named_by_all(world_of_3: World, kind: str, text: str) -> None:
    answers = world_of_3.run(case_cannot_connect, kind=kind)
    outcomes = [outcome for outcome, _, _ in answers]
    assert [o.error for o in outcomes] == ["PeerError"] * 3, outcomes
    assert len({o.text for o in outcomes}) == 1, outcomes
    assert outcomes[0].text.startswith(text)
    if kind == "files":
        assert "Too many open files; raise the process's limit" in outcomes[0].text
    assert all(all_freed and trained for _, all_freed, trained in answers), answers


def resources() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208


def freed(before: tuple[int, int]) -> bool:
    """Whether there are no more than before, in the end: lanes are closed later."""
    deadline = time.monotonic() + FREED_SECONDS
    while time.monotonic() < deadline:
        if all(now <= then for now, then in zip(resources(), before, strict=True)):
            return True
        time.sleep(0.05)
    return False


def attach_and_fail() -> None:
    """Trains until every rank raises."""
    run = Run(Scenario(SCENARIO.weights, options={"nonfinite": "raise"}, poison=POISON))
    assert attempt(lambda: run.step(0)).error == "StateError"


POISON = {(0, 0, "first"): float("nan")}


def attach_in_vain() -> None:
    """Rank 1 has no memory for its engine, when all are connected."""
    import gradferry
    from gradferry import _native

    ddp = plain_ddp()
    engine = mock.Mock(side_effect=MemoryError) if dist.get_rank() == 1 else _native.HostEngine
    with mock.patch.object(_native, "HostEngine", engine):
        assert attempt(lambda: gradferry.attach(ddp, "q4")).error == "PeerError"


def settled() -> tuple[int, int]:
    """What is left when nothing has changed for longer than lanes take to close."""
    last, since = resources(), time.monotonic()
    while time.monotonic() - since < 4.0:
        time.sleep(0.1)
        if (now := resources()) != last:
            last, since = now, time.monotonic()
    return last


def case_freed() -> tuple[tuple[int, int], tuple[int, int], bool]:
    attach_and_fail()
    attach_in_vain()
    before = settled()  # with what torch, Python and DDP make once
    for _ in range(3):
        attach_and_fail()
        attach_in_vain()
    held = resources()
    return before, held, freed(before)


def test_files_and_threads_are_freed_after_an_error(world_of_2: World) -> None:
    for before, held, all_freed in world_of_2.run(case_freed):
        assert held > before
        assert all_freed, (before, held)


def case_keys() -> list[int]:
    """How many keys the store holds after each of some trainings, on two nodes."""
    from gradferry.core.rendezvous import store_of

    scenario = dataclasses.replace(SCENARIO, world_size=3, nodes=((0, 1), (2,)))
    counts = []
    for _ in range(4):
        assert Run(scenario).step(0)[0] is not None
        dist.barrier()
        counts.append(store_of(dist.group.WORLD).num_keys())
        dist.barrier()
    return counts


def test_trainings_leave_no_keys_in_the_store(world_of_3: World) -> None:
    for counts in world_of_3.run(case_keys):
        assert len(set(counts[1:])) == 1, counts


def case_interrupted_among_others() -> Outcome | None:
    """Rank 2 does not come; rank 0 is interrupted, and rank 1 need not wait for the rest."""
    import gradferry
    from gradferry.core.rendezvous import store_of

    ddp, outcome = plain_ddp(), None
    store = PrefixStore("gradferry/meetings", store_of(dist.group.WORLD))
    other_came = f"{store.add('number', 0)}/rank/1"
    dist.barrier()
    if dist.get_rank() == 0:
        waits = interrupted(lambda: store.wait([other_came]))
        with waits, contextlib.suppress(KeyboardInterrupt):
            gradferry.attach(ddp, "q4")
            raise AssertionError("it was not interrupted")
    elif dist.get_rank() == 1:
        outcome = attempt(lambda: gradferry.attach(ddp, "q4"))
    dist.barrier()
    assert train()
    return outcome


def test_rank_that_is_interrupted_while_it_waits_is_named(world_of_3: World) -> None:
    _, outcome, _ = world_of_3.run(case_interrupted_among_others)
    assert outcome.error == "PeerError"
    assert outcome.text == "rank 0 was interrupted while it waited for others"
