"""What a step is made of, in seconds and bytes: the inputs of a prediction."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gradferry.core.codec_spec import CodecSpec


@dataclass(frozen=True)
class Curve:
    """Seconds by bytes, from a few points: straight lines between them.

    Below the first point its own time, beyond the last one the slope of the last two.
    """

    points: tuple[tuple[float, float], ...]  # (bytes, seconds), bytes rising

    def at(self, num_bytes: float) -> float:
        """Seconds for so many bytes."""
        points = self.points
        if len(points) == 1 or num_bytes <= points[0][0]:
            return points[0][1]
        right = min(bisect_left(points, (num_bytes, 0.0)), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return max(0.0, y0 + (y1 - y0) / (x1 - x0) * (num_bytes - x0))


@dataclass(frozen=True)
class CollectiveCosts:
    """One kind of collective.

    Attributes:
        latency_s: of the smallest one, alone.
        occupied: how long the link is taken, one after another, by the bytes that a rank sends
            (of an all-reduce: by the bytes of its tensor).
        cpu_s_per_byte: processor time that a rank's threads spend on moving a byte.
        beside_backward: share of its speed that the link keeps while gradients are computed: moving
            bytes takes threads, and they may find no processor.
    """

    latency_s: float
    occupied: Curve
    cpu_s_per_byte: float = 0.0
    beside_backward: float = 1.0


@dataclass(frozen=True)
class LinkCosts:
    """A rank's way to the others. `all_reduce` by dtype of the tensor."""

    scatter: CollectiveCosts
    gather: CollectiveCosts
    all_reduce: Mapping[torch.dtype, CollectiveCosts]


@dataclass(frozen=True)
class CodecCosts:
    """Seconds on one thread. reduce: per element that a rank owns; check: per byte that arrives."""

    encode_per_element: float
    reduce_per_element: float
    decode_per_element: float
    check_per_byte: float


@dataclass(frozen=True)
class CastCosts:
    """Of a backend hook, per element: before the all-reduce on DDP's thread, and after it."""

    before_per_element: float
    after_per_element: float


@dataclass(frozen=True)
class Parameter:
    """One parameter that DDP reduces."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ParameterCodec:
    """What a configuration does with a parameter: codec, (worker, owner) residual, momentum."""

    codec: CodecSpec
    residuals: tuple[bool, bool]
    momentum: bool


@dataclass(frozen=True)
class StepProfile:
    """A training step without communication, on one rank.

    Attributes:
        total_s: the whole step.
        backward_end_s: from its begin to the end of the backward pass.
        ready_s: from its begin until the gradient of each parameter was there.
        spare_cores: processors that a rank has beside the one that runs the backward pass. Below 1,
            what other threads compute meanwhile holds that up.
        waiting_s: how much later the backward pass ends because ranks wait for each other; found by
            measuring one hook.
    """

    total_s: float
    backward_end_s: float
    ready_s: tuple[float, ...]
    spare_cores: float
    waiting_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Everything that was measured, or assumed, beside the step itself."""

    world_size: int
    link: LinkCosts
    casts: Mapping[str, CastCosts]  # by name, of BACKEND_HOOKS
    codecs: Mapping[ParameterCodec, CodecCosts]
