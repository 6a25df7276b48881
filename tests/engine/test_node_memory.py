"""Memory that the ranks of a node share: who gets it, what is refused, what is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import resource
import socket
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from mixed import local_stage, mapped_bytes, scenario_on
from scenario import Run, Scenario, assert_bit_equal, trained
from torch._C._distributed_c10d import PrefixStore
from world import World

Worlds = Callable[[int], World]

NUM_BYTES = 3 * 4096


def held() -> Counter[str]:
    """Open files, and bytes of shared memory."""
    what = Counter({"mapped bytes": mapped_bytes()})
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            what[str(each.readlink())] += 1
    return what


def more_than(before: Counter[str]) -> Counter[str]:
    """What came since then. What went is left out: it can be from an earlier test, as gloo closes
    connections and Python frees memory in their own time.
    """
    return held() - before


def share(purpose: str, num_bytes: int = NUM_BYTES, seconds: float = 10) -> tuple[Any, str]:
    from gradferry.core.node_memory import share_memory

    store = PrefixStore(f"memory/{purpose}", dist.distributed_c10d._get_default_store())
    siblings = range(dist.get_world_size())
    return share_memory(store, dist.get_rank(), siblings, num_bytes, seconds)


# --- who gets it


def case_shared() -> tuple[bool, bool, bool]:
    """Every rank writes its part, and sees what the others wrote."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    before = held()
    memory, refusal = share("shared")
    mapped = more_than(before)
    part = NUM_BYTES // world_size
    memory.part(rank * part, part).fill_(rank + 1)
    dist.barrier()
    seen = [int(memory.part(each * part, part).unique()) for each in range(world_size)]
    dist.barrier()
    del memory
    only_mapped = mapped == {"mapped bytes": NUM_BYTES}
    return only_mapped and not refusal, seen == [1, 2, 3], not more_than(before)


def test_siblings_see_what_each_of_them_writes_and_keep_no_file(world_of_3: World) -> None:
    assert world_of_3.run(case_shared) == [(True, True, True)] * 3


def case_forked() -> int:
    memory, _ = share("forked")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(mapped_bytes()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        inherited = int(pipe.read())
    del memory
    return inherited


def test_fork_does_not_hold_the_memory(world_of_2: World) -> None:
    assert world_of_2.run(case_forked) == [0, 0]


# --- what is refused


@contextlib.contextmanager
def going_wrong(what: str) -> Iterator[None]:
    """Has the kernel, or what stands for it, refuse something to this process; or has it give other
    memory than was agreed on.
    """
    import gradferry
    from gradferry.core import node_memory

    make, failure = node_memory._make, OSError(errno.EPERM, os.strerror(errno.EPERM))

    def other(num_bytes: int) -> int:
        if what == "a file":
            with tempfile.TemporaryFile() as file:
                file.truncate(num_bytes)
                return os.dup(file.fileno())
        if what == "unsealed":
            descriptor = os.memfd_create("gradferry", os.MFD_ALLOW_SEALING)
            os.truncate(descriptor, num_bytes)
            return descriptor
        return make({"shorter": num_bytes - 4096, "longer": num_bytes + 1}[what])

    with contextlib.ExitStack() as patches:
        if what == "fallocate":
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_BYTES - 1, before[1]))
            patches.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        elif what == "mmap":
            refusal = gradferry.PeerError("mmap: Cannot allocate memory")
            broken = mock.Mock(side_effect=refusal)
            patches.enter_context(mock.patch.object(node_memory._native, "SharedMemory", broken))
        elif what in ("memfd_create", "socket"):
            owner = {"memfd_create": node_memory.os, "socket": node_memory.socket}[what]
            patches.enter_context(mock.patch.object(owner, what, side_effect=failure))
        else:
            patches.enter_context(mock.patch.object(node_memory, "_make", other))
            patches.enter_context(mock.patch.object(node_memory, "_map"))
        yield


def case_refused(rank: int, what: str) -> tuple[bool, str, bool]:
    before = held()
    with going_wrong(what) if dist.get_rank() == rank else contextlib.nullcontext():
        memory, refusal = share(f"refused {rank} {what}")
    gc.collect()  # the exception of the mock holds frames
    return memory is None, refusal, not more_than(before)


UNSEALED = "the size of the shared memory is not sealed: its seals are 0, of which 6 are needed"


@pytest.mark.parametrize(
    ("rank", "what", "refused", "refusal"),
    [
        (0, "memfd_create", 0, "memfd_create: Operation not permitted"),
        (0, "fallocate", 0, "fallocate of 12288 bytes: File too large"),
        (0, "socket", 0, "unix socket: Operation not permitted"),
        (2, "socket", 2, "unix socket: Operation not permitted"),
        (0, "mmap", 0, "mmap: Cannot allocate memory"),
        (1, "mmap", 1, "mmap: Cannot allocate memory"),
        # Rank 0 gives memory that is not what was agreed on: nobody touches it.
        (0, "a file", 1, "the shared memory is no memfd; F_GET_SEALS: Invalid argument"),
        (0, "unsealed", 1, UNSEALED),
        (0, "shorter", 1, "the shared memory has 8192 bytes, expected 12288"),
        (0, "longer", 1, "the shared memory has 12289 bytes, expected 12288"),
    ],
)
def test_what_one_rank_is_refused_none_of_the_node_has(
    world_of_3: World, rank: int, what: str, refused: int, refusal: str
) -> None:
    answers = world_of_3.run(case_refused, rank=rank, what=what)
    assert answers == [(True, f"rank {refused}: {refusal}", True)] * 3


def case_strangers(only: bool) -> tuple[bool, str, bool]:
    """Before the memory, or instead of it, other memory comes from a process without the secret."""
    from gradferry.core import node_memory

    send = node_memory._send
    before = held()

    def after_strangers(descriptor: int, doors: dict[int, dict[str, str]]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for said, descriptors in (
                (b"x" * 16, [descriptor] * 2),
                (b"", []),
                (b"y", [0]),
            ):
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
                sender.sendmsg([said], rights, 0, f"\0{doors[1]['name']}")
            if only:
                sender.sendmsg([bytes.fromhex(doors[1]["secret"])], [], 0, f"\0{doors[1]['name']}")
        if not only:
            send(descriptor, doors)

    with mock.patch.object(node_memory, "_send", after_strangers):
        memory, refusal = share(f"strangers {only}")
    refused = memory is None
    del memory
    return refused, refusal, not more_than(before)


@pytest.mark.parametrize("only", [False, True])
def test_what_comes_without_the_secret_is_dropped(world_of_2: World, only: bool) -> None:
    refusal = "rank 1: the descriptor did not come through" if only else ""
    assert world_of_2.run(case_strangers, only=only) == [(only, refusal, True)] * 2


def case_absent() -> str:
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    before = held()
    with pytest.raises(TimeoutError) as caught:
        share("absent", seconds=0.2)
    assert not more_than(before)
    dist.barrier()
    return str(caught.value)


def test_sibling_that_does_not_come_is_named(world_of_3: World) -> None:
    first, _, third = world_of_3.run(case_absent)
    assert first == "rank 1 timed out"
    assert third == "rank 0 timed out"  # which waits for rank 1 itself


# --- training through it


def case_train(scenario: Scenario, refused: bool) -> dict[str, Any]:
    from gradferry.core import node_memory
    from gradferry.ddp.state import bound_to

    failure = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    refusing = mock.patch.object(node_memory.os, "memfd_create", side_effect=failure)
    with refusing if refused else contextlib.nullcontext():
        run = Run(scenario)
    slots = bound_to(run.state).running.engine.workspace()["slots"]
    return {**trained(run), "stage": [local_stage(run), slots, mapped_bytes()]}


@pytest.mark.parametrize("nodes", ["2x2", "2+1"])
def test_bits_through_sockets_are_those_through_memory(worlds: Worlds, nodes: str) -> None:
    scenario = scenario_on(nodes, error_feedback="both", ddp={"bucket_cap_mb": 0.05})
    world = worlds(scenario.world_size)
    counts = []
    for refused in (False, True):
        answers = world.run(case_train, scenario=scenario, refused=refused)
        assert_bit_equal(answers, scenario)
        why = "sockets (rank {}: memfd_create: Function not implemented)"
        for rank, answer in enumerate(answers):
            stage, _, mapped = answer["stage"]
            members = next(each for each in scenario.nodes if rank in each)
            alone = len(members) == 1
            told = why.format(members[0]) if refused else "shared memory"
            assert stage == ("" if alone else told)
            assert (mapped > 0) == (not alone and not refused)
        counts.append([answer["stats"]["wire_bytes"] for answer in answers])
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("nodes", "cap_mb", "slots"), [("2x2", 0.35, 2), ("2+1", 0.25, 1)])
def test_memory_keeps_within_the_limit_and_slots_are_used_in_turn(
    worlds: Worlds, nodes: str, cap_mb: float, slots: int
) -> None:
    # So many chunks that each slot is used again and again while siblings are in others.
    options = {"workspace_cap_mb": cap_mb}
    changes = {"error_feedback": "both", "ddp": {"bucket_cap_mb": 0.01}, "options": options}
    scenario = scenario_on(nodes, steps=6, **changes)
    answers = worlds(scenario.world_size).run(case_train, scenario=scenario, refused=False)
    assert_bit_equal(answers, scenario)
    for rank, answer in enumerate(answers):
        siblings = next(len(each) for each in scenario.nodes if rank in each)
        _, used, mapped = answer["stage"]
        if siblings > 1:
            assert used == slots
            assert 0 < mapped <= siblings * cap_mb * 2**20


def case_left_behind() -> tuple[int, bool]:
    """Attaches, trains, lets go."""
    before = held()
    scenario = dataclasses.replace(scenario_on("2x2"), steps=1)
    run = Run(scenario)
    run.step(0)
    mapped = mapped_bytes()
    del run
    dist.barrier()
    deadline = time.monotonic() + 60
    while more_than(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return mapped, not more_than(before)


def test_nothing_is_left_behind(worlds: Worlds) -> None:
    for mapped, nothing_left in worlds(4).run(case_left_behind):
        assert mapped > 0
        assert nothing_left
