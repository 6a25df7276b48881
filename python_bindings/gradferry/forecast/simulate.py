"""Simulates one step of the engine: a discrete-event simulation of its two threads and the link.

DDP's thread computes gradients, encodes and posts. The finishing thread waits, reduces, posts and
decodes in the order of the engine's finishing thread. Messages use the link one after another.
All ranks are assumed to be alike and synchronous, so only one is simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from gradferry import _native
from gradferry.forecast.costs import CollectiveCosts, LinkCosts

_MOST_PASSES = 12
_CLOSE_ENOUGH = 1e-4


@dataclass(frozen=True)
class ChunkCost:
    """The costs of one chunk: seconds of work, bytes that a rank sends. keeps_sent: on a device,
    whether decode reads what was sent, so that the slot is occupied until then.
    """

    encode_s: float
    scatter_bytes: int
    reduce_s: float
    gather_bytes: int
    decode_s: float
    keeps_sent: bool = False


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
    return settle(backward, lambda stretch: _CodecStep(backward, buckets, link, stretch).play())


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
    """The use of the link, and the work of all threads, or streams, except DDP's."""

    computed_s: float = 0.0  # when DDP's thread has finished
    end_s: float = 0.0
    _link_free: float = 0.0
    _work: list[tuple[float, float, float]] = field(default_factory=list)  # begin, end, seconds

    def send(
        self, posted: float, num_bytes: int, costs: CollectiveCosts, busy_until: float
    ) -> float:
        """Returns when a message has arrived. `busy_until`: gradients are computed until then."""
        begin = max(posted, self._link_free)
        takes = costs.occupied.at(num_bytes)
        slowed = max(0.0, busy_until - begin)
        if takes <= slowed * costs.beside_backward:
            takes /= costs.beside_backward
        else:
            takes += slowed * (1 - costs.beside_backward)
        self._link_free = begin + takes
        arrived = self._link_free + (0.0 if costs.in_line else costs.latency_s)
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
    """A chunk in flight."""

    chunk: ChunkCost
    posted_s: float
    scattered_s: float
    last: bool  # of its bucket
    gathered_s: float = 0.0


class _CodecStep:
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
        # DDP's thread: chunks still to encode, each with the computing time before it.
        self._to_encode: deque[tuple[float, ChunkCost, bool]] = deque()
        before = backward.ready_s[0]
        for ready, chunks in zip(backward.ready_s, buckets, strict=True):
            gap = ready - before
            before = ready
            for number, chunk in enumerate(chunks):
                self._to_encode.append((gap, chunk, number == len(chunks) - 1))
                gap = 0.0
        self._computed = backward.ready_s[0]
        self._free_slots = [0.0] * _native.CHUNK_SLOTS  # times since when slots are free
        # The finishing thread.
        self._now = 0.0
        self._queue: deque[_Job] = deque()
        self._gathers: deque[_Job] = deque()
        self._commits: deque[float] = deque()
        self._completed = 0.0

    def play(self) -> Timeline:
        while self._to_encode or self._queue or self._gathers or self._commits:
            self._encode_until(self._now)
            self._finish_one()
        tail = self._backward.end_s - self._backward.ready_s[-1]
        return self._timeline.ended(self._computed + tail * self._stretch, self._completed)

    def _encode_until(self, instant: float) -> None:
        """Lets DDP's thread post what it can until `instant`."""
        while self._to_encode and self._free_slots:
            gap, chunk, last = self._to_encode[0]
            begin = max(self._computed + gap * self._stretch, self._free_slots[0])
            posted = begin + chunk.encode_s * self._stretch
            if posted > instant:
                return
            self._to_encode.popleft()
            heappop(self._free_slots)
            self._computed = posted
            costs, busy = self._link.scatter, self._busy_until()
            arrived = self._timeline.send(posted, chunk.scatter_bytes, costs, busy)
            self._queue.append(_Job(chunk, posted, arrived, last))

    def _busy_until(self) -> float:
        """When DDP's thread finishes, or has to wait if no further slot becomes free."""
        instant = self._computed
        free = len(self._free_slots)
        for gap, chunk, _ in self._to_encode:
            instant += gap * self._stretch
            if free == 0:
                return instant
            free -= 1
            instant += chunk.encode_s * self._stretch
        return instant + (self._backward.end_s - self._backward.ready_s[-1]) * self._stretch

    def _finish_one(self) -> None:
        """One job of the finishing thread, as in Finisher::do_oldest()."""
        if len(self._commits) == _native.COMMIT_SLOTS:
            self._finish_commit()
        room = len(self._gathers) < _native.GATHERS_IN_FLIGHT
        if room and self._queue and self._queue[0].posted_s <= self._now:
            self._reduce(self._queue.popleft())
        elif self._gathers:
            self._decode(self._gathers.popleft())
        elif self._commits:
            self._finish_commit()
        elif self._queue:
            self._now = self._queue[0].posted_s
        else:
            self._sleep()

    def _sleep(self) -> None:
        """Waits until DDP's thread posts something."""
        gap, chunk, _ = self._to_encode[0]
        begin = max(self._computed + gap * self._stretch, self._free_slots[0])
        self._now = begin + chunk.encode_s * self._stretch

    def _work(self, begin: float, seconds: float) -> None:
        self._now = begin + seconds
        self._timeline.work(begin, self._now, seconds)
        self._encode_until(self._now)  # what DDP's thread posted meanwhile uses the link first

    def _reduce(self, job: _Job) -> None:
        self._work(max(self._now, job.scattered_s), job.chunk.reduce_s)
        costs = self._link.gather
        busy = self._busy_until()
        job.gathered_s = self._timeline.send(self._now, job.chunk.gather_bytes, costs, busy)
        self._gathers.append(job)

    def _decode(self, job: _Job) -> None:
        self._work(max(self._now, job.gathered_s), job.chunk.decode_s)
        heappush(self._free_slots, self._now)
        if job.last:
            self._commits.append(self._now + self._link.gather.latency_s)

    def _finish_commit(self) -> None:
        self._now = max(self._now, self._commits.popleft())
        self._completed = self._now
