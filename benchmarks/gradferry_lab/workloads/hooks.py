"""Attaches hooks to a model under DDP by name, and counts the bytes that hooks send.

`torch:fp32` is DDP's plain all-reduce. PyTorch does not count what it sends, so bytes of
`torch:...` hooks, of `sync` and of `off` are computed for a bandwidth-optimal all-reduce; bytes of
codecs are counted as they are handed to the transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from gradferry.averaging.handle import Averaging
from gradferry.core.codec_spec import AUTO
from gradferry.core.config import make_config
from gradferry.core.engine import planned_bytes
from gradferry.core.nodes import AUTO as FOUND_NODES
from gradferry.ddp.attach import attach
from gradferry.ddp.auto import chosen_by
from gradferry.ddp.model import reduced_parameters
from gradferry.diagnosis import TORCH_DTYPES
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from gradferry_lab.workloads.bucket_times import BucketTimes
from gradferry_lab.workloads.hook_names import (
    NO_HOOK,
    PLAIN_DDP,
    POWERSGD,
    SYNC_HOOK,
    check_hook,
    powersgd_rank,
    split_options,
)
from gradferry_lab.workloads.sync_hook import sync_hook

_POWERSGD_START = 10  # PyTorch's hook sends dense gradients before this step
_POWERSGD_MIN_RATE = 2  # and never compresses a matrix by less than this
COMPRESS_FROM = 2  # for timing: the first step in which hooks can compress
_TORCH_FUNCTIONS = {
    PLAIN_DDP: default_hooks.allreduce_hook,  # what DDP does without a hook
    "torch:fp16": default_hooks.fp16_compress_hook,
    "torch:bf16": default_hooks.bf16_compress_hook,
}
PHASES = ("encode_ms", "network_ms", "reduce_ms", "decode_ms")  # of HookState.stats


class HookHandle(Protocol):
    """A hook registered on one model."""

    @property
    def name(self) -> str: ...

    @property
    def measured(self) -> bool:
        """False: wire_bytes is computed, because PyTorch does not count."""

    @property
    def state(self) -> Averaging | None:
        """The state of a gradferry hook; None of other hooks."""

    @property
    def bucket_times(self) -> BucketTimes | None:
        """When buckets travel under a hook of PyTorch's; None where that is not noted."""

    @property
    def dense_bytes(self) -> int:
        """What an all-reduce of fp32 gradients would send per rank and step, where the hook is."""

    def wire_bytes(self, steps: int) -> int:
        """Bytes this rank has sent to others in the first `steps` steps, the last one just done."""

    def formula_bytes(self) -> int:
        """Bytes this rank sends in a step like the last one by formula, once DDP has rebuilt its
        buckets.
        """

    def bytes_to_other_hosts(self, hosts: Sequence[int]) -> list[int]:
        """The formula_bytes of every rank, without what it sends to ranks on its own host.

        hosts: the host of every rank.
        """


def phases_of(stats: Mapping[str, Any]) -> dict[str, float]:
    """The times of PHASES, sums since the start."""
    return {key: float(stats[key]) for key in PHASES}


def timed_hooks(names: Sequence[str]) -> tuple[str, ...]:
    """Each once, and `none` first, which all others are compared with."""
    return tuple(dict.fromkeys([NO_HOOK, *names]))


def bucket_caps(
    name: str, model: nn.Module, wanted: Sequence[float | None]
) -> Sequence[float | None]:
    """Those of the `wanted` bucket_cap_mb that a hook can work with; None is DDP's own choice.

    PowerSGD gets one bucket: over gloo, its collectives of several buckets mix and abort.
    """
    if not name.startswith(POWERSGD):
        return wanted
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return [num_bytes // 2**20 + 1]


def steps_until_steady(name: str) -> int:
    """Number of steps after which all steps of a hook are alike, if it compresses early.

    DDP arranges its buckets in the first step, hooks that start with dense steps have two of them,
    and the step after that is the first that is like all others. `auto` measures for longer.
    """
    if name.partition("+")[0] != AUTO:
        return COMPRESS_FROM + 1
    return chosen_by(make_config(*codec_options(name, COMPRESS_FROM))) + 1


def apply_hook(
    ddp: DistributedDataParallel,
    name: str,
    *,
    seed: int = 0,
    compress_from: int | None = None,
    nodes: object = FOUND_NODES,
) -> HookHandle:
    """Registers the named hook on `ddp`, which must have none yet.

    compress_from: for timing, the step from which on a hook that starts with dense steps (PowerSGD,
        warmup_steps) compresses; None: when it would.
    nodes: as for `attach`, of a codec.
    Raises ConfigError when no hook has this name.
    """
    dense_bytes = _dense_bytes(ddp)
    # Under DDP, too: a faster network does not save the copies of gradients into buckets.
    if name == NO_HOOK:
        ddp.register_comm_hook(None, debugging_hooks.noop_hook)
        return ComputedHook(name, dense_bytes, 0)
    if name == SYNC_HOOK:
        ddp.register_comm_hook(ddp.process_group, sync_hook)
        num_bytes = all_reduce_bytes(1, 4, ddp.process_group.size())
        return ComputedHook(name, dense_bytes, num_bytes)
    check_hook(name)
    if name.startswith("torch:"):
        return _apply_torch_hook(ddp, name, compress_from or _POWERSGD_START)
    codec, options = codec_options(name, compress_from)
    state = attach(ddp, codec, seed=seed, nodes=nodes, **options)
    if state.config.passes_through:
        return ComputedHook(name, dense_bytes, dense_bytes, state=state)
    return _CodecHook(name, state, dense_bytes, ddp.find_unused_parameters)


def codec_options(name: str, compress_from: int | None) -> tuple[str, dict[str, Any]]:
    """The codec of a hook, and its other arguments of attach.

    compress_from: as for `apply_hook`.
    """
    codec, options = split_options(name)
    if compress_from is not None and "warmup_steps" in options:
        options["warmup_steps"] = min(options["warmup_steps"], compress_from)
    return codec, options


def all_reduce_bytes(num_elements: int, item_bytes: int, world_size: int) -> int:
    """Bytes each rank sends in a bandwidth-optimal all-reduce: 2 (W-1)/W of the data, rounded."""
    return round(2 * (world_size - 1) * num_elements * item_bytes / world_size)


def ring_exchange(num_bytes: int, hosts: Sequence[int]) -> list[int]:
    """Bytes that each rank sends to other hosts in ring all-reduces: each rank sends `num_bytes` to
    the one after it, the last to the first. hosts: of every rank.
    """
    after = [*hosts[1:], hosts[0]]
    return [num_bytes * (one != other) for one, other in zip(hosts, after, strict=True)]


class _CodecHook:
    """A gradferry codec: the engine counts bytes. If `auto` has chosen `off`, they are computed as
    if all steps had used `off`.
    """

    def __init__(
        self,
        name: str,
        state: Averaging,
        dense_bytes: int,
        find_unused_parameters: bool,
    ) -> None:
        self.name = name
        self.state = state
        self.bucket_times: BucketTimes | None = None
        self.dense_bytes = dense_bytes
        self._find_unused_parameters = find_unused_parameters

    @property
    def measured(self) -> bool:
        return not self.state.passes_through

    def wire_bytes(self, steps: int) -> int:
        if not self.measured:
            return steps * self.dense_bytes
        return int(self.state.stats()["wire_bytes"])

    def formula_bytes(self) -> int:
        return self.bytes_to_other_hosts(self.state.nodes.of_rank)[self.state.rank]

    def bytes_to_other_hosts(self, hosts: Sequence[int]) -> list[int]:
        if not self.measured:
            return ring_exchange(self.dense_bytes, hosts)
        config, stats = self.state.config, self.state.stats()
        sent = planned_bytes(
            config,
            self.state.parameters,
            self.state.nodes,
            stats["step_buckets"],
            hosts=hosts,
            in_warmup=0 < stats["steps"] <= config.warmup_steps,  # the last step
            find_unused_parameters=self._find_unused_parameters,
        )
        return [elsewhere for elsewhere, _ in sent]


@dataclass(frozen=True)
class ComputedHook:
    """A hook of PyTorch's, or its plain all-reduce: bytes follow from what it must send."""

    name: str
    dense_bytes: int  # per step, of fp32 gradients
    step_bytes: int
    dense_steps: int = 0  # at the start
    measured: bool = False
    state: Averaging | None = None
    bucket_times: BucketTimes | None = None

    def wire_bytes(self, steps: int) -> int:
        dense_steps = min(steps, self.dense_steps)
        return dense_steps * self.dense_bytes + (steps - dense_steps) * self.step_bytes

    def formula_bytes(self) -> int:
        return self.step_bytes

    def bytes_to_other_hosts(self, hosts: Sequence[int]) -> list[int]:
        return ring_exchange(self.step_bytes, hosts)


def _apply_torch_hook(ddp: DistributedDataParallel, name: str, powersgd_start: int) -> HookHandle:
    group = ddp.process_group
    dense_bytes = _dense_bytes(ddp)
    if name.startswith(POWERSGD):
        rank = powersgd_rank(name)
        state = powerSGD_hook.PowerSGDState(
            group, rank, powersgd_start, min_compression_rate=_POWERSGD_MIN_RATE
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elements = sum(_powersgd_elements(p.shape, rank) for _, p in reduced_parameters(ddp))
        step_bytes = all_reduce_bytes(elements, 4, group.size())
        return ComputedHook(name, dense_bytes, step_bytes, powersgd_start)
    times = BucketTimes(ddp, group, _TORCH_FUNCTIONS[name])
    if name != PLAIN_DDP:
        times.register()
    step_bytes = dense_bytes * TORCH_DTYPES[name].itemsize // 4
    return ComputedHook(name, dense_bytes, step_bytes, bucket_times=times)


def _dense_bytes(ddp: DistributedDataParallel) -> int:
    """Bytes a rank sends when fp32 gradients of the whole model are all-reduced."""
    elements = sum(p.numel() for _, p in reduced_parameters(ddp))
    return all_reduce_bytes(elements, 4, ddp.process_group.size())


def _powersgd_elements(shape: torch.Size, rank: int) -> int:
    """Elements that PowerSGD (Vogels et al. 2019) all-reduces for a parameter: P and Q, or all."""
    elements = shape.numel()
    if len(shape) <= 1:
        return elements
    rows, columns = shape[0], elements // shape[0]
    factors = (rows + columns) * min(rows, columns, rank)
    return factors if factors * _POWERSGD_MIN_RATE < elements else elements
