"""`attach`: averages of an FSDP2 model's gradients over replicas go through a codec."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradferry import _native
from gradferry.core.config import Config, make_config
from gradferry.core.nodes import AUTO
from gradferry.core.options import WORKSPACE_CAP_MB, Options
from gradferry.errors import ConfigError
from gradferry.fsdp.model import ShardedModule, sharded_modules, unsharded_parameters
from gradferry.fsdp.replicas import ReplicaHook
from gradferry.fsdp.state import ShardedState
from gradferry.reduction.advice import watch_optimizer
from gradferry.reduction.rules import warn_about_rules
from gradferry.reduction.running import Running, note_optimizer_steps, propose
from gradferry.reduction.start import start, usable_group
from gradferry.reduction.surroundings import warn_about_surroundings

_WAY_ON = (
    "This model is finished, on all ranks, since FSDP2 does not recover from a backward pass that "
    "failed. To go on, build and shard a new one, attach, and load the last checkpoint."
)


def attach(
    model: nn.Module,
    codec: str = "q4",
    replicate_group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    rules: Sequence[Mapping[str, Any]] | None = None,
    error_feedback: str = "auto",
    momentum: float | None = None,
    warmup_steps: int = 0,
    warmup: str = "exact",
    grad_scaler: object | None = None,
    nonfinite: str = "propagate",
    exact_skip: bool = False,
    check_every: int = 0,
    seed: int = 0,
    workspace_cap_mb: float = WORKSPACE_CAP_MB,
    nodes: object = AUTO,
) -> ShardedState:
    """Hybrid sharding whose averages over replicas are compressed. Collective.

    FSDP2 shards the model over the ranks of one dimension of a mesh, and reduces gradients there as
    always. From now on the reduced shards are averaged over the ranks that hold the same shard of
    other replicas. Where replicas are on different machines, only this crosses the network.

    >>> mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replica", "shard"))
    >>> for block in (*model.blocks, model):
    ...     fully_shard(block, mesh=mesh["shard"])
    >>> state = gradferry.fsdp.attach(model, "q4", mesh["replica"])

    Call it once on every rank, after the last ``fully_shard`` and before the first backward pass.
    Replicas must begin with equal parameters.

    Args:
        model: under ``torch.distributed.fsdp.fully_shard``, over a mesh of one dimension.
        codec: see `gradferry.HookState`; without ``"auto"``, which forecasts the steps of
            DistributedDataParallel. The number of dimensions and elements that decide which
            parameters are sent as they are is that of this rank's shard.
        replicate_group: of the ranks that hold this rank's shard: a process group, or a DeviceMesh
            of one dimension.
        rules: see `gradferry.HookState`.
        error_feedback: see `gradferry.HookState`.
        momentum: see `gradferry.HookState`. Needs a gradient of every parameter in every pass.
        warmup_steps: see `gradferry.HookState`.
        warmup: see `gradferry.HookState`.
        grad_scaler: see `gradferry.HookState`.
        nonfinite: see `gradferry.HookState`.
        exact_skip: see `gradferry.HookState`. Needs a gradient of every parameter in every pass.
        check_every: see `gradferry.HookState`. Compares this shard between its replicas.
        seed: see `gradferry.HookState`.
        workspace_cap_mb: see `gradferry.HookState`.
        nodes: see `gradferry.HookState`.

    Returns:
        The hook's state. The hook lives as long as the model, whether the state is kept or not.

    Raises:
        ConfigError: an argument or the model cannot be used; nothing was changed.
        RankMismatchError: replicas differ in configuration, model, or the values of parameters;
            nothing was changed.
        PeerError: a rank did not call this, or failed to set up its connections or memory; nothing
            was changed.
        StateError: there is no process group.

    A backward pass raises PeerError, ProtocolError, StateError or DivergedError on all ranks that
    hold this shard, and so does every forward pass after it. Ranks with other shards of the same
    replica may be in a collective of FSDP2 then, and wait for these processes to end, or for the
    timeout of its group.
    """
    options = Options.among(locals())
    group = _replicate_group(replicate_group)
    modules = sharded_modules(model)
    shards = [shard for module in modules for shard in module.shards]
    device, shard_group = modules[0].device, modules[0].shard_group
    part = f"shard_{dist.get_rank(shard_group)}_of_{dist.get_world_size(shard_group)}"

    def propose_here() -> Running:
        config = make_config(options)
        _check_config(config)
        _check_modules(modules, group, shard_group)
        named = [(shard.name, shard.placeholder(device)) for shard in shards]
        record = {
            "way in": "FSDP2",
            "shard": part,
            "modules": [[module.name, len(module.shards)] for module in modules],
            "values of parameters (replicas begin equal: seed all ranks alike, or load one "
            "checkpoint)": _native.parameter_hashes([shard.values() for shard in shards]),
        }
        known_as = [shard.parameter for shard in shards]
        return propose(config, group, device, named, record, _WAY_ON, known_as=known_as)

    def build(running: Running, nonce: str) -> Running:
        running.start(group, nonce)
        return running

    running = start(group, device, propose_here, build, purpose="come to attach")
    calls = None if running.engine is None else _native.AllReducer(engine=running.engine)
    hooks = [ReplicaHook(running, modules, number, calls) for number in range(len(modules))]
    for module, hook in zip(modules, hooks, strict=True):
        module.all_reduce_hook = hook
    if running.engine is not None:
        # After a backward pass that failed, FSDP2 may leave out its hooks, and so reduce nothing.
        model.register_forward_pre_hook(_Guard(running.engine))
    note_optimizer_steps(running)
    _warn(model, modules, running)
    return ShardedState(running, hooks, part)


class _Guard:
    """Raises in the forward pass what has ended the engine."""

    def __init__(self, engine: _native.BucketEngine) -> None:
        self._engine = engine

    def __call__(self, *_: object) -> None:
        self._engine.expect_alive()


def _replicate_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if group is None:
        raise ConfigError(
            "replicate_group is missing: give the group, or the dimension of the mesh, of the "
            "ranks that hold the same shard, such as mesh['replica']"
        )
    if not isinstance(group, DeviceMesh):
        return usable_group(group)
    if group.ndim != 1:
        raise ConfigError(
            f"replicate_group is a mesh of {group.ndim} dimensions, {group}; give the dimension of "
            "the replicas alone, such as mesh['replica']"
        )
    return usable_group(group.get_group())


def _check_config(config: Config) -> None:
    if config.chooses:
        raise ConfigError(
            "codec='auto' forecasts the steps of DistributedDataParallel; name a codec for FSDP2, "
            "such as 'q4'"
        )


def _check_modules(
    modules: Sequence[ShardedModule], group: dist.ProcessGroup, shard_group: dist.ProcessGroup
) -> None:
    members = dist.get_process_group_ranks(shard_group)
    for module in modules:
        module.expect_usable()
        theirs = dist.get_process_group_ranks(module.shard_group)
        if theirs != members:
            raise ConfigError(
                f"{module.name!r} is sharded over ranks {theirs}, {modules[0].name!r} over "
                f"{members}; shard all modules over one mesh"
            )
        hook = module.all_reduce_hook
        if hook is not None:
            raise ConfigError(
                f"{module.name!r} already has an all-reduce hook, {hook!r}; FSDP2 takes one at a "
                "time"
            )
    both = set(members) & set(dist.get_process_group_ranks(group))
    if both != {dist.get_rank()}:
        raise ConfigError(
            f"ranks {sorted(both)} are in one shard group and in one replicate_group; the latter "
            "has the ranks that hold the same shard, such as mesh['replica']"
        )


def _warn(model: nn.Module, modules: Sequence[ShardedModule], running: Running) -> None:
    apart = list(unsharded_parameters(model, modules))
    if apart:
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        warnings.warn(
            f"FSDP2 does not reduce the gradients of {apart[0]!r}{more}: they will differ from "
            "rank to rank; call fully_shard on the whole model, too",
            stacklevel=3,
        )
    if running.engine is None:
        return
    watch_optimizer(running.parameters, running.index, running.config.momentum)
    exchanges = running.transport.exchanges
    warn_about_rules(running.config, running.parameters, exchanges=exchanges, stacklevel=3)
    warn_about_surroundings(running.transport, running.group, stacklevel=3)
