"""Measures codecs on one thread of this machine, and the casts of backend hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

import torch

from gradferry import _native
from gradferry.core.codec_spec import OFF
from gradferry.core.device import CPU
from gradferry.forecast.clock import Clock, clock_of
from gradferry.forecast.costs import CastCosts, CodecCosts, NodeCosts, ParameterCodec

_ROUNDS = 5
NUM_ELEMENTS = 1 << 21  # 8 MB of fp32: more than the private caches of a core


def measure_codec(
    codec: ParameterCodec,
    dtype: torch.dtype,
    world_size: int,
    num_elements: int = NUM_ELEMENTS,
) -> CodecCosts:
    """Measures a codec as the engine uses it for gradients of this dtype."""
    least = world_size * _native.TILE_ELEMENTS
    cost = _native.codec_cost(
        str(codec.codec),
        dtype=dtype,
        world_size=world_size,
        worker_residual=codec.residuals[0],
        owner_residual=codec.residuals[1],
        momentum=codec.momentum,
        num_elements=max(num_elements, least),
        rounds=_ROUNDS,
    )
    return CodecCosts(**cost)


def measure_node(dtype: torch.dtype, num_ranks: int, num_elements: int = NUM_ELEMENTS) -> NodeCosts:
    """Measures what a rank does with the gradients of its node's ranks."""
    cost = _native.node_cost(
        dtype,
        num_ranks=num_ranks,
        num_elements=max(num_elements, _native.TILE_ELEMENTS),
        rounds=_ROUNDS,
    )
    return NodeCosts(**cost)


def measure_casts(
    hooks: Iterable[str],
    world_size: int,
    num_elements: int = NUM_ELEMENTS,
    place: torch.device = CPU,
) -> dict[str, CastCosts]:
    """Measures what backend hooks compute before and after their all-reduce."""
    return {hook: _measure_cast(hook, world_size, num_elements, place) for hook in hooks}


def _measure_cast(hook: str, world_size: int, num_elements: int, place: torch.device) -> CastCosts:
    clock = clock_of(place)
    gradient = torch.randn(num_elements, dtype=torch.float32, device="cpu").to(place)
    if hook in (OFF, "torch:fp32"):
        seconds = timed(clock, lambda: gradient.div_(world_size))
        return CastCosts(seconds / num_elements, 0.0)
    dtype = torch.float16 if hook == "torch:fp16" else torch.bfloat16
    small = gradient.to(dtype)
    before = timed(clock, lambda: gradient.to(dtype).div_(world_size))
    after = timed(clock, lambda: gradient.copy_(small))
    return CastCosts(before / num_elements, after / num_elements)


def timed(clock: Clock, work: Callable[[], object]) -> float:
    """The median seconds of a piece of work."""
    work()  # the first run touches new memory
    clock.head_start()
    marks = []
    for _ in range(_ROUNDS):
        begin = clock.mark()
        work()
        marks.append((begin, clock.mark()))
    return median(clock.seconds(begin, end) for begin, end in marks)
