"""Memory that the ranks of a node share: who gets it, what is refused, what is left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch.distributed as dist
from mixed import mapped_bytes
from on_ranks import of_all, on_ranks
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


def store_for(purpose: str) -> PrefixStore:
    return PrefixStore(f"memory/{purpose}", dist.distributed_c10d._get_default_store())


def share(purpose: str, seconds: float = 10) -> tuple[Any, str]:
    from gradferry.core.node_memory import share_memory

    siblings = range(dist.get_world_size())
    return share_memory(store_for(purpose), dist.get_rank(), siblings, NUM_BYTES, seconds)


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


@on_ranks(3)
def test_the_first_rank_keeps_it_open_for_the_last() -> None:
    """Rank 2 opens it only when the first rank has said how it fares."""
    from gradferry.core import node_memory

    opens = node_memory._open

    def late(*place: str) -> int:
        store_for("late").wait(["outcome/0"])
        return opens(*place)

    with mock.patch.object(node_memory, "_open", late if dist.get_rank() == 2 else opens):
        memory, refusal = share("late")
    assert memory is not None, refusal


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
            patches.enter_context(mock.patch.object(node_memory.os, what, side_effect=failure))
        yield


@pytest.mark.parametrize(
    ("rank", "what", "refusal"),
    [
        (0, "memfd_create", "memfd_create: Operation not permitted"),
        (0, "fallocate", "fallocate of 12288 bytes: File too large"),
        (2, "open", r"opening /proc/\d+/fd/\d+: Operation not permitted"),
        (0, "mmap", "mmap: Cannot allocate memory"),
        (1, "mmap", "mmap: Cannot allocate memory"),
    ],
)
@on_ranks(3)
def test_what_one_rank_is_refused_none_of_the_node_has(rank: int, what: str, refusal: str) -> None:
    before = held()
    with going_wrong(what) if dist.get_rank() == rank else contextlib.nullcontext():
        memory, said = share(f"refused {rank} {what}")
    gc.collect()  # the exception of the mock holds frames
    assert memory is None
    assert re.fullmatch(f"rank {rank}: {refusal}", said)
    assert not more_than(before)


@on_ranks(2)
def test_what_another_process_has_there_is_not_opened() -> None:
    """As where ranks number processes otherwise: this rank finds a file of its own."""
    from gradferry.core import node_memory

    pids = of_all(os.getpid())
    before = held()
    with mock.patch.object(node_memory.os, "getpid", return_value=pids[1]):
        memory, refusal = share("of another process")
    assert memory is None
    # Another file, or none where rank 1 has fewer open.
    assert re.match(rf"rank 1: (opening )?/proc/{pids[1]}/fd/\d+", refusal), refusal
    assert not more_than(before)
    reading, writing = os.pipe()
    path = f"/proc/{os.getpid()}/fd/{reading}"
    with pytest.raises(gradferry.PeerError, match=f"^{path} is pipe:.*, for the first rank it is"):
        node_memory._open(os.getpid(), reading, "gradferry-0")
    os.close(reading)
    os.close(writing)
    assert not more_than(before)


@on_ranks(3)
def test_sibling_that_does_not_come_is_named() -> None:
    if dist.get_rank() != 1:
        before = held()
        with pytest.raises(TimeoutError, match=r"^rank 1 timed out$"):
            share("absent", seconds=0.2)
        assert not more_than(before)
    dist.barrier()
