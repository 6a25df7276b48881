"""Simulates one step of the engine: a discrete-event simulation of its two threads and the link.

DDP's thread computes gradients, encodes and posts. The finishing thread waits, reduces, posts and
decodes in the order of the engine's finishing thread. Messages use the link one after another.
All ranks are assumed to be alike and synchronous, so only one is simulated.

With two levels, DDP's thread only copies gradients for the siblings; the finishing thread adds them
up and encodes. Messages between siblings use a link of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from gradferry import _native
from gradferry.forecast.costs import CollectiveCosts, LinkCosts, LocalCosts

_MOST_PASSES = 12
_CLOSE_ENOUGH = 1e-4


@dataclass(frozen=True)
class LocalChunkCost:
    """What a chunk costs between the ranks of a node: seconds of work, bytes that a rank sends."""

    pack_s: float
    scatter_bytes: int
    sum_s: float
    forward_bytes: int


@dataclass(frozen=True)
class ChunkCost:
    """The costs of one chunk: seconds of work, bytes that a rank sends. keeps_sent: on a device,
    whether decode reads what was sent, so that the slot is occupied until then. local: None in the
    flat exchange.
    """

    encode_s: float
    scatter_bytes: int
    reduce_s: float
    gather_bytes: int
    decode_s: float
    keeps_sent: bool = False
    local: LocalChunkCost | None = None


@dataclass(frozen=True)
class ReducedBucket:
    """A bucket of a backend hook: seconds of work before and after its all-reduce."""

    before_s: float
    num_bytes: int  # of the tensor that is all-reduced
    after_s: float


@dataclass(frozen=True)
class Backward:
    """When gradients are ready, in seconds from a common time.

    Attributes:
        ready_s: of every bucket, ascending.
        end_s: end of the backward pass.
        spare_cores: see StepProfile.
    """

    ready_s: tuple[float, ...]
    end_s: float
    spare_cores: float = 1.0


@dataclass(frozen=True)
class PlayedStep:
    """When all averaged gradients are ready, in seconds from the same time as in Backward."""

    end_s: float


def play_codec(
    backward: Backward, buckets: Sequence[Sequence[ChunkCost]], link: LinkCosts
) -> PlayedStep:
    """Simulates a step with a codec. `buckets`: chunks by bucket, in the order of `ready_s`."""
    step = _FlatStep if link.local is None else _NodesStep
    return settle(backward, lambda stretch: step(backward, buckets, link, stretch).play())


def play_all_reduce(
    backward: Backward, buckets: Sequence[ReducedBucket], costs: CollectiveCosts
) -> PlayedStep:
    """Simulates a step with a backend hook."""

    def play(stretch: float) -> Timeline:
        timeline = Timeline()
        computed = backward.ready_s[0]
        finished = done = 0.0
        for number, bucket in enumerate(buckets):
            if number:
                gap = backward.ready_s[number] - backward.ready_s[number - 1]
                computed += gap * stretch
            computed += bucket.before_s * stretch
            arrived = timeline.send(computed, bucket.num_bytes, costs, backward.end_s)
            done = max(done, arrived) + bucket.after_s
            timeline.work(done - bucket.after_s, done, bucket.after_s)
            finished = max(finished, done)
        computed += (backward.end_s - backward.ready_s[-1]) * stretch
        return timeline.ended(computed, finished)

    return settle(backward, play)


@dataclass
class Timeline:
    """The use of the links, and the work of all threads, or streams, except DDP's."""

    computed_s: float = 0.0  # when DDP's thread has finished
    end_s: float = 0.0
    _free: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    _work: list[tuple[float, float, float]] = field(default_factory=list)  # begin, end, seconds

    def send(
        self,
        posted: float,
        num_bytes: int,
        costs: CollectiveCosts,
        busy_until: float,
        *,
        is_local: bool = False,
    ) -> float:
        """Returns when a message has arrived. `busy_until`: gradients are computed until then.
        is_local: between siblings.
        """
        begin = max(posted, self._free[is_local])
        takes = costs.occupied.at(num_bytes)
        slowed = max(0.0, busy_until - begin)
        if takes <= slowed * costs.beside_backward:
            takes /= costs.beside_backward
        else:
            takes += slowed * (1 - costs.beside_backward)
        self._free[is_local] = begin + takes
        arrived = begin + takes + (0.0 if costs.in_line else costs.latency_s)
        self.work(begin, arrived, num_bytes * costs.cpu_s_per_byte)
        return arrived

    def work(self, begin: float, end: float, seconds: float) -> None:
        """Records processor time, spread evenly between begin and end."""
        self._work.append((begin, end, seconds))

    def ended(self, computed: float, finished: float) -> Timeline:
        self.computed_s = computed
        self.end_s = max(computed, finished)
        return self

    def work_before(self, instant: float) -> float:
        """Processor seconds before `instant`."""
        total = 0.0
        for begin, end, seconds in self._work:
            if end <= instant:
                total += seconds
            elif begin < instant:
                total += seconds * (instant - begin) / (end - begin)
        return total


def settle(backward: Backward, play: Callable[[float], Timeline]) -> PlayedStep:
    """Repeats the simulation until the delay of DDP's thread equals the work of the others."""
    short = min(1.0, max(0.0, 1.0 - backward.spare_cores))
    begin = backward.ready_s[0]
    stretch = 1.0
    timeline = play(stretch)
    busy = timeline.computed_s - begin  # of DDP's thread without delay, with waits for slots
    for _ in range(_MOST_PASSES):
        stolen = short * timeline.work_before(timeline.computed_s)
        wanted = 1.0 + stolen / busy if busy > 0 else 1.0
        # Only halfway, because a longer pass overlaps more work, which makes it longer still.
        if abs(wanted - stretch) < _CLOSE_ENOUGH:
            break
        stretch = (stretch + wanted) / 2
        timeline = play(stretch)
    return PlayedStep(timeline.end_s)


@dataclass
class _Job:
    """A chunk in flight, and when what it waits for has arrived."""

    chunk: ChunkCost
    posted_s: float
    last: bool  # of its bucket
    arrived_s: float


class _HostStep:
    """One simulation of the step. Both threads have their own clocks; the later one waits."""

    def __init__(
        self,
        backward: Backward,
        buckets: Sequence[Sequence[ChunkCost]],
        link: LinkCosts,
        stretch: float,
    ) -> None:
        self._backward = backward
        self._link = link
        self._stretch = stretch
        self._timeline = Timeline()
        # DDP's thread: chunks still to post, each with the computing time before it.
        self._to_post: deque[tuple[float, ChunkCost, bool]] = deque()
        before = backward.ready_s[0]
        for ready, chunks in zip(backward.ready_s, buckets, strict=True):
            gap = ready - before
            before = ready
            for number, chunk in enumerate(chunks):
                self._to_post.append((gap, chunk, number == len(chunks) - 1))
                gap = 0.0
        self._computed = backward.ready_s[0]
        self._free_slots = [0.0] * _native.CHUNK_SLOTS  # times since when slots are free
        # The finishing thread.
        self._now = 0.0
        self._posted: deque[_Job] = deque()  # what DDP's thread has posted, until it is taken up
        self._scatters: deque[_Job] = deque()  # these and forwards only with two levels
        self._gathers: deque[_Job] = deque()
        self._forwards: deque[_Job] = deque()
        self._commits: deque[float] = deque()
        self._completed = 0.0

    def play(self) -> Timeline:
        while self._to_post or self._is_busy():
            self._post_until(self._now)
            if len(self._commits) == _native.COMMIT_SLOTS:
                self._finish_commit()
            self._finish_one()
        tail = self._backward.end_s - self._backward.ready_s[-1]
        return self._timeline.ended(self._computed + tail * self._stretch, self._completed)

    def _work_before_post(self, chunk: ChunkCost) -> float:
        """Seconds on DDP's thread."""
        raise NotImplementedError

    def _post(self, chunk: ChunkCost) -> float:
        """Sends a chunk's first message from DDP's thread; returns when it has arrived."""
        raise NotImplementedError

    def _finish_one(self) -> None:
        """One job of the finishing thread, as in Finisher::do_oldest()."""
        raise NotImplementedError

    def _is_busy(self) -> bool:
        jobs = (self._posted, self._scatters, self._gathers, self._forwards, self._commits)
        return any(jobs)

    def _post_until(self, instant: float) -> None:
        """Lets DDP's thread post what it can until `instant`."""
        while self._to_post and self._free_slots:
            gap, chunk, last = self._to_post[0]
            begin = max(self._computed + gap * self._stretch, self._free_slots[0])
            posted = begin + self._work_before_post(chunk) * self._stretch
            if posted > instant:
                return
            self._to_post.popleft()
            heappop(self._free_slots)
            self._computed = posted
            self._posted.append(_Job(chunk, posted, last, self._post(chunk)))

    def _busy_until(self) -> float:
        """When DDP's thread finishes, or has to wait if no further slot becomes free."""
        instant = self._computed
        free = len(self._free_slots)
        for gap, chunk, _ in self._to_post:
            instant += gap * self._stretch
            if free == 0:
                return instant
            free -= 1
            instant += self._work_before_post(chunk) * self._stretch
        return instant + (self._backward.end_s - self._backward.ready_s[-1]) * self._stretch

    def _send(
        self, posted: float, num_bytes: int, costs: CollectiveCosts, *, is_local: bool = False
    ) -> float:
        busy = self._busy_until()
        return self._timeline.send(posted, num_bytes, costs, busy, is_local=is_local)

    def _sleep(self) -> None:
        """Waits until DDP's thread posts something."""
        gap, chunk, _ = self._to_post[0]
        begin = max(self._computed + gap * self._stretch, self._free_slots[0])
        self._now = begin + self._work_before_post(chunk) * self._stretch

    def _work(self, job: _Job, seconds: float) -> None:
        """On what has arrived."""
        begin = max(self._now, job.arrived_s)
        self._now = begin + seconds
        self._timeline.work(begin, self._now, seconds)
        self._post_until(self._now)  # what DDP's thread posted meanwhile uses the link first

    def _reduce(self, job: _Job) -> None:
        self._work(job, job.chunk.reduce_s)
        job.arrived_s = self._send(self._now, job.chunk.gather_bytes, self._link.gather)
        self._gathers.append(job)

    def _decode(self, job: _Job) -> None:
        self._work(job, job.chunk.decode_s)
        heappush(self._free_slots, self._now)
        if job.last:
            self._commits.append(self._now + self._link.gather.latency_s)

    def _finish_commit(self) -> None:
        self._now = max(self._now, self._commits.popleft())
        self._completed = self._now


class _FlatStep(_HostStep):
    """With one rank per node: as Finisher::next_stage_of_peers()."""

    def _work_before_post(self, chunk: ChunkCost) -> float:
        return chunk.encode_s

    def _post(self, chunk: ChunkCost) -> float:
        return self._send(self._computed, chunk.scatter_bytes, self._link.scatter)

    def _finish_one(self) -> None:
        room = len(self._gathers) < _native.GATHERS_IN_FLIGHT
        if room and self._posted and self._posted[0].posted_s <= self._now:
            self._reduce(self._posted.popleft())
        elif self._gathers:
            self._decode(self._gathers.popleft())
        elif self._commits:
            self._finish_commit()
        elif self._posted:
            self._now = self._posted[0].posted_s
        else:
            self._sleep()


class _NodesStep(_HostStep):
    """With several ranks per node: as Finisher::next_stage()."""

    @property
    def _local(self) -> LocalCosts:
        assert self._link.local is not None
        return self._link.local

    @property
    def _stages(self) -> Sequence[tuple[deque[_Job], Callable[[_Job], None]]]:
        """The last one first: what waits there is the oldest."""
        return (
            (self._forwards, self._decode),
            (self._gathers, self._forward),
            (self._scatters, self._reduce),
            (self._posted, self._sum),
        )

    def _work_before_post(self, chunk: ChunkCost) -> float:
        assert chunk.local is not None
        return chunk.local.pack_s

    def _post(self, chunk: ChunkCost) -> float:
        assert chunk.local is not None
        num_bytes = chunk.local.scatter_bytes
        return self._send(self._computed, num_bytes, self._local.scatter, is_local=True)

    def _finish_one(self) -> None:
        waiting = [(jobs, advance) for jobs, advance in self._stages if jobs]
        arrived = (each for each in waiting if each[0][0].arrived_s <= self._now)
        if waiting:
            jobs, advance = next(arrived, waiting[0])
            advance(jobs.popleft())
        elif self._commits:
            self._finish_commit()
        else:
            self._sleep()

    def _sum(self, job: _Job) -> None:
        assert job.chunk.local is not None
        self._work(job, job.chunk.local.sum_s + job.chunk.encode_s)
        job.arrived_s = self._send(self._now, job.chunk.scatter_bytes, self._link.scatter)
        self._scatters.append(job)

    def _forward(self, job: _Job) -> None:
        assert job.chunk.local is not None
        self._work(job, 0.0)
        num_bytes = job.chunk.local.forward_bytes
        job.arrived_s = self._send(self._now, num_bytes, self._local.forward, is_local=True)
        self._forwards.append(job)
