"""Lanes on sockets: who waits for what, in which order."""

from __future__ import annotations

import ctypes
import datetime
import json
import multiprocessing
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import COLLECTIVE_SECONDS

# More than a socket holds: the kernel keeps some MB of what nobody has read.
LARGE = 16 << 20
# Of unshare(2).
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


def make_lanes(purpose: str, number: int = 2) -> list[Any]:
    from gradferry.core import engine

    group = dist.group.WORLD
    ranks = list(range(group.size()))
    return engine.make_lanes(group, purpose, {str(each): ranks for each in range(number)})


def exchange(lane: Any, size: int) -> tuple[Any, torch.Tensor]:
    """Posts an all-gather in which rank r sends `size` bytes of value r + 1."""
    rank = dist.get_rank()
    received = torch.zeros(size * dist.get_world_size(), dtype=torch.uint8)
    own = received[rank * size : (rank + 1) * size].fill_(rank + 1)
    return lane.all_gather(received, own), received


def came(received: torch.Tensor) -> bool:
    parts = received.chunk(dist.get_world_size())
    return all(bool((part == rank + 1).all()) for rank, part in enumerate(parts))


@on_ranks(2)
def test_ranks_may_wait_for_lanes_in_different_order() -> None:
    """Rank 0 posts on the second lane only when the first is done; rank 1 waits for the second: a
    rank that read only the lane it waits for would keep the other one from sending.
    """
    first, second = make_lanes("other order")
    one, one_received = exchange(first, LARGE)
    if dist.get_rank() == 0:
        one.wait()
        two, two_received = exchange(second, LARGE)
    else:
        two, two_received = exchange(second, LARGE)
        two.wait()
        one.wait()
    two.wait()
    assert came(one_received)
    assert came(two_received)


@on_ranks(3)
def test_any_threads_may_wait_in_any_order() -> None:
    lanes = make_lanes("many waiters", 3)
    with ThreadPoolExecutor(6) as pool:
        for size in (1, 1000, 1 << 20):
            posted = [exchange(lane, size) for lane in lanes for _ in range(4)]
            for done in [pool.submit(work.wait) for work, _ in reversed(posted)]:
                done.result()
            assert all(came(received) for _, received in posted)


@on_ranks(2)
def test_what_is_posted_while_a_thread_waits_is_served() -> None:
    first, second = make_lanes("post while waiting")
    one, one_received = exchange(first, LARGE)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.wait)
        two, two_received = exchange(second, LARGE)
        two.wait()
        waiting.result()
    assert came(one_received)
    assert came(two_received)


@on_ranks(2)
def test_parts_without_bytes_are_done_at_once() -> None:
    """In some directions and in all."""
    (lane,) = make_lanes("nothing", 1)
    rank = dist.get_rank()
    empty = torch.zeros(0, dtype=torch.uint8)
    lane.all_gather(empty, empty).wait()
    # Only rank 0 sends: 5 bytes to rank 1.
    send = torch.full((5,), 7, dtype=torch.uint8) if rank == 0 else empty
    receive = torch.zeros(5 if rank == 1 else 0, dtype=torch.uint8)
    lane.all_to_all(receive, [5 * (rank == 1), 0], send, [0, 5 * (rank == 0)]).wait()
    assert rank == 0 or bool((receive == 7).all())


def gradients_over(address: str, port: int, rank: int) -> list[list[float]]:
    import gradferry

    limit = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
    store = dist.TCPStore(address, port, 2, is_master=rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    ddp = DistributedDataParallel(nn.Linear(40, 40, bias=False))
    gradferry.attach(ddp, "exact", nodes="flat")
    gradients = []
    for step in range(2):
        ddp.zero_grad()
        ddp(torch.full((1, 40), float(step + rank))).sum().backward()
        gradients.append(ddp.module.weight.grad.unique().tolist())
    dist.barrier()
    dist.destroy_process_group()
    return gradients


def two_ranks_of_a_host(folder: str) -> None:
    """Of one whose name leads nowhere, and that then has no address but ::1."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS | CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname("no.such.host.invalid")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    torch.set_num_threads(1)
    reading, writing = os.pipe()
    child = os.fork()
    rank = int(child == 0)
    del os.environ["GLOO_SOCKET_IFNAME"]
    gradients = [gradients_over("127.0.0.1", 4000, rank)]
    if rank == 0:
        subprocess.run(["ip", "address", "del", "127.0.0.1/8", "dev", "lo"], check=True)
        os.write(writing, b"x")
    else:
        os.read(reading, 1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gradients.append(gradients_over("::1", 4001, rank))
    Path(folder, str(rank)).write_text(json.dumps(gradients))
    if rank == 1:
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.usefixtures("namespaces_allowed")
def test_ranks_train_without_a_name_of_their_host_and_over_ipv6_alone(tmp_path: Path) -> None:
    # From the server that has imported torch, like the ranks of a World.
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=two_ranks_of_a_host, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == 0
    for rank in range(2):
        # Means of 0 and 1, and of 1 and 2.
        assert json.loads((tmp_path / str(rank)).read_text()) == [[[0.5], [1.5]]] * 2
