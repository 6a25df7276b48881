"""`attach`: what an FSDP2 model exchanges goes through a codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack

from gradferry import _native
from gradferry.averaging.advice import warn_about_rules, watch_optimizer
from gradferry.averaging.running import Running, propose
from gradferry.averaging.start import start
from gradferry.core.agreement import (
    Record,
    on_all_ranks,
    rendezvous_place,
    value_on_all_ranks,
)
from gradferry.core.config import Config
from gradferry.core.names import first_of
from gradferry.core.options import SHARDED_DEFAULTS, ShardedOptions, takes_options
from gradferry.core.rendezvous import meet, patience, world_ranks
from gradferry.core.warn import warn
from gradferry.errors import ConfigError, GradferryError
from gradferry.fsdp.choice import Choice, choose
from gradferry.fsdp.hooks import (
    AllGather,
    Exchange,
    ModuleHook,
    ReduceScatter,
    ReplicaHook,
    Replicas,
    Settled,
)
from gradferry.fsdp.model import (
    Shard,
    ShardedModule,
    expect_values,
    is_own,
    sharded_modules,
    unsharded_parameters,
)
from gradferry.fsdp.state import ShardedState
from gradferry.fsdp.watch import Guard, watch

_ATTACH = "call attach"
_RECOVERY_HINT = (
    "This model is finished, on all ranks, since FSDP2 does not recover from a pass that failed. "
    "To go on, build and shard a new one, attach, and load the last checkpoint."
)


@takes_options(defaults=SHARDED_DEFAULTS)
def attach(
    model: nn.Module,
    codec: str = "q4",
    **options: Unpack[ShardedOptions],
) -> ShardedState:
    """Compresses what a model under FSDP2 exchanges, from now on. Collective.

    Under ``fully_shard`` over a mesh of one dimension that is what the ranks of the shard group
    send each other: the reduce-scatter of gradients, with `codec`, and the all-gathers of
    parameters, with ``q8``.

    >>> for block in (*model.blocks, model):
    ...     fully_shard(block)
    >>> state = gradferry.fsdp.attach(model, "q4")

    In the reduce-scatter each rank sends every other one that one's shards of its gradients,
    encoded once; their owner adds up what it decodes, and nothing is encoded again. In an
    all-gather each rank sends its shards of the parameters, and all ranks decode the same bytes,
    those of their own shards included: all compute with the same parameters, in forward and
    backward. The parameters themselves, which optimizers step and checkpoints hold, stay as they
    are.

    Over a mesh of two dimensions (hybrid sharding), and under FSDP2's ``replicate``, that is the
    average over the ranks that hold the same shards of other replicas. Where replicas are on
    different machines, only this crosses the network. Within a replica everything is FSDP2's own,
    unless `reduce_scatter` or `all_gather` names a codec. With ``set_requires_all_reduce(False)``
    FSDP2 accumulates reduced gradients, and the exchange runs in the last pass alone.

    >>> mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
    >>> for block in (*model.blocks, model):
    ...     fully_shard(block, mesh=mesh)
    >>> state = gradferry.fsdp.attach(model, "q4")

    Call it once on every rank, after the last ``fully_shard`` and change to the model, and before
    the first forward pass. Replicas must begin with equal parameters.

    Errors name ranks of the world. Groups of ``init_device_mesh`` have a timeout of their own, not
    that of ``init_process_group``: how long ranks wait here for one that does not come, half of it
    and at most five minutes, and in a pass. ``torch.distributed.set_timeout`` changes it.

    Each exchange has a workspace of its own, of at most ``workspace_cap_mb``.
    ``error_feedback``, ``momentum``, ``check_every`` and ``nodes`` are for averages over replicas.
    ``check_every`` compares this shard between its replicas, and raises `StateError` for a
    parameter that was added or unfrozen after attach and that FSDP2 does not reduce. ``momentum``
    needs a gradient of every parameter in every pass.

    Args:
        model: under ``torch.distributed.fsdp.fully_shard`` or ``replicate``.
        codec: as for `gradferry.attach`, but not ``"auto"``, which tries codecs in the steps of
            DistributedDataParallel. The number of dimensions and elements that decide which
            parameters are sent as they are is that of this rank's shard.
        **options: see `gradferry.Options`.

    Returns:
        The hooks' state. The hooks live as long as the model, whether the state is kept or not.

    Raises:
        ConfigError: an argument or the model cannot be used; nothing was changed.
        RankMismatchError: ranks differ in configuration or model, or replicas in the values of
            parameters; nothing was changed.
        PeerError: a rank did not call this, or failed to set up its connections or memory; nothing
            was changed.
        StateError: there is no process group.

    A pass raises PeerError, ProtocolError, StateError or DivergedError on all ranks of the group
    whose exchange failed, and so does every forward pass after it. After an error between replicas,
    ranks with other shards may be in a collective of FSDP2 then, and wait for these processes to
    end, or for the timeout of its group.
    """
    modules = sharded_modules(model)
    attached: list[Exchange] = []
    try:
        _begin(model, codec, options, modules, attached)
    except BaseException:
        attached.clear()  # otherwise the traceback would keep the connections alive
        raise
    state = ShardedState(attached, modules)
    _finish(model, modules, attached)
    return state


def _begin(
    model: nn.Module,
    codec: str,
    options: Mapping[str, Any],
    modules: Sequence[ShardedModule],
    attached: list[Exchange],
) -> None:
    """Connects all ranks, and adds the exchanges to `attached`, that of replicas first."""
    shard_group, replica_group = modules[0].shard_group, modules[0].replica_group
    device = modules[0].device
    chosen: list[Choice] = []

    def choose_here() -> Record:
        _check_modules(modules)
        chosen.append(choose(codec, options, modules, averages=replica_group is not None))
        return chosen[0].record()

    def begin_within() -> None:
        if shard_group is None:
            choose_here()
            return
        meet(shard_group, patience(shard_group, rendezvous_place(shard_group, device)), _ATTACH)
        on_all_ranks(choose_here, shard_group, device, alike=True)
        if (config := chosen[0].reduce_scatter) is not None:
            attached.append(_within(ReduceScatter, config, shard_group, modules))
        if (config := chosen[0].all_gather) is not None:
            attached.append(_within(AllGather, config, shard_group, modules))

    if replica_group is None:
        begin_within()
        return
    own: Exception | None = None
    try:
        begin_within()
    except GradferryError as error:  # which all ranks of the shard group have, but no replica
        own = error

    def propose_here() -> Running:
        if own is not None:
            raise own
        (choice,) = chosen
        assert choice.replicas is not None
        record = {"shard": part, **choice.record(), **_values(model)}
        owned = [(shard, None) for module in modules for shard in module.shards]
        return _propose(choice.replicas, replica_group, modules, record, owned)

    rank, size = (0, 1) if shard_group is None else (shard_group.rank(), shard_group.size())
    part = f"shard_{rank}_of_{size}{modules[0].place_in_mesh()}"
    running = (
        _start(replica_group, modules, propose_here)
        if shard_group is None
        else value_on_all_ranks(
            lambda: _start(replica_group, modules, propose_here), shard_group, modules[0].device
        )
    )
    attached.insert(0, Replicas(running, modules, part))


def _within(
    kind: type[Exchange], config: Config, group: dist.ProcessGroup, modules: Sequence[ShardedModule]
) -> Exchange:
    """Starts an exchange of the shard group, with shards in the order of FSDP2: those of the first
    rank of a module, then those of the second.
    """

    def propose_here() -> Running:
        for module in modules:
            found = getattr(module, kind.slot)
            if isinstance(found, (ModuleHook, Settled)):
                raise _attached_already(module)
            if not is_own(found):
                raise ConfigError(
                    f"the {kind.what} of {module.name!r} is not FSDP2's own, but {found!r}; FSDP2 "
                    "takes one, so leave out the other"
                )
        owned = [
            (shard, rank)
            for module in modules
            for rank in range(dist.get_world_size(group))
            for shard in (module.shards if kind.averages else module.gathered)
        ]
        return _propose(config, group, modules, {}, owned, kind.name)

    part = f"group_of_rank_{min(world_ranks(group))}" if kind.averages else None
    return kind(_start(group, modules, propose_here), modules, part)


def _start(
    group: dist.ProcessGroup, modules: Sequence[ShardedModule], propose_here: Callable[[], Running]
) -> Running:
    return start(group, modules[0].device, propose_here, lambda running: running, purpose=_ATTACH)


def _propose(
    config: Config,
    group: dist.ProcessGroup,
    modules: Sequence[ShardedModule],
    record: Record,
    owned: Sequence[tuple[Shard, int | None]],
    collective: str = "all_reduce",
) -> Running:
    """The configuration of this rank. `owned`: what the engine takes for parameters, each with the
    rank that gets its mean, or has it; None: all ranks do.
    """
    device, rank = modules[0].device, dist.get_rank(group)
    averages = collective != AllGather.name  # what optimizers step is not what is gathered
    return propose(
        config,
        group,
        device,
        [(shard.name, shard.placeholder(device)) for shard, _ in owned],
        {
            **record,
            "way in": "FSDP2",
            "modules": [[module.name, len(module.shards)] for module in modules],
        },
        _RECOVERY_HINT,
        known_as=[
            shard.parameter if averages and own in (None, rank) else None for shard, own in owned
        ],
        owners=[own for _, own in owned],
        whole_sizes=[shard.whole_size for shard, _ in owned],
        collective=collective,
    )


def _values(model: nn.Module) -> Record:
    """Hashes of all parameters, also of those that are frozen, as this rank has them."""
    local = {name: getattr(p, "_local_tensor", p) for name, p in model.named_parameters()}
    for name, tensor in local.items():
        expect_values(name, tensor)
    hashes = _native.parameter_hashes(list(local.values()))
    return {
        f"values of {name!r}, in which replicas must begin equal (seed them alike, or load one "
        "checkpoint)": hashed
        for name, hashed in zip(local, hashes, strict=True)
    }


def _finish(
    model: nn.Module, modules: Sequence[ShardedModule], attached: Sequence[Exchange]
) -> None:
    """After all ranks have started: sets the hooks, watches optimizers and later passes, warns."""
    for each in attached:
        each.set_hooks()
        if isinstance(each, AllGather):
            each.others = [other.running for other in attached if other.averages]
            model.register_forward_hook(lambda *_, gathers=each: gathers.settle())
    apart = list(unsharded_parameters(model, modules))
    watch(model, Guard(modules, attached, apart))
    for each in attached:
        if each.averages:
            watch_optimizer(each.running)
    # Warnings come last: the user's filters may make them errors.
    if apart:
        warn(
            f"FSDP2 does not reduce the gradients of {first_of(apart)}: they will differ from "
            "rank to rank; call fully_shard on the whole model, too, and then attach"
        )
    warn_about_rules([(each.running, each.rules_option) for each in attached])


def _check_modules(modules: Sequence[ShardedModule]) -> None:
    members = [world_ranks(group) for group in modules[0].groups]
    for module in modules:
        module.expect_values()
        if isinstance(module.all_reduce_group, ReplicaHook):
            raise _attached_already(module)
        theirs = [world_ranks(group) for group in module.groups]
        if theirs != members:
            raise ConfigError(
                f"{module.name!r} is sharded and replicated over ranks {theirs}, "
                f"{modules[0].name!r} over {members}; use one mesh for all modules"
            )


def _attached_already(module: ShardedModule) -> ConfigError:
    return ConfigError(f"gradferry is attached to this model already, at {module.name!r}")
