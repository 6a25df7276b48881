"""Measures codecs on a device, and what a rank does for its node, by the clock of the device: the
kernels that an engine there runs for a chunk, with their checks and headers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradferry import _native
from gradferry.core.device import load_kernels
from gradferry.errors import ProtocolError
from gradferry.forecast.clock import clock_of
from gradferry.forecast.costs import CodecCosts, NodeCosts, ParameterCodec
from gradferry.forecast.measure_codecs import timed

# 16 MB of fp32. With residuals and the messages of several ranks this takes some 140 MB of a device
# that a training may have filled, but more than a GPU's cache.
NUM_ELEMENTS = 1 << 22
_FEWEST_ELEMENTS = _native.TILE_ELEMENTS
# The messages to reduce, or to add up, hold no more elements than so many gradients: of more ranks
# each holds fewer, as in an engine, whose workspace has a limit.
_MOST_RECEIVED = 4
# Between two sizes, so that what a launch takes and what an element takes can be told apart.
_LEAST_RATIO = 8


def measure_codec_on(
    place: torch.device,
    codec: ParameterCodec,
    dtype: torch.dtype,
    world_size: int,
    num_elements: int,
) -> CodecCosts:
    """Measures a codec for gradients of this dtype. Times include the checks of messages, so that
    `check_per_byte` is 0.

    Raises:
        ConfigError: there are no kernels for the device.
        ProtocolError: a kernel refused a message that another has written.
    """
    numbers, owned = _prepare(place, dtype, num_elements, world_size)

    def times_of_sender(n: int) -> list[float]:
        return _times_of_sender(_Chunk(codec, numbers[:n].to(place), world_size=1))

    def times_of_owner(n: int) -> list[float]:
        return _times_of_owner(_Chunk(codec, numbers[:n].to(place), world_size))

    encode, decode = _lines(times_of_sender, numbers.numel())
    (reduce,) = _lines(times_of_owner, owned)
    per_element, launches = zip(encode, reduce, decode, strict=True)
    return CodecCosts(*per_element, 0.0, *launches)


def measure_node_on(
    place: torch.device, dtype: torch.dtype, num_ranks: int, num_elements: int
) -> NodeCosts:
    """Measures what a rank does with the gradients of its node's ranks, of this dtype.

    Raises:
        ConfigError: there are no kernels for the device.
        ProtocolError: a kernel refused a message that another has written.
    """
    numbers, summed = _prepare(place, dtype, num_elements, num_ranks)

    def times_of_pack(n: int) -> list[float]:
        gradient = numbers[:n].to(place)
        node = _node(gradient, 1)
        return [timed(clock_of(place), lambda: node.pack(gradient))]

    def times_of_sum(n: int) -> list[float]:
        gradient = numbers[:n].to(place)
        node = _node(gradient, num_ranks)
        for rank in range(1, num_ranks):
            node.receive(rank, gradient)
        times = [timed(clock_of(place), lambda: node.sum(gradient))]
        # Sums that refuse a message take another path.
        if not node.sum(gradient).cpu().isfinite().all():
            raise ProtocolError("the sum of a node refused what its ranks have packed")
        return times

    (pack,) = _lines(times_of_pack, numbers.numel())
    (added,) = _lines(times_of_sum, summed)
    per_element, launches = zip(pack, added, strict=True)
    return NodeCosts(*per_element, *launches)


def _node(gradient: torch.Tensor, num_ranks: int) -> _native.DeviceNode:
    return _native.DeviceNode(
        dtype=gradient.dtype,
        num_elements=gradient.numel(),
        device=gradient.device,
        num_ranks=num_ranks,
    )


def _prepare(
    place: torch.device, dtype: torch.dtype, num_elements: int, senders: int
) -> tuple[torch.Tensor, int]:
    """Loads the kernels. Returns gradients, and how many of them the messages of so many senders
    hold.
    """
    load_kernels(place.type)
    least = _LEAST_RATIO * _FEWEST_ELEMENTS
    many = max(num_elements, least)
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(many, generator=generator, dtype=torch.float32, device="cpu")
    return numbers.to(dtype), max(min(many, _MOST_RECEIVED * many // senders), least)


def _lines(times: Callable[[int], list[float]], many: int) -> list[tuple[float, float]]:
    """Of each time: seconds per element, and those of a launch, from few elements and from many."""
    few = _FEWEST_ELEMENTS
    lines = []
    for small, large in zip(times(few), times(many), strict=True):
        per_element = max(0.0, (large - small) / (many - few))
        lines.append((per_element, max(0.0, small - few * per_element)))
    return lines


class _Chunk:
    """A parameter of a codec on a device, and what its kernels need besides."""

    def __init__(self, kind: ParameterCodec, gradient: torch.Tensor, world_size: int) -> None:
        place = gradient.device
        self.clock = clock_of(place)
        self.codec = _native.DeviceCodec(
            codec=str(kind.codec),
            dtype=gradient.dtype,
            num_elements=gradient.numel(),
            device=place,
            world_size=world_size,
            momentum=kind.momentum,
        )
        self.gradient = gradient
        self.worker_residual, self.owner_residual = (
            torch.zeros(gradient.numel(), dtype=torch.float32, device=place) if kept else None
            for kept in kind.residuals
        )
        self.world_size = world_size

    def encode(self) -> None:
        self.codec.encode(self.gradient, self.worker_residual)

    def reduce(self) -> None:
        self.codec.reduce(self.owner_residual, self.world_size)

    def decode(self) -> None:
        self.codec.decode(self.gradient, self.worker_residual)

    def receive_from_all(self) -> None:
        for rank in range(self.world_size):
            self.codec.receive(rank)


def _times_of_sender(chunk: _Chunk) -> list[float]:
    """Seconds to encode and to decode."""
    encode = timed(chunk.clock, chunk.encode)
    chunk.receive_from_all()
    chunk.reduce()
    decode = timed(chunk.clock, chunk.decode)
    chunk.codec.expect_no_findings()
    return [encode, decode]


def _times_of_owner(chunk: _Chunk) -> list[float]:
    """Seconds to reduce the messages of all ranks."""
    chunk.encode()
    chunk.receive_from_all()
    reduce = timed(chunk.clock, chunk.reduce)
    chunk.codec.expect_no_findings()
    return [reduce]
