"""Simulates one step of the engine of a device: four streams, each of which does one thing after
another, in the order in which the engine enqueues it.

DDP's stream computes gradients; E encodes; the link is the backend's stream; F reduces and decodes.
The host is assumed to be ahead, so that nothing waits for it. With a staged exchange, a thread of
the engine waits for every copy and message instead, and enqueues nothing meanwhile.

With two levels, E also copies gradients for the siblings and adds up theirs, and F forwards what
came from peers; between siblings, the backend has a stream of its own.

While kernels of E and F run, DDP's stream loses the share of the device that they take: kernels of
codecs have a block for every tile, on streams of high priority. See `Predictor.calibrated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from gradferry.forecast.costs import CollectiveCosts, Engine, LinkCosts
from gradferry.forecast.simulate import Backward, ChunkCost, PlayedStep, Timeline, settle


def play_on_streams(
    backward: Backward, buckets: Sequence[Sequence[ChunkCost]], link: LinkCosts
) -> PlayedStep:
    """Simulates a step with a codec. `buckets`: chunks by bucket, in the order of `ready_s`."""
    return settle(backward, lambda stretch: _StreamStep(backward, buckets, link, stretch).play())


class _Turn(NamedTuple):
    """A piece of work on a chunk of the bucket."""

    does: _Stage
    chunk: int


_Stage = Literal["pack", "send", "reduce", "forward", "decode"]
# Each is one chunk behind the one before it; so many chunks are in flight.
_STAGES: tuple[_Stage, ...] = ("send", "reduce", "decode")
_STAGES_OF_NODES: tuple[_Stage, ...] = ("pack", "send", "reduce", "forward", "decode")


def enqueued(num_chunks: int, stages: Sequence[_Stage] = _STAGES) -> Iterator[_Turn]:
    """The order of the work on a bucket, as in DeviceExchange::average()."""
    for turn in range(num_chunks + len(stages) - 1):
        for behind, stage in enumerate(stages):
            if 0 <= turn - behind < num_chunks:
                yield _Turn(stage, turn - behind)


class _StreamStep:
    """One simulation of the step: the times at which each stream has finished."""

    def __init__(
        self,
        backward: Backward,
        buckets: Sequence[Sequence[ChunkCost]],
        link: LinkCosts,
        stretch: float,
    ) -> None:
        self._backward = backward
        self._buckets = buckets
        self._link = link
        self._stretch = stretch
        self._timeline = Timeline()
        self._encoded = self._finished = 0.0
        self._thread = 0.0  # of a staged exchange
        # When each slot is free again. The engine has fewer in worlds so large that its workspace
        # has no space for all.
        self._stages = _STAGES if link.local is None else _STAGES_OF_NODES
        self._slots = [0.0] * len(self._stages)
        self._num_chunks = 0  # of earlier buckets

    def play(self) -> Timeline:
        computed = before = self._backward.ready_s[0]
        self._send(computed, 0, self._link.gather)  # the commit of the step before
        for ready, chunks in zip(self._backward.ready_s, self._buckets, strict=True):
            computed += (ready - before) * self._stretch
            before = ready
            self._average(computed, chunks)
        computed += (self._backward.end_s - before) * self._stretch
        return self._timeline.ended(computed, self._finished)

    def _average(self, ready: float, chunks: Sequence[ChunkCost]) -> None:
        # When what a chunk waits for has come; at first its gradients and its slot.
        arrived = [ready] * len(chunks)
        for does, number in enqueued(len(chunks), self._stages):
            chunk = chunks[number]
            slot = (self._num_chunks + number) % len(self._slots)
            if does == self._stages[0]:
                arrived[number] = max(ready, self._slots[slot])
            if does == "pack":
                arrived[number] = self._pack(arrived[number], chunk)
            elif does == "send":
                arrived[number] = self._encode(arrived[number], chunk)
            elif does == "reduce":
                arrived[number] = self._reduce(arrived[number], chunk)
            elif does == "forward":
                arrived[number] = self._forward(arrived[number], chunk)
            else:
                self._decode(arrived[number], chunk)
            if does == ("decode" if chunk.keeps_sent else "reduce"):
                self._slots[slot] = self._finished
        self._num_chunks += len(chunks)

    def _pack(self, allowed: float, chunk: ChunkCost) -> float:
        assert chunk.local is not None
        assert self._link.local is not None
        begin = max(allowed, self._encoded, self._thread)
        self._encoded = self._work(begin, chunk.local.pack_s)
        self._wait_until(self._encoded)
        costs, num_bytes = self._link.local.scatter, chunk.local.scatter_bytes
        return self._send(self._encoded, num_bytes, costs, is_local=True)

    def _forward(self, gathered: float, chunk: ChunkCost) -> float:
        assert chunk.local is not None
        assert self._link.local is not None
        self._wait_until(gathered)
        self._finished = max(self._finished, gathered)
        costs, num_bytes = self._link.local.forward, chunk.local.forward_bytes
        return self._send(self._finished, num_bytes, costs, is_local=True)

    def _encode(self, allowed: float, chunk: ChunkCost) -> float:
        self._wait_until(allowed if chunk.local else 0.0)  # for what siblings sent
        begin = max(allowed, self._encoded, self._thread)
        work = chunk.encode_s + (chunk.local.sum_s if chunk.local else 0.0)
        self._encoded = self._work(begin, work)
        self._wait_until(self._encoded)
        return self._send(self._encoded, chunk.scatter_bytes, self._link.scatter)

    def _reduce(self, scattered: float, chunk: ChunkCost) -> float:
        self._wait_until(scattered)
        self._finished = self._work(max(self._finished, scattered), chunk.reduce_s)
        self._wait_until(self._finished)
        return self._send(self._finished, chunk.gather_bytes, self._link.gather)

    def _decode(self, gathered: float, chunk: ChunkCost) -> None:
        self._wait_until(gathered)
        self._finished = self._work(max(self._finished, gathered), chunk.decode_s)

    def _wait_until(self, instant: float) -> None:
        if self._link.engine is Engine.STAGED:
            self._thread = max(self._thread, instant)

    def _work(self, begin: float, seconds: float) -> float:
        self._timeline.work(begin, begin + seconds, seconds)
        return begin + seconds

    def _send(
        self, posted: float, num_bytes: int, costs: CollectiveCosts, *, is_local: bool = False
    ) -> float:
        end = self._backward.end_s
        return self._timeline.send(posted, num_bytes, costs, end, is_local=is_local)
