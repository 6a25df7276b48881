"""Measures the collectives that hooks use on the link, by size, with both directions busy.

With two levels all columns of a node are measured at once, because they share its network card,
and so are the ranks of all nodes among themselves.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from gradferry import _native
from gradferry.core.agreement import gather_records
from gradferry.core.config import CHUNK_BYTES
from gradferry.core.device import CPU, transport_of
from gradferry.core.engine import (
    lanes_between_all,
    lanes_of_host,
    make_backends,
    make_lanes,
    share_on_node,
    siblings_of,
)
from gradferry.core.nodes import Exchange, Nodes, identity
from gradferry.errors import GradferryError, PeerError
from gradferry.forecast.costs import CollectiveCosts, Curve, LinkCosts, LocalCosts

# Payload bytes to each rank: from the last chunk of a bucket to a full one.
_EXCHANGE_BYTES = (4 << 10, 64 << 10, CHUNK_BYTES)
_LOCAL_BYTES = (64 << 10, 512 << 10, _native.MOST_DENSE_BYTES)  # likewise, between siblings
_SHARED_BYTES = 1 << 20  # to see whether siblings may share memory
# Lanes for all-to-alls and all-gathers that are in flight together.
_BETWEEN_PEERS, _BETWEEN_SIBLINGS = ("scatter", "gather"), ("local_scatter", "forward")
_REDUCE_BYTES = (64 << 10, 1 << 20, 4 << 20)  # of the tensor
_IN_FLIGHT = _native.GATHERS_IN_FLIGHT  # gloo also runs as many all-reduces at once
_BATCH = 6  # collectives between two readings of the clock
_MOST_BATCHES = 9
_LATENCY_ROUNDS = 15
_BESIDE = 8  # collectives in flight while this thread computes
_BESIDE_ROUNDS = 3
_MATRIX = 192  # size of a matrix whose product takes well under a millisecond

T = TypeVar("T")
Progress = Callable[[str], None]
InFlight = dist.Work | _native.Collective
Post = Callable[[int], Sequence[InFlight]]  # posts collectives on the buffers with that number


def on_all_ranks(
    most: Callable[[Sequence[float]], list[float]], what: str, prepare: Callable[[], T]
) -> T:
    """What `prepare` returns, which talks to no rank: no rank waits for one that fails there.
    Collective.

    Args:
        most: the elementwise maximum over all ranks. Collective.
        what: is measured.

    Raises:
        PeerError: on all ranks; one of them cannot measure it. A GradferryError of that rank is
            raised there as it is.
    """
    failure: Exception | None = None
    try:
        result = prepare()
    except Exception as error:  # any, because the others would wait
        failure = error
    (failed,) = most([1.0 if failure else 0.0])
    if isinstance(failure, GradferryError):
        raise failure
    if failure is not None:
        raise PeerError(f"this rank cannot measure {what}: {failure}") from failure
    if failed:
        raise PeerError(f"another rank cannot measure {what}; its own error says why")
    return result


class LinkProbe:
    """Measures on lanes between the ranks of a group, as engines have them. Collective."""

    def __init__(self, group: dist.ProcessGroup, exchanges: Sequence[Exchange]) -> None:
        """`exchanges`: that are measured; equal on all ranks, at most one has two levels."""
        self.transport = transport_of(CPU, group)
        self.exchanges = tuple(exchanges)
        self._group = group
        nonces = gather_records({"nonce": uuid.uuid4().hex}, group, CPU)
        self._nonce = nonce = str(nonces[0]["nonce"])
        self._asked = 0  # how often siblings tried to share memory
        # The flat ones first, so that lanes have the same numbers on ranks that have no peers.
        in_order = sorted(self.exchanges, key=lambda exchange: not exchange.is_flat)
        ranks = {
            (exchange.name, name): members
            for exchange in in_order
            for name, members in _lanes_of(exchange.nodes, dist.get_rank(group)).items()
        }
        named = {f"{exchange} {name}": members for (exchange, name), members in ranks.items()}
        lanes = dict(zip(ranks, make_lanes(group, nonce, named), strict=True))
        self._lanes = {
            exchange.name: {
                pair: _LanePair(
                    len(ranks.get((exchange.name, pair[0]), [])),
                    *(lanes.get((exchange.name, name)) for name in pair),
                )
                for pair in (_BETWEEN_PEERS, _BETWEEN_SIBLINGS)
            }
            for exchange in self.exchanges
        }
        # Any, because torch's stubs lack methods of backends.
        self._backend: Any
        (self._backend,) = make_backends(group, nonce, lanes_between_all(group, 1))
        self.world_size = dist.get_world_size(group)

    def measure(
        self, dtypes: Sequence[torch.dtype], seconds: float, emit: Progress = lambda text: None
    ) -> list[LinkCosts]:
        """Measures all costs, of every exchange. Collective; the same on all ranks.

        dtypes: for which all-reduces are measured.
        seconds: approximate time for each size; slow links take longer.
        """
        measured = []
        for exchange in self.exchanges:
            lanes, nodes = self._lanes[exchange.name], exchange.nodes
            scatter, gather = self._pair(
                lanes[_BETWEEN_PEERS], len(nodes.members), _EXCHANGE_BYTES, seconds, emit
            )
            local = None
            if not exchange.is_flat:
                largest = max(nodes.ranks_per_node)
                shares = not self.most([0.0 if self._shares_memory(nodes) else 1.0])[0]
                sizes = (_native.HEADER_BYTES,) if shares else _LOCAL_BYTES
                pair = self._pair(lanes[_BETWEEN_SIBLINGS], largest, sizes, seconds, emit)
                local = LocalCosts(*pair, shares_memory=shares)
            measured.append((scatter, gather, local))
        all_reduce = {dtype: self._all_reduce(dtype, seconds, emit) for dtype in dtypes}
        return [
            LinkCosts(scatter, gather, all_reduce, local=local)
            for scatter, gather, local in measured
        ]

    def _shares_memory(self, nodes: Nodes) -> bool:
        """Whether an engine of this rank would share memory with its siblings; alone it needs
        none. Collective among siblings.
        """
        if len(siblings_of(nodes.members, dist.get_rank(self._group))) == 1:
            return True
        nonces = f"{self._nonce}/{self._asked}"
        self._asked += 1
        memory, _ = share_on_node(_SHARED_BYTES, nodes.members, self._group, nonces)
        return memory is not None

    def _pair(
        self,
        lanes: _LanePair,
        ranks: int,
        sizes: Sequence[int],
        seconds: float,
        emit: Progress,
    ) -> tuple[CollectiveCosts, CollectiveCosts]:
        """Of an all-to-all and an all-gather that are in flight together.

        ranks: of the largest lane.
        sizes: payload bytes to each rank.
        """
        emit("latency")
        first, second = lanes.buffers(_native.HEADER_BYTES)
        scatter_s = self._latency(lambda: lanes.post_scatter(first))
        gather_s = self._latency(lambda: lanes.post_gather(second))
        exchanged = []
        for size in sizes:
            emit(f"all-to-all and all-gather, {size >> 10} kB to each of {ranks} ranks")
            buffers = [lanes.buffers(size) for _ in range(_IN_FLIGHT)]
            timed = self._batches(
                lambda slot, buffers=buffers: [  # type: ignore[misc]
                    *lanes.post_scatter(buffers[slot][0]),
                    *lanes.post_gather(buffers[slot][1]),
                ],
                seconds,
                scatter_s + gather_s,
            )
            sent = (ranks - 1) * size
            exchanged.append((float(sent), timed.seconds / 2, timed.cpu_s / 2 / max(sent, 1)))
        curve = rising([(sent, taken) for sent, taken, _ in exchanged])
        cpu = exchanged[-1][2]
        pairs = [lanes.buffers(sizes[-1])[0] for _ in range(_BESIDE)]
        beside = self._beside(lambda slot: lanes.post_scatter(pairs[slot]), curve.points[-1][1])
        scatter = CollectiveCosts(scatter_s, curve, cpu, beside)
        return scatter, replace(scatter, latency_s=gather_s)

    def _all_reduce(self, dtype: torch.dtype, seconds: float, emit: Progress) -> CollectiveCosts:
        def post(tensor: torch.Tensor) -> dist.Work:
            work: dist.Work = self._backend.allreduce([tensor])
            return work

        one = _zeros(_native.HEADER_BYTES).view(dtype)
        latency_s = self._latency(lambda: [post(one)])
        points, cpu = [], 0.0
        for size in _REDUCE_BYTES:
            emit(f"all-reduce of {size >> 10} kB of {str(dtype).removeprefix('torch.')}")
            tensors = [_zeros(size // dtype.itemsize, dtype) for _ in range(_IN_FLIGHT)]
            timed = self._batches(
                lambda slot, tensors=tensors: [post(tensors[slot])],  # type: ignore[misc]
                seconds,
                latency_s,
            )
            points.append((float(size), timed.seconds))
            cpu = timed.cpu_s / size
        curve = rising(points)
        several = [_zeros(_REDUCE_BYTES[1] // dtype.itemsize, dtype)] * _BESIDE
        several = [tensor.clone() for tensor in several]
        beside = self._beside(lambda slot: [post(several[slot])], curve.at(_REDUCE_BYTES[1]))
        return CollectiveCosts(latency_s, curve, cpu, beside)

    def _latency(self, post: Callable[[], Sequence[InFlight]]) -> float:
        times = []
        for _ in range(_LATENCY_ROUNDS):
            begin = time.perf_counter()
            for work in post():
                work.wait()
            times.append(time.perf_counter() - begin)
        # The first quartile, because even on a busy machine a quarter is undisturbed.
        return self._slowest(sorted(times)[len(times) // 4])

    def _beside(self, post: Post, alone_s: float) -> float:
        """Fraction of its speed that the link keeps while the posting threads compute.

        As in an engine, another thread waits for what was posted.
        """
        matrix = torch.ones(_MATRIX, _MATRIX, dtype=torch.float32, device="cpu")
        shares = []
        with ThreadPoolExecutor(1) as waiter:
            for _ in range(_BESIDE_ROUNDS):
                self._slowest(0.0)  # a barrier
                works = [work for slot in range(_BESIDE) for work in post(slot)]
                waiting = [waiter.submit(work.wait) for work in works]
                end = time.perf_counter() + _BESIDE * alone_s
                while time.perf_counter() < end:
                    matrix @ matrix
                done = sum(work.is_completed() for work in works) + _BESIDE - len(works)
                shares.append((done + 0.5) / (_BESIDE + 0.5))  # 0.5: one is partly done
                for each in waiting:
                    each.result()
        return -self._slowest(-median(shares))

    def _batches(self, post: Post, seconds: float, latency_s: float) -> _Timed:
        """The time from one collective to the next among many, and its processor time."""
        first = self._slowest(self._batch(post).seconds)
        count = max(2, min(_MOST_BATCHES, round(seconds / first)))
        batches = [self._batch(post) for _ in range(count)]
        whole = self._slowest(median(batch.seconds for batch in batches))
        cpu = self._slowest(median(batch.cpu_s for batch in batches))
        return _Timed(max(whole - latency_s, 0.5 * whole) / _BATCH, cpu / _BATCH)

    def _batch(self, post: Post) -> _Timed:
        self._slowest(0.0)  # a barrier
        begin, cpu = time.perf_counter(), time.process_time()
        in_flight: deque[Sequence[InFlight]] = deque()
        for number in range(_BATCH):
            if len(in_flight) == _IN_FLIGHT:
                for work in in_flight.popleft():
                    work.wait()
            in_flight.append(post(number % _IN_FLIGHT))
        for works in in_flight:
            for work in works:
                work.wait()
        return _Timed(time.perf_counter() - begin, time.process_time() - cpu)

    def _slowest(self, value: float) -> float:
        """The maximum over all ranks. Collective."""
        return float(self.most([value])[0])

    def of_first_rank(self, value: int) -> int:
        """Rank 0's value, on all ranks. Collective."""
        tensor = torch.tensor([value], dtype=torch.int64, device="cpu")
        self._backend.broadcast(tensor, 0).wait()
        return int(tensor)

    def most(self, values: Sequence[float]) -> list[float]:
        """The elementwise maximum over all ranks. Collective."""
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._backend.allreduce([tensor], dist.ReduceOp.MAX).wait()
        result: list[float] = tensor.tolist()
        return result


def _zeros(num_elements: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(num_elements, dtype=dtype, device="cpu")


_Pair = tuple[torch.Tensor, torch.Tensor]  # send, receive


def _lanes_of(nodes: Nodes, rank: int) -> dict[str, list[int]]:
    """Those of an engine's lanes that carry chunks."""
    lanes = lanes_of_host(nodes.members, rank, checks=False)
    carry = (*_BETWEEN_PEERS, *_BETWEEN_SIBLINGS)
    return {name: ranks for name, ranks in lanes.items() if name in carry}


@dataclass(frozen=True)
class _LanePair:
    """For all-to-alls and for all-gathers; None: this rank has no part, and posts nothing."""

    num_ranks: int  # of each
    scatter: _native.Lane | None
    gather: _native.Lane | None

    def buffers(self, size: int) -> tuple[_Pair, _Pair]:
        """For a collective of each kind, with so many bytes to each rank."""
        every = size * self.num_ranks
        return (_zeros(every), _zeros(every)), (_zeros(size), _zeros(every))

    def post_scatter(self, pair: _Pair) -> list[_native.Collective]:
        if self.scatter is None:
            return []
        sizes = [pair[1].numel() // self.num_ranks] * self.num_ranks
        return [self.scatter.all_to_all(pair[1], sizes, pair[0], sizes)]

    def post_gather(self, pair: _Pair) -> list[_native.Collective]:
        return [] if self.gather is None else [self.gather.all_gather(pair[1], pair[0])]


class _Timed(NamedTuple):
    seconds: float
    cpu_s: float


def rising(points: Sequence[tuple[float, float]]) -> Curve:
    """A curve in which more bytes never take less time, whatever the noise."""
    longest = 0.0
    rising = []
    for num_bytes, seconds in points:
        longest = max(longest, seconds)
        rising.append((num_bytes, longest))
    return Curve(tuple(rising))


def spare_cores(group: dist.ProcessGroup) -> float:
    """Processors per rank on this machine, minus those that compute gradients. Collective."""
    here = {"machine": identity().boot_id}
    share = len(os.sched_getaffinity(0)) / gather_records(here, group, CPU).count(here)
    return max(0.0, share - torch.get_num_threads())
