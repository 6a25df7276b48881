"""A model that FSDP2 shards, with a hook on what it exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from gradferry import fsdp
from gradferry.fsdp.model import sharded_modules
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradferry_lab.workloads.hooks import (
    NO_HOOK,
    PARAM_DTYPE,
    SHARDED_NATIVE,
    HookHandle,
    How,
    ParallelModel,
    codec_options,
)
from gradferry_lab.workloads.sharded_bytes import NO_CODECS, Exchange, choice_of, exchanges_of


def sharded(
    build_model: Callable[[], nn.Module], hook: str, mesh: DeviceMesh, how: How
) -> ParallelModel:
    """For arguments see `parallel.parallelize`."""
    model = build_model()
    averages = mesh["replica"].size() > 1
    codec, options, dtype = _asked(hook, how)
    _shard(model, mesh if averages and hook != NO_HOOK else mesh["shard"], dtype)
    modules = sharded_modules(model)
    state: fsdp.ShardedState | None = None
    if averages:
        options["nodes"] = how.nodes
    if codec is not None:
        state = fsdp.attach(model, codec, seed=how.seed, **options)
    elif hook == NO_HOOK and not averages:
        for module in modules:
            module.reduce_scatter = _OwnGradients()
            module.all_gather = _OwnParameters()
    ranks = mesh.mesh.tolist()
    own = exchanges_of(modules, NO_CODECS, ranks)
    exchanges = own if hook != NO_HOOK else []
    if codec is not None:
        exchanges = exchanges_of(modules, choice_of(hook, modules, averages=averages), ranks)
    handle = _Handle(hook, state, exchanges, own)
    return ParallelModel(model, handle, lambda: _whole(build_model, model))


def _whole(build_model: Callable[[], nn.Module], model: nn.Module) -> nn.Module:
    from torch.distributed.tensor import DTensor

    with torch.random.fork_rng():
        whole = build_model()
    values = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }
    whole.load_state_dict(values)
    return whole


def _asked(hook: str, how: How) -> tuple[str | None, dict[str, Any], torch.dtype | None]:
    """The codec, None without one; other arguments of attach; the dtype of gathered parameters."""
    if hook == NO_HOOK or hook in SHARDED_NATIVE:
        return None, {}, SHARDED_NATIVE.get(hook)
    codec, options = codec_options(hook, how.compress_from, sharded=True)
    dtype = options.pop(PARAM_DTYPE, None)
    return codec, options, dtype


def _shard(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Shards every block, and what is left. A loss is computed in fp32, whatever `dtype` is."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for module in (*_blocks(model), model):
        policy = MixedPrecisionPolicy()
        if dtype is not None:
            output = torch.float32 if module is model else None
            policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, output_dtype=output)
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """What models are made of: the outermost modules in lists and sequences."""
    for child in model.children():
        listed = isinstance(model, nn.ModuleList | nn.Sequential)
        if not listed or isinstance(child, nn.ModuleList):
            yield from _blocks(child)
        elif any(parameter.requires_grad for parameter in child.parameters()):
            yield child


class _Handle(HookHandle):
    """Bytes of codecs are counted by their engines; those of FSDP2's own exchanges are computed.

    exchanges: of a step. own: the same of FSDP2 alone.
    """

    def __init__(
        self,
        name: str,
        state: fsdp.ShardedState | None,
        exchanges: Sequence[Exchange],
        own: Sequence[Exchange],
    ) -> None:
        self.name, self.state = name, state
        self._exchanges = exchanges
        self.dense_bytes = sum(each.ring_bytes(item_bytes=4) for each in own)

    @property
    def measured(self) -> bool:
        return bool(self._exchanges) and all(each.is_counted for each in self._exchanges)

    def wire_bytes(self, steps: int) -> int:
        stats = self.state.stats()["exchanges"] if self.state else {}
        return sum(
            int(stats[each.name]["wire_bytes"]) if each.is_counted else steps * each.ring_bytes()
            for each in self._exchanges
        )

    def bytes_to_other_hosts(self, hosts: Sequence[int]) -> list[int]:
        steps = int(self.state.stats()["steps"]) if self.state else 0
        sent = [each.sent(hosts, steps=steps) for each in self._exchanges]
        return [sum(of_rank) for of_rank in zip([0] * len(hosts), *sent, strict=True)]


class _InOwnMemory:
    """What FSDP2 asks of a custom collective beside the call."""

    def allocate(self, size: Sequence[int], **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)


class _OwnGradients(_InOwnMemory):
    """In place of FSDP2's reduce-scatter: every rank keeps its part of its own gradients."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


class _OwnParameters(_InOwnMemory):
    """In place of FSDP2's all-gather: every rank takes its own shards for those of the others."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        for part in output_tensor.view(group.size(), -1):
            if part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor)
