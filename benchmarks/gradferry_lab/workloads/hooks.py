"""Hooks by name: their options, how they are attached to a model under DDP, the bytes they send.

Names are PyTorch's as `torch:...`, and every gradferry codec. Options of `attach` may follow a
codec: `sign1+momentum=0.9+warmup_steps=100`. `none` does not communicate, and `sync` sends one
element per step; ranks diverge, so both are for timing only. Sharded models have options of their
own, those of `gradferry.fsdp.attach`, and the `param_dtype` of FSDP2's mixed precision:
`q4+all_gather=q8+param_dtype=bf16`.

`torch:fp32` is DDP's plain all-reduce. PyTorch does not count what it sends, so bytes of
`torch:...` hooks, of `sync` and of `off` are computed for a bandwidth-optimal all-reduce; bytes of
codecs are counted as they are handed to the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gradferry import _native
from gradferry.averaging.handle import Averaging
from gradferry.core.codec_spec import AUTO, OFF
from gradferry.core.config import Config, make_config
from gradferry.core.engine import planned_bytes
from gradferry.core.names import closest
from gradferry.core.nodes import AUTO as FOUND_NODES
from gradferry.ddp.attach import attach
from gradferry.ddp.auto import candidates, first_trial
from gradferry.ddp.model import reduced_parameters
from gradferry.ddp.trial import COUNTED_STEPS, MOST_TURNS, SETTLING_STEPS
from gradferry.diagnosis import TORCH_DTYPES
from gradferry.errors import ConfigError
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

NO_HOOK = "none"  # does not communicate at all
SYNC_HOOK = "sync"  # ranks wait for each other once per step: what no hook can avoid
RULERS = (NO_HOOK, SYNC_HOOK)  # what hooks are compared with; they do not train
# Backend hooks: those that use the all-reduce of DDP's process group, with its dtype.
BACKEND_HOOKS: Mapping[str, torch.dtype] = {**TORCH_DTYPES, OFF: torch.float32}
PLAIN_DDP = "torch:fp32"  # DistributedDataParallel without a hook
POWERSGD = "torch:powersgd"
TORCH_HOOKS = (*TORCH_DTYPES, f"{POWERSGD}:4")
_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "error_feedback": str,
    "momentum": float,
    "warmup_steps": int,
    "warmup": str,
}
PARAM_DTYPE = "param_dtype"
# FSDP2 alone, by the dtype in which it gathers parameters; None: in that of the parameters. It
# reduces gradients in fp32.
SHARDED_NATIVE: Mapping[str, torch.dtype | None] = {PLAIN_DDP: None, "torch:bf16": torch.bfloat16}


def _one_of(choices: Mapping[str, Any]) -> Callable[[str], Any]:
    def chosen(text: str) -> Any:
        if text not in choices:
            raise ValueError(text)
        return choices[text]

    return chosen


_SHARDED_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    **_OPTIONS,
    "reduce_scatter": str,
    "all_gather": str,
    "keep_gathered": _one_of({"True": True, "False": False}),
    PARAM_DTYPE: _one_of({"bf16": torch.bfloat16}),
}
_POWERSGD_START = 10  # PyTorch's hook sends dense gradients before this step
_POWERSGD_MIN_RATE = 2  # and never compresses a matrix by less than this
COMPRESS_FROM = 2  # for timing: the first step in which hooks can compress
_CASTING = {
    "torch:fp16": default_hooks.fp16_compress_hook,
    "torch:bf16": default_hooks.bf16_compress_hook,
}
PHASES = ("encode_ms", "network_ms", "reduce_ms", "decode_ms")  # of HookState.stats


def check_hook(name: str) -> None:
    """Raises ConfigError, with the closest match, when no hook that trains has this name."""
    codecs = [str(codec["name"]) for codec in _native.codecs()]
    if name in TORCH_DTYPES:
        return
    if name.startswith(f"{POWERSGD}:"):
        powersgd_rank(name)
        return
    codec, options = split_options(name)
    if codec.partition(":")[0] in (*codecs, OFF, AUTO):
        make_config(codec, options)
    else:
        choices = (*TORCH_HOOKS, *codecs, OFF, AUTO)
        raise ConfigError(
            f"unknown hook {name!r}; hooks are {', '.join(choices)}{closest(name, choices)}"
        )


def hook_config(name: str) -> Config:
    """The configuration of the gradferry hook with this name. Raises ConfigError."""
    codec, options = split_options(name)
    return make_config(codec, options)


def split_options(name: str, *, sharded: bool = False) -> tuple[str, dict[str, Any]]:
    """`codec+option=value+...` as the codec and the options that follow it.

    sharded: whether it is a hook of sharded models.
    Raises ConfigError for an option that cannot follow a codec, or a value that it cannot have.
    """
    known = _SHARDED_OPTIONS if sharded else _OPTIONS
    codec, *texts = name.split("+")
    options = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key not in known:
            raise ConfigError(
                f"hook {name!r}: {key!r} is no argument of attach that can be given here; choose "
                f"from {', '.join(known)}{closest(key, list(known))}"
            )
        try:
            options[key] = known[key](value)
        except ValueError:
            raise ConfigError(f"hook {name!r}: {key} cannot be {value!r}") from None
    return codec, options


def powersgd_rank(name: str) -> int:
    """The RANK of `torch:powersgd:RANK`. Raises ConfigError when it is not a number from 1."""
    text = name.partition(":powersgd:")[2]
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"hook {name!r}: rank {text!r} must be a whole number from 1, as in 4")
    return int(text)


@dataclass(frozen=True)
class How:
    """How a hook is applied.

    Attributes:
        seed, nodes: as for `attach`, of a codec.
        compress_from: for timing, the step from which on a hook that starts with dense steps
            (PowerSGD, warmup_steps) compresses; None: when it would.
        bucket_cap_mb, group: of DDP.
    """

    seed: int = 0
    compress_from: int | None = None
    nodes: object = FOUND_NODES
    bucket_cap_mb: float | None = None
    group: dist.ProcessGroup | None = None


class HookHandle:
    """A hook registered on one model.

    Attributes:
        name: of the hook.
        state: of a gradferry hook; None of other hooks.
        dense_bytes: what an all-reduce of fp32 gradients would send per rank and step, where the
            hook is.
    """

    name: str
    state: Averaging | None
    dense_bytes: int

    @property
    def measured(self) -> bool:
        """False: wire_bytes is computed, because PyTorch does not count."""
        return False

    def wire_bytes(self, steps: int) -> int:
        """Bytes this rank has sent to others in the first `steps` steps, the last one just done."""
        raise NotImplementedError

    def formula_bytes(self) -> int:
        """Bytes this rank sends in a step like the last one by formula, once DDP has rebuilt its
        buckets.
        """
        return self.bytes_to_other_hosts(range(dist.get_world_size()))[dist.get_rank()]

    def bytes_to_other_hosts(self, hosts: Sequence[int]) -> list[int]:
        """The formula_bytes of every rank, without what it sends to ranks on its own host.

        hosts: the host of every rank.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ParallelModel:
    """A model on all ranks, with a hook.

    Attributes:
        model: what is called, and whose parameters are optimized.
        handle: of the hook.
        whole: gives the model as every rank can call it alone, to look at and not to train.
            Collective.
    """

    model: nn.Module
    handle: HookHandle
    whole: Callable[[], nn.Module]


def phases_of(stats: Mapping[str, Any]) -> dict[str, float]:
    """The times of PHASES, sums since the start."""
    return {key: float(stats[key]) for key in PHASES}


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


def chosen_by(config: Config) -> int:
    """The step, counted from 0, that begins with the first choice of `auto` at the latest, if every
    parameter is used and every mean is finite.
    """
    # There may be two exchanges; passing through is the same in both.
    turns = MOST_TURNS * sum(1 + each.needs_memory for each in candidates(config, []))
    delivering = turns + 1  # one before each turn, and before the one that is chosen
    return first_trial(config) + turns * (SETTLING_STEPS + COUNTED_STEPS) + delivering


def apply_hook(ddp: DistributedDataParallel, name: str, how: How = How()) -> HookHandle:
    """Registers the named hook on `ddp`, which must have none yet. Raises ConfigError when no hook
    has this name.
    """
    dense_bytes = _dense_bytes(ddp)
    # Under DDP, too: a faster network does not save the copies of gradients into buckets.
    if name == NO_HOOK:
        ddp.register_comm_hook(None, debugging_hooks.noop_hook)
        return ComputedHook(name, dense_bytes, 0)
    if name == SYNC_HOOK:
        # DDP compares the annotations of a hook with the classes themselves; a lambda has none.
        ddp.register_comm_hook(ddp.process_group, lambda group, bucket: _sync(group, bucket))
        num_bytes = all_reduce_bytes(1, 4, ddp.process_group.size())
        return ComputedHook(name, dense_bytes, num_bytes)
    check_hook(name)
    if name.startswith("torch:"):
        return _apply_torch_hook(ddp, name, how.compress_from or _POWERSGD_START)
    codec, options = codec_options(name, how.compress_from)
    state = attach(ddp, codec, seed=how.seed, nodes=how.nodes, **options)
    if state.config.passes_through:
        return ComputedHook(name, dense_bytes, dense_bytes, state=state)
    return _CodecHook(name, state, dense_bytes, ddp.find_unused_parameters)


def _sync(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hands every bucket back at once, as it is. With the last one of a backward pass it
    all-reduces one element and waits, on a GPU in the current stream: at the instant at which a
    hook's last result is waited for. Ranks that train together wait for the slowest and for one
    message at least, which no codec avoids.
    """
    if bucket.is_last():
        dist.all_reduce(torch.zeros(1, device=bucket.buffer().device), group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def codec_options(
    name: str, compress_from: int | None, *, sharded: bool = False
) -> tuple[str, dict[str, Any]]:
    """`split_options`, with warm-up steps as `How` has them."""
    codec, options = split_options(name, sharded=sharded)
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


@dataclass(frozen=True)
class _CodecHook(HookHandle):
    """A gradferry codec: the engine counts bytes. If `auto` has chosen `off`, they are computed as
    if all steps had used `off`.
    """

    name: str
    state: Averaging
    dense_bytes: int
    find_unused_parameters: bool

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
            find_unused_parameters=self.find_unused_parameters,
        )
        return [elsewhere for elsewhere, *_ in sent]


@dataclass(frozen=True)
class ComputedHook(HookHandle):
    """A hook of PyTorch's, or its plain all-reduce: bytes follow from what it must send."""

    name: str
    dense_bytes: int  # per step, of fp32 gradients
    step_bytes: int
    dense_steps: int = 0  # at the start
    state: Averaging | None = None

    def wire_bytes(self, steps: int) -> int:
        dense_steps = min(steps, self.dense_steps)
        return dense_steps * self.dense_bytes + (steps - dense_steps) * self.step_bytes

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
    if name != PLAIN_DDP:
        ddp.register_comm_hook(group, _CASTING[name])
    return ComputedHook(name, dense_bytes, dense_bytes * TORCH_DTYPES[name].itemsize // 4)


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
