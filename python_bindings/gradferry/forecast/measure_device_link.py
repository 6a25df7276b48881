"""Measures the collectives that hooks use between devices, as an engine posts them: through the
group of the model, and where nodes have several ranks on lanes of its own.

With two levels all columns of a node are measured at once, because they share its network card,
and so are the ranks of all nodes among themselves.

NCCL runs one collective after another on a stream, so each is timed among several of its kind, by
events of the device. Where the group's backend is gloo, bytes pass through host memory and the host
waits; what is timed there, by its clock, is a copy, the collective, and a copy back, as the engine
makes them.

All memory is allocated before the first collective that is timed. A rank that has none left says so
there, where the others ask; in a collective they would wait for it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from gradferry import _native
from gradferry.core.agreement import gather_records, meeting_place, most_of_ranks
from gradferry.core.device import STREAM_CHUNK_BYTES, Transport
from gradferry.core.engine import lanes_of_device, make_lanes_of_device
from gradferry.core.nodes import Exchange, Nodes
from gradferry.forecast.clock import Clock, HostClock, clock_of
from gradferry.forecast.costs import CollectiveCosts, Engine, LinkCosts, LocalCosts
from gradferry.forecast.measure_link import InFlight, Progress, on_all_ranks, rising

_EXCHANGE_BYTES = (64 << 10, 512 << 10, STREAM_CHUNK_BYTES)  # to each rank, as far as they fit
_LOCAL_BYTES = (64 << 10, 512 << 10, _native.MOST_DENSE_BYTES)  # likewise, between siblings
_MOST_BYTES = 32 << 20  # that a rank sends, or receives, in one exchange
_REDUCE_BYTES = (64 << 10, 1 << 20, 16 << 20)  # of the tensor
_MOST_IN_BATCH = 6  # collectives between two readings of the clock
_MOST_BATCHES = 9

Post = Callable[[], None]  # the collective is enqueued when it returns


class _GroupLane:
    """As a `Lane` between all ranks, of the group itself."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_to_all(
        self, receive: torch.Tensor, _receive_bytes: object, send: torch.Tensor, _bytes: object
    ) -> dist.Work | None:
        """Of equal parts. None: it runs on the current stream."""
        return dist.all_to_all_single(receive, send, group=self._group, async_op=True)

    def all_gather(self, receive: torch.Tensor, send: torch.Tensor) -> dist.Work | None:
        """None: it runs on the current stream."""
        return dist.all_gather_into_tensor(receive, send, group=self._group, async_op=True)


@dataclass(frozen=True)
class _Among:
    """Ranks that exchange with each other.

    Attributes:
        lane: None: this rank has no part, and posts nothing.
        num_ranks: of this lane.
        largest: of the lanes of all ranks that are measured at once.
        sizes: bytes to each rank, rising; equal on all ranks.
    """

    lane: _native.Lane | _GroupLane | None
    num_ranks: int
    largest: int
    sizes: tuple[int, ...]


class DeviceLinkProbe:
    """As `LinkProbe`, for gradients on a device. Collective."""

    def __init__(
        self, group: dist.ProcessGroup, transport: Transport, exchanges: Sequence[Exchange]
    ) -> None:
        """`exchanges`: that are measured; equal on all ranks, at most one has two levels."""
        self.transport = transport
        self.exchanges = tuple(exchanges)
        self._group = group
        self._place = transport.device
        self._clock = clock_of(self._place)
        self._meeting = meeting_place(group, self._place)
        self._engine = Engine.STREAMS if transport.streams else Engine.STAGED
        self._link_clock: Clock = self._clock if transport.streams else HostClock()
        self._ranks: dict[str, list[int]] = {}  # of the engines' lanes
        for exchange in self.exchanges:
            members, rank = exchange.nodes.members, dist.get_rank(group)
            self._ranks |= lanes_of_device(members, rank, transport.streams)
        nonces = gather_records({"nonce": uuid.uuid4().hex}, group, self._meeting)
        nonce = str(nonces[0]["nonce"])
        self._lanes = make_lanes_of_device(group, nonce, self._ranks, transport)

    def measure(
        self, dtypes: Sequence[torch.dtype], seconds: float, emit: Progress = lambda text: None
    ) -> list[LinkCosts]:
        """Measures all costs, of every exchange. Collective; the result is the same on all ranks.

        dtypes: for which all-reduces are measured.
        seconds: approximate time for each size.

        Raises:
            PeerError: on all ranks; one of them has no memory left.
        """
        stages = [self._stages(exchange.nodes) for exchange in self.exchanges]
        exchanged = max(each.largest * max(each.sizes) for among in stages for each in among)
        on_all_ranks(self.most, "the link", lambda: self._allocate(exchanged))
        measured = []
        for peers, *siblings in stages:
            between = self._pair(peers, seconds, emit)
            local = [LocalCosts(*self._pair(each, seconds, emit)) for each in siblings]
            measured.append((between, local[0] if local else None))
        all_reduce = {dtype: self._all_reduce(dtype, seconds, emit) for dtype in dtypes}
        return [
            LinkCosts(*between, all_reduce, engine=self._engine, local=local)
            for between, local in measured
        ]

    def _stages(self, nodes: Nodes) -> list[_Among]:
        """Who exchange with each other: peers and, where nodes have several ranks, siblings."""
        if nodes.is_flat:
            lane = self._lanes.get("staged") or _GroupLane(self._group)
            return [_among(lane, nodes.world_size, nodes.world_size, _EXCHANGE_BYTES)]
        largest = {"peers": len(nodes.members), "siblings": max(nodes.ranks_per_node)}
        wanted = {"peers": _EXCHANGE_BYTES, "siblings": _LOCAL_BYTES}
        return [
            _among(
                self._lanes.get(name), len(self._ranks.get(name, [])), largest[name], wanted[name]
            )
            for name in largest
        ]

    def _allocate(self, exchanged_bytes: int) -> None:
        """Everything that collectives of so many bytes, and of _REDUCE_BYTES, need."""
        self._sent = self._zeros(max(exchanged_bytes, *_REDUCE_BYTES))
        self._received = self._zeros(exchanged_bytes)
        self._aligning = torch.zeros(1, dtype=torch.float32, device=self._place)
        if self._engine is Engine.STAGED:
            self._host_sent, self._host_received = (
                torch.zeros(exchanged_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                for _ in range(2)
            )

    def _pair(
        self, among: _Among, seconds: float, emit: Progress
    ) -> tuple[CollectiveCosts, CollectiveCosts]:
        """Of all-to-alls, and of all-gathers."""
        scatter, gather = [], []
        for size in among.sizes:
            emit(f"all-to-all and all-gather, {size >> 10} kB to each of {among.largest} ranks")
            sent = float((among.largest - 1) * size)
            scatter.append((sent, self._batches(seconds, partial(self._scatter, among, size))))
            gather.append((sent, self._batches(seconds, partial(self._gather, among, size))))
        return _in_line(scatter), _in_line(gather)

    def _all_reduce(self, dtype: torch.dtype, seconds: float, emit: Progress) -> CollectiveCosts:
        points = []
        for size in (dtype.itemsize, *_REDUCE_BYTES):
            emit(f"all-reduce of {size >> 10} kB of {str(dtype).removeprefix('torch.')}")
            tensor = self._sent[:size].view(dtype)
            points.append((float(size), self._batches(seconds, partial(self._reduce, tensor))))
        return _in_line(points)

    def _batches(self, seconds: float, post: Post) -> float:
        """Typical seconds from one collective to the next."""
        self._batch(post, 1)  # the first of its kind connects the ranks
        # Equal on all ranks, and so is what follows from it.
        single = self._batch(post, 1)
        wanted = seconds / single if single > 0 else _MOST_IN_BATCH * _MOST_BATCHES
        in_batch = max(1, min(_MOST_IN_BATCH, round(wanted / _MOST_BATCHES)))
        count = max(1, min(_MOST_BATCHES, round(wanted / in_batch)))
        return median(self._batch(post, in_batch) for _ in range(count))

    def _batch(self, post: Post, count: int) -> float:
        """The same of `count` in a row, on the slowest rank."""
        self.most([0.0])
        self._clock.head_start()
        self._reduce(self._aligning)  # no rank's clock runs before all ranks have come
        self._wait_if_staged()
        begin = self._link_clock.mark()
        for _ in range(count):
            post()
        self._wait_if_staged()
        end = self._link_clock.mark()
        return self.most([self._link_clock.seconds(begin, end) / count])[0]

    def _wait_if_staged(self) -> None:
        if self._engine is Engine.STAGED:
            self._clock.wait()

    def _scatter(self, among: _Among, size: int) -> None:
        lane = among.lane
        if lane is None:
            return
        sizes = [size] * among.num_ranks
        self._exchange(
            lambda receive, send: lane.all_to_all(receive, sizes, send, sizes),
            sum(sizes),
            sum(sizes),
        )

    def _gather(self, among: _Among, size: int) -> None:
        if among.lane is not None:
            self._exchange(among.lane.all_gather, among.num_ranks * size, size)

    def _exchange(
        self,
        post: Callable[[torch.Tensor, torch.Tensor], InFlight | None],
        received_bytes: int,
        sent_bytes: int,
    ) -> None:
        """Calls post(received, sent), and has the current stream wait; staged, the host."""
        received, sent = self._received[:received_bytes], self._sent[:sent_bytes]
        if self._engine is Engine.STREAMS:
            _wait(post(received, sent))
            return
        arrived, copy = self._host_received[:received_bytes], self._host_sent[:sent_bytes]
        copy.copy_(sent, non_blocking=True)
        self._clock.wait()
        _wait(post(arrived, copy))
        received.copy_(arrived, non_blocking=True)

    def _reduce(self, tensor: torch.Tensor) -> None:
        _wait(dist.all_reduce(tensor, group=self._group, async_op=True))

    def _zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._place)

    def of_first_rank(self, value: int) -> int:
        """Rank 0's value, on all ranks. Collective."""
        mine = value if dist.get_rank(self._group) == 0 else 0
        return int(self.most([float(mine)])[0])

    def most(self, values: Sequence[float]) -> list[float]:
        """The elementwise maximum over all ranks. Collective."""
        return most_of_ranks(values, self._group, self._meeting)


def _wait(work: InFlight | None) -> None:
    """Has the current stream wait, on a device not the host. None: it runs on that stream."""
    if work is not None:
        work.wait()


def _among(
    lane: _native.Lane | _GroupLane | None, num_ranks: int, largest: int, wanted: Sequence[int]
) -> _Among:
    """`wanted`: sizes, as far as they fit."""
    least = _native.HEADER_BYTES
    fitting = [min(size, _MOST_BYTES // largest) for size in wanted]
    # A rank that is alone sends nothing, whatever the size.
    sizes = {least, *(size for size in fitting if size > least and largest > 1)}
    return _Among(lane, num_ranks, largest, tuple(sorted(sizes)))


def _in_line(points: Sequence[tuple[float, float]]) -> CollectiveCosts:
    """Of points by bytes, the smallest collective first."""
    return CollectiveCosts(points[0][1], rising(points), in_line=True)
