"""Measures the collectives that hooks use between devices, through the group of the model.

NCCL runs one collective after another on a stream, so each is timed among several of its kind, by
events of the device. Where the group's backend is gloo, bytes pass through host memory and the host
waits; what is timed there, by its clock, is a copy, the collective, and a copy back, as the engine
makes them.

All memory is allocated before the first collective. A rank that has none left says so there, where
the others ask; in a collective they would wait for it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from gradferry import _native
from gradferry.core.agreement import gather_records, meeting_place, most_of_ranks
from gradferry.core.device import STREAM_CHUNK_BYTES, Transport
from gradferry.core.engine import lanes_between_all, make_lanes
from gradferry.core.nodes import Exchange
from gradferry.forecast.clock import Clock, HostClock, clock_of
from gradferry.forecast.costs import CollectiveCosts, Engine, LinkCosts
from gradferry.forecast.measure_link import Progress, on_all_ranks, rising

_EXCHANGE_BYTES = (64 << 10, 512 << 10, STREAM_CHUNK_BYTES)  # to each rank, as far as they fit
_MOST_BYTES = 32 << 20  # that a rank sends, or receives, in one exchange
_REDUCE_BYTES = (64 << 10, 1 << 20, 16 << 20)  # of the tensor
_MOST_IN_BATCH = 6  # collectives between two readings of the clock
_MOST_BATCHES = 9

Post = Callable[..., None]  # of tensors on the device; the collective is enqueued when it returns


class DeviceLinkProbe:
    """As `LinkProbe`, for gradients on a device. Collective."""

    def __init__(
        self, group: dist.ProcessGroup, transport: Transport, exchanges: Sequence[Exchange]
    ) -> None:
        """`exchanges`: that are measured; only the flat one."""
        self.transport = transport
        self.exchanges = tuple(exchanges)
        self.world_size = dist.get_world_size(group)
        self._group = group
        self._place = transport.device
        self._clock = clock_of(self._place)
        self._meeting = meeting_place(group, self._place)
        self._engine = Engine.STREAMS if transport.streams else Engine.STAGED
        self._link_clock: Clock = self._clock if transport.streams else HostClock()
        self._scatter: Post = self._all_to_all
        self._gather: Post = self._all_gather
        self._staged: _StagedExchange | None = None
        if not transport.streams:
            nonces = gather_records({"nonce": uuid.uuid4().hex}, group, self._meeting)
            (lane,) = make_lanes(
                group, str(nonces[0]["nonce"]), lanes_between_all(group, 1), self._place
            )
            self._staged = _StagedExchange(lane, self.world_size, self._clock.wait)
            self._scatter, self._gather = self._staged.all_to_all, self._staged.all_gather

    def measure(
        self, dtypes: Sequence[torch.dtype], seconds: float, emit: Progress = lambda text: None
    ) -> list[LinkCosts]:
        """Measures all costs, of every exchange. Collective; the result is the same on all ranks.

        dtypes: for which all-reduces are measured.
        seconds: approximate time for each size.

        Raises:
            PeerError: on all ranks; one of them has no memory left.
        """
        world_size = self.world_size
        least = _native.HEADER_BYTES
        sizes = {least, *(min(n, _MOST_BYTES // world_size) for n in _EXCHANGE_BYTES)}
        sizes = {size for size in sizes if size >= least}
        on_all_ranks(self.most, "the link", lambda: self._allocate(world_size * max(sizes)))
        scatter, gather = [], []
        for size in sorted(sizes):
            emit(f"all-to-all and all-gather, {size >> 10} kB to each rank")
            send, receive = (whole[: world_size * size] for whole in (self._sent, self._received))
            sent = float((world_size - 1) * size)
            scatter.append((sent, self._batches(seconds, self._scatter, send, receive)))
            gather.append((sent, self._batches(seconds, self._gather, send[:size], receive)))
        flat = LinkCosts(
            scatter=_in_line(scatter),
            gather=_in_line(gather),
            all_reduce={dtype: self._all_reduce(dtype, seconds, emit) for dtype in dtypes},
            engine=self._engine,
        )
        return [flat for _ in self.exchanges]

    def _allocate(self, exchanged_bytes: int) -> None:
        """Everything that collectives of so many bytes, and of _REDUCE_BYTES, need."""
        self._sent = self._zeros(max(exchanged_bytes, *_REDUCE_BYTES))
        self._received = self._zeros(exchanged_bytes)
        self._aligning = torch.zeros(1, dtype=torch.float32, device=self._place)
        if self._staged is not None:
            self._staged.allocate(exchanged_bytes)

    def _all_reduce(self, dtype: torch.dtype, seconds: float, emit: Progress) -> CollectiveCosts:
        points = []
        for size in (dtype.itemsize, *_REDUCE_BYTES):
            emit(f"all-reduce of {size >> 10} kB of {str(dtype).removeprefix('torch.')}")
            tensor = self._sent[:size].view(dtype)
            points.append((float(size), self._batches(seconds, self._reduce, tensor)))
        return _in_line(points)

    def _batches(self, seconds: float, post: Post, *tensors: torch.Tensor) -> float:
        """Typical seconds from one collective to the next."""
        self._batch(post, tensors, 1)  # the first of its kind connects the ranks
        # Equal on all ranks, and so is what follows from it.
        single = self._batch(post, tensors, 1)
        wanted = seconds / single if single > 0 else _MOST_IN_BATCH * _MOST_BATCHES
        in_batch = max(1, min(_MOST_IN_BATCH, round(wanted / _MOST_BATCHES)))
        count = max(1, min(_MOST_BATCHES, round(wanted / in_batch)))
        return median(self._batch(post, tensors, in_batch) for _ in range(count))

    def _batch(self, post: Post, tensors: Sequence[torch.Tensor], count: int) -> float:
        """The same of `count` in a row, on the slowest rank."""
        self.most([0.0])
        self._clock.head_start()
        self._reduce(self._aligning)  # no rank's clock runs before all ranks have come
        self._wait_if_staged()
        begin = self._link_clock.mark()
        for _ in range(count):
            post(*tensors)
        self._wait_if_staged()
        end = self._link_clock.mark()
        return self.most([self._link_clock.seconds(begin, end) / count])[0]

    def _wait_if_staged(self) -> None:
        if self._engine is Engine.STAGED:
            self._clock.wait()

    def _all_to_all(self, send: torch.Tensor, receive: torch.Tensor) -> None:
        self._in_order(dist.all_to_all_single(receive, send, group=self._group, async_op=True))

    def _all_gather(self, send: torch.Tensor, receive: torch.Tensor) -> None:
        self._in_order(dist.all_gather_into_tensor(receive, send, group=self._group, async_op=True))

    def _reduce(self, tensor: torch.Tensor) -> None:
        self._in_order(dist.all_reduce(tensor, group=self._group, async_op=True))

    def _in_order(self, work: dist.Work | None) -> None:
        """Has the current stream wait, not the host. None: the collective ran on that stream."""
        if work is not None:
            work.wait()

    def _zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._place)

    def of_first_rank(self, value: int) -> int:
        """Rank 0's value, on all ranks. Collective."""
        mine = value if dist.get_rank(self._group) == 0 else 0
        return int(self.most([float(mine)])[0])

    def most(self, values: Sequence[float]) -> list[float]:
        """The elementwise maximum over all ranks. Collective."""
        return most_of_ranks(values, self._group, self._meeting)


class _StagedExchange:
    """Collectives of device memory that pass through pinned host memory. They block."""

    def __init__(self, lane: _native.Lane, world_size: int, wait: Callable[[], None]) -> None:
        self._lane = lane
        self._world_size = world_size
        self._wait = wait

    def allocate(self, num_bytes: int) -> None:
        """Host memory for collectives in which a rank receives at most so many bytes."""
        self._sent, self._received = (
            torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            for _ in range(2)
        )

    def all_to_all(self, send: torch.Tensor, receive: torch.Tensor) -> None:
        sizes = [send.numel() // self._world_size] * self._world_size
        arrived = self._received[: receive.numel()]
        self._lane.all_to_all(arrived, sizes, self._fetched(send), sizes).wait()
        receive.copy_(arrived, non_blocking=True)

    def all_gather(self, send: torch.Tensor, receive: torch.Tensor) -> None:
        arrived = self._received[: receive.numel()]
        self._lane.all_gather(arrived, self._fetched(send)).wait()
        receive.copy_(arrived, non_blocking=True)

    def _fetched(self, send: torch.Tensor) -> torch.Tensor:
        copy = self._sent[: send.numel()]
        copy.copy_(send, non_blocking=True)
        self._wait()
        return copy


def _in_line(points: Sequence[tuple[float, float]]) -> CollectiveCosts:
    """Of points by bytes, the smallest collective first."""
    return CollectiveCosts(points[0][1], rising(points), in_line=True)
