"""A barrier in the store of a process group, before any rank posts a collective.

If one rank never joins a collective, the others lose the timeout of the process group, and the
group with it. So they first meet in the group's store, with a few small keys per rank:

    number       of the current meeting; incremented as soon as one is decided, so that no rank
                 reads keys of an old one, not even of an earlier group of the same name
    <number>/rank/<rank>   that rank has come
    <number>/came          number of ranks that have come
    <number>/decided       the first rank to increment it decides for all, by setting ...
    <number>/outcome       ALL_CAME, or the error that every rank that came raises

When all have come to a meeting, they remove the keys of the one before.

Ranks that lose a collective look for each other in more keys, which are left there: what follows is
mostly the end of the processes.

    <number>/lost/any      set as soon as one rank has lost a collective, or gives up
    <number>/lost/<rank>   that rank has lost it, too
    <number>/lost/first    the first rank to increment it decides for all why, by setting ...
    <number>/lost/reason   what that rank saw
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from gradferry.errors import EchoError, PeerError

MOST_PATIENCE = timedelta(minutes=5)
MOST_PAUSE_SECONDS = 0.1  # between two reads of the store
ALL_CAME = "all came"
FAILED_ELSEWHERE = "a rank waits no longer, since one of another group of its failed"
# How long ranks that lost their connections look for each other.
LOOK_SECONDS = 1.0
NO_STORE = "the store of the process group does not answer (mostly rank 0 serves it)"


def store_of(group: dist.ProcessGroup) -> Store:
    """The store with which the group was created."""
    store: Store = dist.distributed_c10d._world.pg_map[group][1]
    return store


def world_ranks(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a group's processes in the whole job, by rank.

    All errors name these: a process has another rank in each of its groups.
    """
    return dist.get_process_group_ranks(group)


def patience(group: dist.ProcessGroup, place: torch.device) -> timedelta:
    """How long ranks wait for each other at attach: half the timeout, at most `MOST_PATIENCE`.

    Args:
        group: of the ranks.
        place: a device that the group has a backend for.
    """
    try:
        timeout: timedelta = group._get_backend(place).options._timeout
    except (RuntimeError, AttributeError):  # a backend without options
        return MOST_PATIENCE
    return min(timeout / 2, MOST_PATIENCE)


def meet(
    group: dist.ProcessGroup,
    longest: timedelta,
    purpose: str,
    beside: dist.ProcessGroup | None = None,
) -> None:
    """Waits until every rank of the group calls this.

    Nothing is posted on the group, so it remains usable when this raises. A rank that comes too
    late takes part in the next meeting.

    Args:
        group: of the ranks.
        longest: how long to wait for the others.
        purpose: what ranks that stay away did not do, for example "come to attach".
        beside: another group of this rank. No rank waits here after one has called `say_failed`
            there: ranks that know of it may never come.

    Raises:
        PeerError: not all ranks came (every rank that came raises the same text, which names the
            missing ranks), or the store does not answer. EchoError: because of `beside`.
    """
    if dist.get_world_size(group) == 1:
        return
    try:
        outcome = _outcome(group, longest, purpose, beside)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise PeerError(
            f"the store of the process group does not answer ({reason}); the process that serves "
            "it, mostly that of rank 0, may have ended: look at its error first"
        ) from error
    if outcome == FAILED_ELSEWHERE:
        raise EchoError(outcome)
    if outcome != ALL_CAME:
        raise PeerError(outcome)


def _outcome(
    group: dist.ProcessGroup, longest: timedelta, purpose: str, beside: dist.ProcessGroup | None
) -> str:
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    store = PrefixStore("gradferry/meetings", store_of(group))
    number = store.add("number", 0)
    meeting = PrefixStore(str(number), store)

    # A rank whose wait was interrupted may come twice, but is counted once.
    if meeting.add(f"rank/{rank}", 1) == 1 and meeting.add("came", 1) == world_size:
        _decide(store, meeting, lambda: ALL_CAME)
    elif not _wait(store, meeting, longest, world_ranks(group)[rank], beside):
        _decide(store, meeting, lambda: _absent(meeting, world_ranks(group), longest, purpose))
    meeting.wait(["outcome"], longest)  # the rank that decided is about to set it
    outcome = meeting.get("outcome").decode()
    if outcome == ALL_CAME:  # so that none is in the last meeting any more
        keys = [f"rank/{rank}"] + (["came", "decided", "outcome"] if rank == 0 else [])
        forget(PrefixStore(str(number - 1), store), keys)
    return outcome


def forget(store: Store, keys: Iterable[str]) -> None:
    """Removes keys that nobody reads any more: the store lives as long as the training."""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a store that cannot
        for key in keys:
            store.delete_key(key)


def _decide(store: Store, meeting: Store, outcome: Callable[[], str]) -> None:
    """Sets the outcome, unless another rank has decided."""
    if meeting.add("decided", 1) == 1:
        store.add("number", 1)
        meeting.set("outcome", outcome())


def _wait(
    store: Store,
    meeting: Store,
    longest: timedelta,
    rank: int,
    beside: dist.ProcessGroup | None,
) -> bool:
    """Whether there was an outcome in time.

    Polls, because the store's own wait cannot be interrupted and logs a warning at a timeout.
    """
    begin = time.monotonic()
    failed = None if beside is None else _losses(beside)
    try:
        while not meeting.check(["outcome"]):
            if failed is not None and failed.check(["any"]):
                _decide(store, meeting, lambda: FAILED_ELSEWHERE)
            waited = time.monotonic() - begin
            if waited > longest.total_seconds():
                return False
            time.sleep(min(waited / 8, MOST_PAUSE_SECONDS))
    except KeyboardInterrupt:
        _decide(store, meeting, lambda: f"rank {rank} was interrupted while it waited for others")
        raise
    return True


def _absent(meeting: Store, names: Sequence[int], longest: timedelta, purpose: str) -> str:
    ranks = [name for rank, name in enumerate(names) if not meeting.check([f"rank/{rank}"])]
    return (
        f"{name_ranks(ranks) if ranks else 'the last rank'} did not {purpose} within "
        f"{longest.total_seconds():g} s; see whether every rank calls gradferry at this point, and "
        "look at the errors of those that did not first. Nothing was changed, and the process "
        "group can be used"
    )


def wait_or_hear(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Waits for a collective of the group, but not for ranks that have called `absent_after_loss`.

    Gloo's rings notice a rank that ended only next to it; the others would wait for the timeout.

    Raises:
        RuntimeError: the collective failed, or goes on without a chance.
    """
    begin, heard, done = time.monotonic(), threading.Event(), threading.Event()

    def listen() -> None:  # to a store that may never answer
        with contextlib.suppress(RuntimeError):
            lost = _losses(group)
            while not done.wait(LOOK_SECONDS / 4):
                if lost.check(["any"]):
                    heard.set()
                    return

    listening = False
    try:
        while not work.is_completed():
            if heard.is_set():
                raise RuntimeError("closed by peer")
            waited = time.monotonic() - begin
            if waited > LOOK_SECONDS / 4 and not listening:
                threading.Thread(target=listen, name="gf-listen", daemon=True).start()
                listening = True
            time.sleep(min(waited / 8, MOST_PAUSE_SECONDS))
    finally:
        done.set()
    work.wait()


def say_failed(group: dist.ProcessGroup) -> None:
    """Until the next meeting, `wait_or_hear` and `hear_failures` raise on all ranks."""
    with contextlib.suppress(RuntimeError):  # without a store they wait for their deadline
        _losses(group).set("any", "")


def hear_failures(group: dist.ProcessGroup) -> Callable[[], None]:
    """A function that raises EchoError once a rank has called `say_failed`, and RuntimeError where
    the store does not answer. For use before the next meeting.
    """
    lost = _losses(group)

    def raise_if_failed() -> None:
        if lost.check(["any"]):
            raise EchoError("another rank failed while the ranks connected")

    return raise_if_failed


def _losses(group: dist.ProcessGroup) -> Store:
    store = PrefixStore("gradferry/meetings", store_of(group))
    return PrefixStore(f"{store.add('number', 0)}/lost", store)


def absent_after_loss(group: dist.ProcessGroup, reason: str) -> tuple[list[int], str | None]:
    """Which ranks do not call this within a second, after a collective of the group has failed.

    Args:
        group: of the ranks.
        reason: what this rank saw. Later ones may see only that the first has closed its
            connections.

    Returns:
        Those `world_ranks`, and the reason of the first that called this, the same on all ranks; no
        ranks and None if the store has not answered.
    """
    rank, names = dist.get_rank(group), world_ranks(group)
    found: list[tuple[list[int], str]] = []

    def look() -> None:
        lost = _losses(group)
        if lost.add("first", 1) == 1:
            lost.set("reason", reason)
        lost.set("any", "")
        lost.set(str(rank), "")
        end = time.monotonic() + LOOK_SECONDS
        while True:
            gone = [name for each, name in enumerate(names) if not lost.check([str(each)])]
            if not gone or time.monotonic() > end:
                agreed = lost.get("reason").decode() if lost.check(["reason"]) else reason
                found.append((gone, agreed))
                return
            time.sleep(LOOK_SECONDS / 20)

    def try_to_look() -> None:
        with contextlib.suppress(RuntimeError):
            look()

    # A store may never answer.
    looking = threading.Thread(target=try_to_look, name="gf-look", daemon=True)
    looking.start()
    looking.join(1.5 * LOOK_SECONDS)
    return found[0] if found else ([], None)


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 1 and 2", "ranks 1, 2, 3, 4 and 9 more"."""
    shown, more = [str(rank) for rank in ranks[:8]], len(ranks) - 8
    if more > 0:
        shown.append(f"{more} more")
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
