"""Ranks meet in the store of their process group before any of them posts a collective.

If one rank never joins a collective, the others lose the timeout of the process group, and the
group with it. hooks/rendezvous.h has the rendezvous, and its keys. Here are those with which ranks
that lose a collective look for each other. They stay: mostly the processes end afterwards.

    <number>/failed        set as soon as one rank has lost a collective, or gives up
    <number>/lost/<rank>   that rank has lost it, too
    <number>/lost/first    the first rank to increment it decides for all why, by setting ...
    <number>/lost/reason   what that rank saw
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from gradferry import _native
from gradferry.core.warn import warn_or_log
from gradferry.errors import EchoError

SAY_AFTER_SECONDS = 10.0  # of waiting for others, whom one waits for
MOST_PATIENCE = timedelta(minutes=5)
MOST_PAUSE_SECONDS = 0.1  # between two reads of the store
# How long ranks that lost their connections look for each other.
LOOK_SECONDS = 1.0
NO_STORE = "the store of the process group does not answer (mostly rank 0 serves it)"


def store_of(group: dist.ProcessGroup) -> Store:
    """The store with which the group was created."""
    return group.get_group_store()


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed has made the group, and knows it still."""
    return group in dist.distributed_c10d._world.pg_map


def exists(group: dist.ProcessGroup | None) -> bool:
    """Whether a group was not destroyed. torch.distributed names all that it makes, and forgets
    what it destroys; a group that it has not made lives as long as its object.
    """
    return group is not None and (is_known(group) or not group.group_name)


def world_ranks(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a group's processes in the whole job, by rank; those in the group where
    torch.distributed does not know it.

    All errors name these: a process has another rank in each of its groups.
    """
    return dist.get_process_group_ranks(group) if is_known(group) else list(range(group.size()))


def patience(group: dist.ProcessGroup, place: torch.device) -> timedelta:
    """How long ranks wait for each other at attach: half the timeout, at most `MOST_PATIENCE`.

    Args:
        group: of the ranks.
        place: a device that the group has a backend for.
    """
    return min(timeout_of(group, place) / 2, MOST_PATIENCE)


def timeout_of(group: dist.ProcessGroup, place: torch.device) -> timedelta:
    """The timeout of the group's backend for this device."""
    try:
        timeout: timedelta = group._get_backend(place).options._timeout
    except (RuntimeError, AttributeError):  # a backend without options
        return 2 * MOST_PATIENCE
    return timeout


def meet(group: dist.ProcessGroup, longest: timedelta, purpose: str) -> None:
    """Waits until every rank of the group calls this. After `SAY_AFTER_SECONDS` the lowest rank
    that has come warns, and names those that have not.

    Nothing is posted on the group, so it remains usable when this raises. A rank that comes too
    late takes part in the next rendezvous.

    Args:
        group: of the ranks.
        longest: how long to wait for the others.
        purpose: what ranks that stay away did not do, for example "call attach".

    Raises:
        PeerError: not all ranks came (every rank that came raises the same text, which names the
            missing ranks), or the store does not answer.
    """
    if group.size() == 1:
        return
    begin, says = time.monotonic(), True

    def between_polls() -> None:
        nonlocal says
        if says and time.monotonic() - begin >= SAY_AFTER_SECONDS:
            says = False
            with contextlib.suppress(RuntimeError):  # of a store that does not answer
                _say_who_is_missing(group, purpose, longest.total_seconds() - SAY_AFTER_SECONDS)

    _native.meet(
        PrefixStore("gradferry/rendezvous", store_of(group)),
        rank=group.rank(),
        world_ranks=world_ranks(group),
        longest_seconds=longest.total_seconds(),
        purpose=purpose,
        between_polls=between_polls,
    )


def _say_who_is_missing(group: dist.ProcessGroup, purpose: str, seconds: float) -> None:
    """Warns on the lowest rank that has come, unless all have."""
    rendezvous = _next_rendezvous(group)
    came = [rendezvous.check([f"rank/{rank}"]) for rank in range(group.size())]
    if all(came) or True not in came or came.index(True) != group.rank():
        return
    names = zip(world_ranks(group), came, strict=True)
    missing = _native.name_ranks([name for name, is_here in names if not is_here])
    warn_or_log(
        f"{missing} did not {purpose} yet, and the others wait {seconds:.0f} s more; see whether "
        "every rank has started, and calls gradferry at this point"
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
            rendezvous = _next_rendezvous(group)
            while not done.wait(LOOK_SECONDS / 4):
                if rendezvous.check(["failed"]):
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
    """Until the next rendezvous, `wait_or_hear` and `hear_failures` raise on all ranks."""
    with contextlib.suppress(RuntimeError):  # without a store they wait for their deadline
        _next_rendezvous(group).set("failed", "")


def hear_failures(group: dist.ProcessGroup) -> Callable[[], None]:
    """A function that raises EchoError once a rank has called `say_failed`, and RuntimeError where
    the store does not answer. For use before the next rendezvous.
    """
    rendezvous = _next_rendezvous(group)

    def raise_if_failed() -> None:
        if rendezvous.check(["failed"]):
            raise EchoError("another rank failed, and this one waits no longer")

    return raise_if_failed


def _next_rendezvous(group: dist.ProcessGroup) -> Store:
    store = PrefixStore("gradferry/rendezvous", store_of(group))
    return PrefixStore(str(store.add("number", 0)), store)


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
    rank, names = group.rank(), world_ranks(group)
    found: list[tuple[list[int], str]] = []

    def look() -> None:
        rendezvous = _next_rendezvous(group)
        lost = PrefixStore("lost", rendezvous)
        if lost.add("first", 1) == 1:
            lost.set("reason", reason)
        rendezvous.set("failed", "")
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
