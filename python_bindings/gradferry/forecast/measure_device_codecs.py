"""Measures codecs on a device, by its clock: their kernels alone, without checks and headers."""

from __future__ import annotations

import torch

from gradferry import _native
from gradferry.core.device import load_kernels
from gradferry.forecast.clock import clock_of
from gradferry.forecast.costs import CodecCosts, ParameterCodec
from gradferry.forecast.measure_codecs import timed

# 16 MB of fp32. With residuals and the payloads of several ranks this takes some 130 MB of a device
# that a training may have filled, but more than a GPU's cache.
NUM_ELEMENTS = 1 << 22
_FEWEST_ELEMENTS = _native.TILE_ELEMENTS
_MOST_PAYLOADS = 4  # that are reduced lie apart, so that no cache holds them
# Between two sizes, so that what a launch takes and what an element takes can be told apart.
_LEAST_RATIO = 8


def seconds_per_byte(place: torch.device, num_elements: int = NUM_ELEMENTS) -> float:
    """Of each byte that a copy reads or writes."""
    clock = clock_of(place)
    few = torch.float32.itemsize * _FEWEST_ELEMENTS
    many = max(torch.float32.itemsize * num_elements, _LEAST_RATIO * few)
    one, other = (torch.zeros(many, dtype=torch.uint8, device=place) for _ in range(2))
    small = timed(clock, lambda: one[:few].copy_(other[:few]))
    large = timed(clock, lambda: one.copy_(other))
    return max(0.0, (large - small) / (2 * (many - few)))


def measure_codec_on(
    place: torch.device,
    codec: ParameterCodec,
    dtype: torch.dtype,
    world_size: int,
    num_elements: int,
    per_byte: float,
) -> CodecCosts:
    """Measures a codec for gradients of this dtype. `per_byte`: seconds, of `seconds_per_byte`.

    Raises:
        ConfigError: there are no kernels for the device.
    """
    load_kernels(place.type)
    few = _FEWEST_ELEMENTS
    many = max(num_elements, _LEAST_RATIO * few)
    small = _times(place, codec, dtype, world_size, few)
    large = _times(place, codec, dtype, world_size, many)
    per_element = [max(0.0, (b - a) / (many - few)) for a, b in zip(small, large, strict=True)]
    launches = [
        max(0.0, seconds - few * each) for seconds, each in zip(small, per_element, strict=True)
    ]
    encode, reduce, decode = per_element
    if codec.momentum:  # what was decoded is added to the worker residual, which is fp32
        decode += 2 * torch.float32.itemsize * per_byte
    return CodecCosts(encode, reduce, decode, per_byte, *launches)


def _codec(
    name: str, dtype: torch.dtype, num_elements: int, place: torch.device
) -> tuple[_native.DeviceCodec, torch.Tensor, torch.Tensor]:
    """The codec, a buffer for its payload, and a gradient."""
    load_kernels(place.type)
    codec = _native.DeviceCodec(codec=name, dtype=dtype, num_elements=num_elements, device=place)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(num_elements, generator=generator, dtype=torch.float32, device="cpu")
    gradient = gradient.to(place, dtype)
    return codec, _bytes(codec.worker_bytes, place), gradient


def _times(
    place: torch.device,
    kind: ParameterCodec,
    dtype: torch.dtype,
    world_size: int,
    num_elements: int,
) -> list[float]:
    """Seconds to encode, to reduce and to decode so many elements."""
    clock = clock_of(place)
    codec, payload, gradient = _codec(str(kind.codec), dtype, num_elements, place)
    worker, owner = (
        torch.zeros(num_elements, dtype=torch.float32, device=place) if kept else None
        for kept in kind.residuals
    )
    encode = timed(clock, lambda: codec.encode(gradient, worker, payload))
    payloads = [payload, *(payload.clone() for _ in range(min(world_size, _MOST_PAYLOADS) - 1))]
    pointers = codec.pointers([payloads[rank % len(payloads)] for rank in range(world_size)])
    reduced = _bytes(codec.owner_bytes, place)
    reduce = timed(clock, lambda: codec.reduce(pointers, owner, reduced))
    return [encode, reduce, timed(clock, lambda: codec.decode(reduced, gradient))]


def _bytes(num_bytes: int, place: torch.device) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=place)
