"""Memory that the ranks of a node share: who gets it, what is refused, what is left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import socket
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from mixed import mapped_bytes
from on_ranks import on_ranks
from torch._C._distributed_c10d import PrefixStore

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


def share(purpose: str, seconds: float = 10) -> tuple[Any, str]:
    from gradferry.core.node_memory import share_memory

    store = PrefixStore(f"memory/{purpose}", dist.distributed_c10d._get_default_store())
    siblings = range(dist.get_world_size())
    return share_memory(store, dist.get_rank(), siblings, NUM_BYTES, seconds)


# --- who gets it


@on_ranks(3)
def test_siblings_see_what_each_of_them_writes_and_keep_no_file() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    before = held()
    memory, refusal = share("shared")
    assert not refusal
    assert more_than(before) == {"mapped bytes": NUM_BYTES}
    part = NUM_BYTES // world_size
    memory.part(rank * part, part).fill_(rank + 1)
    dist.barrier()
    assert [int(memory.part(each * part, part).unique()) for each in range(3)] == [1, 2, 3]
    dist.barrier()
    del memory
    assert not more_than(before)


@on_ranks(2)
def test_fork_does_not_hold_the_memory() -> None:
    memory, _ = share("forked")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(mapped_bytes()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert int(pipe.read()) == 0
    del memory


# --- what is refused


@contextlib.contextmanager
def going_wrong(what: str) -> Iterator[None]:
    """Has the kernel, or what stands for it, refuse something to this process. What other memory
    than was agreed on is refused, test_shared_memory.py says.
    """
    import gradferry
    from gradferry.core import node_memory

    failure = OSError(errno.EPERM, os.strerror(errno.EPERM))
    with contextlib.ExitStack() as patches:
        if what == "fallocate":
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_BYTES - 1, before[1]))
            patches.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        elif what == "mmap":
            refusal = gradferry.PeerError("mmap: Cannot allocate memory")
            broken = mock.Mock(side_effect=refusal)
            patches.enter_context(mock.patch.object(node_memory._native, "SharedMemory", broken))
        else:
            owner = {"memfd_create": node_memory.os, "socket": node_memory.socket}[what]
            patches.enter_context(mock.patch.object(owner, what, side_effect=failure))
        yield


@pytest.mark.parametrize(
    ("rank", "what", "refused", "refusal"),
    [
        (0, "memfd_create", 0, "memfd_create: Operation not permitted"),
        (0, "fallocate", 0, "fallocate of 12288 bytes: File too large"),
        (0, "socket", 0, "unix socket: Operation not permitted"),
        (2, "socket", 2, "unix socket: Operation not permitted"),
        (0, "mmap", 0, "mmap: Cannot allocate memory"),
        (1, "mmap", 1, "mmap: Cannot allocate memory"),
    ],
)
@on_ranks(3)
def test_what_one_rank_is_refused_none_of_the_node_has(
    rank: int, what: str, refused: int, refusal: str
) -> None:
    before = held()
    with going_wrong(what) if dist.get_rank() == rank else contextlib.nullcontext():
        memory, said = share(f"refused {rank} {what}")
    gc.collect()  # the exception of the mock holds frames
    assert memory is None
    assert said == f"rank {refused}: {refusal}"
    assert not more_than(before)


@pytest.mark.parametrize("only", [False, True])
@on_ranks(2)
def test_what_comes_without_the_secret_is_dropped(only: bool) -> None:
    """Before the memory, or instead of it, other memory comes from a process without it."""
    from gradferry.core import node_memory

    send = node_memory._send
    before = held()

    def after_strangers(descriptor: int, doors: dict[int, dict[str, str]]) -> None:
        place = f"\0{doors[1]['name']}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for said, descriptors in ((b"x" * 16, [descriptor] * 2), (b"", []), (b"y", [0])):
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
                sender.sendmsg([said], rights, 0, place)
            if only:
                sender.sendmsg([bytes.fromhex(doors[1]["secret"])], [], 0, place)
        if not only:
            send(descriptor, doors)

    with mock.patch.object(node_memory, "_send", after_strangers):
        memory, refusal = share(f"strangers {only}")
    assert (memory is None) == only
    assert refusal == ("rank 1: the descriptor did not come through" if only else "")
    del memory
    assert not more_than(before)


@on_ranks(3)
def test_sibling_that_does_not_come_is_named() -> None:
    """Rank 2 waits for rank 0, which waits for rank 1 itself."""
    if dist.get_rank() != 1:
        before = held()
        with pytest.raises(TimeoutError, match=f"^rank {int(dist.get_rank() == 0)} timed out$"):
            share("absent", seconds=0.2)
        assert not more_than(before)
    dist.barrier()
