"""The costs of the parts of a step, in seconds and bytes: the inputs of a prediction."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from gradferry.core.codec_spec import CodecSpec
from gradferry.core.nodes import Nodes


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of bytes, interpolated linearly between a few points.

    Below the first point, the time of that point; above the last, the slope of the last two.
    """

    points: tuple[tuple[float, float], ...]  # (bytes, seconds), bytes rising

    def at(self, num_bytes: float) -> float:
        """Seconds for this number of bytes."""
        points = self.points
        if len(points) == 1 or num_bytes <= points[0][0]:
            return points[0][1]
        right = min(bisect_left(points, (num_bytes, 0.0)), len(points) - 1)
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return max(0.0, y0 + (y1 - y0) / (x1 - x0) * (num_bytes - x0))


@dataclass(frozen=True)
class CollectiveCosts:
    """The costs of one kind of collective.

    Attributes:
        latency_s: seconds of the smallest one, alone.
        occupied: seconds that one of many collectives occupies the link, by the bytes that a rank
            sends (for an all-reduce: the bytes of its tensor).
        cpu_s_per_byte: processor seconds that a rank's threads take per byte.
        beside_backward: fraction of its speed that the link keeps while gradients are computed,
            when the threads that send and receive compete for processors.
        in_line: whether a collective has arrived when it no longer occupies the link, as one that
            runs on a stream; else it arrives `latency_s` later, while others follow.
    """

    latency_s: float
    occupied: Curve
    cpu_s_per_byte: float = 0.0
    beside_backward: float = 1.0
    in_line: bool = False


class Engine(Enum):
    """What exchanges the chunks, and so the order of their work."""

    HOST = "host"  # two threads
    STREAMS = "streams"  # two streams of a device, beside that of the backend
    STAGED = "staged"  # the same, with a thread that waits for every copy and message


@dataclass(frozen=True)
class LocalCosts:
    """What the ranks of a node do among themselves, where nodes have several.

    Attributes:
        scatter: of gradients to the delegates of their columns.
        forward: of what was gathered, to siblings.
        shares_memory: whether all else than the headers of messages lies in memory of all siblings.
    """

    scatter: CollectiveCosts
    forward: CollectiveCosts
    shares_memory: bool = False


@dataclass(frozen=True)
class LinkCosts:
    """The collectives of a rank; `all_reduce` by dtype of the tensor. `engine`: that posts them.
    scatter, gather: between peers, of all columns at once. local: None in the flat exchange.
    """

    scatter: CollectiveCosts
    gather: CollectiveCosts
    all_reduce: Mapping[torch.dtype, CollectiveCosts]
    engine: Engine = Engine.HOST
    local: LocalCosts | None = None


@dataclass(frozen=True)
class CodecCosts:
    """Seconds on one thread, or on a device. reduce: per element that a rank owns; check: per byte
    received, 0 if the others contain it; launch: of a kernel, however small its chunk, which has
    tiles of all codecs in it.
    """

    encode_per_element: float
    reduce_per_element: float
    decode_per_element: float
    check_per_byte: float
    encode_launch: float = 0.0
    reduce_launch: float = 0.0
    decode_launch: float = 0.0


@dataclass(frozen=True)
class NodeCosts:
    """Seconds on one thread, or on a device: to copy an element for a sibling; to add up the
    gradients of all siblings, per element of the sum; launch: of the kernel, however small its
    chunk.
    """

    pack_per_element: float
    sum_per_element: float
    pack_launch: float = 0.0
    sum_launch: float = 0.0


@dataclass(frozen=True)
class CastCosts:
    """Seconds of a backend hook per element, before the all-reduce (on DDP's thread) and after."""

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
    """Codec, (worker, owner) residual and momentum of a parameter under a configuration."""

    codec: CodecSpec
    residuals: tuple[bool, bool]
    momentum: bool


@dataclass(frozen=True)
class StepProfile:
    """A training step without communication, on one rank.

    Attributes:
        total_s: seconds of the whole step.
        backward_end_s: seconds from its begin to the end of the backward pass.
        ready_s: for each parameter, seconds from the begin until its gradient was ready.
        spare_cores: processors of a rank besides the one that runs the backward pass. Below 1, the
            work of other threads delays the backward pass. On a device: the share of the time of
            the engine's kernels in which the backward pass goes on.
        waiting_s: seconds by which the backward pass ends later because ranks wait for each other;
            derived from the measurement of one hook.
    """

    total_s: float
    backward_end_s: float
    ready_s: tuple[float, ...]
    spare_cores: float
    waiting_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """All costs except those of the step itself, measured or assumed. For one exchange, between
    `nodes`.
    """

    nodes: Nodes
    link: LinkCosts
    casts: Mapping[str, CastCosts]  # by name, of BACKEND_HOOKS
    codecs: Mapping[ParameterCodec, CodecCosts]  # with a message from every node
    node: NodeCosts | None = None  # None in the flat exchange

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.nodes.world_size
