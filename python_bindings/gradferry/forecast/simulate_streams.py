"""Simulates one step of the engine of a device: four streams, each of which does one thing after
another, in the order in which the engine enqueues it.

DDP's stream computes gradients; E encodes; the link is the backend's stream; F reduces and decodes.
The host is assumed to be ahead, so that nothing waits for it. With a staged exchange, a thread of
the engine waits for every copy and message instead, and enqueues nothing meanwhile.

While kernels of E and F run, DDP's stream loses the share of the device that they take: kernels of
codecs have a block for every tile, on streams of high priority. See `Predictor.calibrated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from gradferry import _native
from gradferry.forecast.costs import CollectiveCosts, Engine, LinkCosts
from gradferry.forecast.simulate import Backward, ChunkCost, PlayedStep, Timeline, settle


def play_on_streams(
    backward: Backward, buckets: Sequence[Sequence[ChunkCost]], link: LinkCosts
) -> PlayedStep:
    """Simulates a step with a codec. `buckets`: chunks by bucket, in the order of `ready_s`."""
    return settle(backward, lambda stretch: _StreamStep(backward, buckets, link, stretch).play())


class _Turn(NamedTuple):
    """A piece of work on a chunk of the bucket."""

    does: Literal["send", "reduce", "decode"]
    chunk: int


def enqueued(num_chunks: int) -> Iterator[_Turn]:
    """The order of the work on a bucket, as in DeviceExchange::average()."""
    for turn in range(num_chunks + 2):
        if turn < num_chunks:
            yield _Turn("send", turn)
        if 1 <= turn <= num_chunks:
            yield _Turn("reduce", turn - 1)
        if turn >= 2:
            yield _Turn("decode", turn - 2)


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
        self._slots = [0.0] * _native.DEVICE_CHUNK_SLOTS
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
        scattered = [0.0] * len(chunks)
        gathered = [0.0] * len(chunks)
        for does, number in enqueued(len(chunks)):
            chunk = chunks[number]
            slot = (self._num_chunks + number) % len(self._slots)
            if does == "send":
                scattered[number] = self._encode(max(ready, self._slots[slot]), chunk)
            elif does == "reduce":
                gathered[number] = self._reduce(scattered[number], chunk)
            else:
                self._decode(gathered[number], chunk)
            if does == ("decode" if chunk.keeps_sent else "reduce"):
                self._slots[slot] = self._finished
        self._num_chunks += len(chunks)

    def _encode(self, allowed: float, chunk: ChunkCost) -> float:
        begin = max(allowed, self._encoded, self._thread)
        self._encoded = self._work(begin, chunk.encode_s)
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

    def _send(self, posted: float, num_bytes: int, costs: CollectiveCosts) -> float:
        return self._timeline.send(posted, num_bytes, costs, self._backward.end_s)
