"""A model that all ranks train with a hook: whole on each under DDP, or sharded by FSDP2.

Hybrid sharding, ``hsdp``: gradients are reduced within replicas of the model, and the hook averages
over replicas what each rank has then. One replica over all ranks, ``fsdp``: the hook reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from gradferry import fsdp
from gradferry.core.nodes import AUTO as FOUND_NODES
from gradferry.core.nodes import Nodes
from gradferry.errors import ConfigError
from gradferry.fsdp.model import sharded_modules
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradferry_lab.workloads.hook_names import NO_HOOK, RULERS, check_hook, hook_config
from gradferry_lab.workloads.hooks import (
    ComputedHook,
    HookHandle,
    all_reduce_bytes,
    apply_hook,
    bucket_caps,
    codec_handle,
    codec_options,
)

DDP = "ddp"
HSDP = "hsdp"
FSDP = "fsdp"
PARALLEL = (DDP, HSDP, FSDP)
NATIVE = "torch:fp32"  # the collective of what shards the model

BuildModel = Callable[[], nn.Module]


def refusal(parallel: str, hook: str) -> str | None:
    """Why a hook, whose name is right, cannot be used; None: it can."""
    if parallel == DDP or hook in (NO_HOOK, NATIVE):
        return None
    if hook in RULERS or hook.startswith("torch:"):
        return (
            f"hook {hook!r} is for DDP; under {parallel} there are {NO_HOOK}, {NATIVE} (FSDP2's "
            "own collective), off, and codecs"
        )
    config = hook_config(hook)
    if config.chooses:
        return f"hook {hook!r} is for DDP; under {parallel} name a codec, such as q4"
    if config.momentum and parallel == FSDP:
        return f"hook {hook!r}: momentum mode needs means on all ranks, which {parallel} has not"
    if config.momentum and config.warmup_steps:
        return (
            f"hook {hook!r}: OneBitAdam, which dense steps before momentum mode are for, is for "
            "DDP; leave out warmup_steps, for AdamW behind momentum"
        )
    return None


def check_parallel(parallel: str, hook: str) -> None:
    """Raises ConfigError when the hook is unknown, or cannot be used so."""
    if hook not in RULERS:
        check_hook(hook)
    why = refusal(parallel, hook)
    if why is not None:
        raise ConfigError(why)


def mesh_for(parallel: str, hosts: Nodes) -> DeviceMesh | None:
    """The mesh over which models are sharded, of replicas and shards; None under DDP. Collective.

    Under ``hsdp`` a host has a replica; where all ranks are on one, half of them have. Raises
    ConfigError where replicas would not have equally many ranks.
    """
    if parallel == DDP:
        return None
    replicas = hosts.members
    if parallel == FSDP:
        replicas = (tuple(range(hosts.world_size)),)
    elif len(replicas) == 1:
        ranks, half = replicas[0], hosts.world_size // 2
        replicas = (ranks[:half], ranks[half:])
    if len(set(map(len, replicas))) != 1:
        raise ConfigError(
            f"--parallel {parallel}: {hosts.describe()} are not replicas of equally many ranks; "
            "start as many ranks on every host, or on one host an even number of them"
        )
    return DeviceMesh("cpu", torch.tensor(replicas), mesh_dim_names=("replica", "shard"))


class ParallelModel(Protocol):
    """A model on all ranks, with a hook."""

    @property
    def model(self) -> nn.Module:
        """What is called, and whose parameters are optimized."""

    @property
    def handle(self) -> HookHandle:
        """The handle of the hook."""

    def whole(self) -> nn.Module:
        """The model as every rank can call it alone, to look at and not to train. Collective."""


def parallelize(
    build_model: BuildModel,
    hook: str,
    mesh: DeviceMesh | None,
    *,
    bucket_cap_mb: float | None = None,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    compress_from: int | None = None,
    nodes: object = FOUND_NODES,
) -> ParallelModel:
    """Builds a model on every rank, for training with the named hook. Collective.

    Args:
        build_model: gives the same on every rank.
        hook: its name.
        mesh: of `mesh_for`.
        bucket_cap_mb, group: of DDP.
        seed, compress_from, nodes: see `apply_hook`.

    Raises:
        ConfigError: the hook is unknown, or cannot be used so.
    """
    if mesh is None:
        model = build_model()
        (cap,) = bucket_caps(hook, model, [bucket_cap_mb])
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap)
        return _Ddp(ddp, apply_hook(ddp, hook, seed=seed, compress_from=compress_from, nodes=nodes))
    check_parallel(HSDP if mesh["replica"].size() > 1 else FSDP, hook)
    return _Sharded(build_model, hook, mesh, seed=seed, compress_from=compress_from, nodes=nodes)


class _Ddp:
    def __init__(self, model: DistributedDataParallel, handle: HookHandle) -> None:
        self.model = model
        self.handle = handle

    def whole(self) -> nn.Module:
        module: nn.Module = self.model.module
        return module


class _Sharded:
    def __init__(
        self,
        build_model: BuildModel,
        hook: str,
        mesh: DeviceMesh,
        *,
        seed: int,
        compress_from: int | None,
        nodes: object,
    ) -> None:
        from torch.distributed.fsdp import fully_shard

        self._build_model = build_model
        self.model = build_model()
        replicas, shards = mesh["replica"], mesh["shard"]
        averages = replicas.size() > 1
        for module in (*_blocks(self.model), self.model):
            fully_shard(module, mesh=mesh if averages and hook == NATIVE else shards)
        modules = sharded_modules(self.model)
        elements = sum(module.num_elements for module in modules)
        if averages:
            dense_bytes, groups = all_reduce_bytes(elements, 4, replicas.size()), mesh.mesh.T
        else:  # half an all-reduce of what all ranks have
            elements *= shards.size()
            dense_bytes, groups = all_reduce_bytes(elements, 4, shards.size()) // 2, mesh.mesh
        self.handle: HookHandle
        if hook in (NO_HOOK, NATIVE):
            if hook == NO_HOOK and not averages:
                for each in modules:
                    each.reduce_scatter = _OwnGradients()
            sent = dense_bytes if hook == NATIVE else 0
            self.handle = ComputedHook(hook, dense_bytes, sent, groups=groups.tolist())
            return
        codec, options = codec_options(hook, compress_from)
        if averages:
            state = fsdp.attach(self.model, codec, replicas, seed=seed, nodes=nodes, **options)
        else:
            state = fsdp.attach(self.model, codec, all_gather="off", seed=seed, **options)
        self.handle = codec_handle(hook, state, dense_bytes, groups=groups.tolist())

    def whole(self) -> nn.Module:
        from torch.distributed.tensor import DTensor

        with torch.random.fork_rng():
            whole = self._build_model()
        values = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in self.model.state_dict().items()
        }
        whole.load_state_dict(values)
        return whole


class _OwnGradients:
    """In place of FSDP2's reduce-scatter: every rank keeps its part of its own gradients."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """What models are made of: the outermost modules in lists and sequences."""
    for child in model.children():
        listed = isinstance(model, nn.ModuleList | nn.Sequential)
        if not listed or isinstance(child, nn.ModuleList):
            yield from _blocks(child)
        elif any(parameter.requires_grad for parameter in child.parameters()):
            yield child
