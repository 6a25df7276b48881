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
    error_record,
    gather_records,
    interrupts_told,
    on_all_ranks,
    raise_first_error,
    rendezvous_place,
)
from gradferry.core.config import Config
from gradferry.core.names import first_of
from gradferry.core.options import SHARDED_DEFAULTS, ShardedOptions, takes_options
from gradferry.core.rendezvous import meet, patience, world_ranks
from gradferry.core.warn import warn
from gradferry.errors import ConfigError, EchoError, GradferryError
from gradferry.fsdp.choice import Choice, choose
from gradferry.fsdp.gathers import GatherHook, Gathers, Settled
from gradferry.fsdp.hooks import (
    GradientHook,
    ModuleHook,
    Passes,
    ReduceScatterHook,
    ReplicaGroup,
    ReplicaHook,
)
from gradferry.fsdp.model import (
    Shard,
    ShardedModule,
    expect_values,
    sharded_modules,
    unsharded_parameters,
)
from gradferry.fsdp.state import ALL_GATHER, REDUCE_SCATTER, REPLICAS, Attached, ShardedState
from gradferry.fsdp.watch import Guard, watch

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
    attached: list[Attached] = []
    try:
        _begin(model, codec, options, modules, attached)
    except BaseException:
        attached.clear()  # otherwise the traceback would keep the connections alive
        raise
    _connect(attached)
    state = ShardedState(attached, modules)
    _finish(model, modules, attached)
    return state


def _begin(
    model: nn.Module,
    codec: str,
    options: Mapping[str, Any],
    modules: Sequence[ShardedModule],
    attached: list[Attached],
) -> None:
    """Connects all ranks, and adds the exchanges to `attached`, that of replicas first."""
    shard_group, replica_group = modules[0].shard_group, modules[0].replica_group
    device = modules[0].device

    def begin_within() -> Choice:
        chosen: list[Choice] = []

        def choose_here() -> Record:
            _check_modules(modules)
            averages = replica_group is not None
            chosen.append(choose(codec, options, modules, averages=averages))
            return chosen[0].record()

        if shard_group is None:
            choose_here()
        else:
            longest = patience(shard_group, rendezvous_place(shard_group, device))
            meet(shard_group, longest, "call attach")
            on_all_ranks(choose_here, shard_group, device, alike=True)
            if chosen[0].reduce_scatter is not None:
                attached.append(_reduce_scatter(chosen[0].reduce_scatter, shard_group, modules))
            if chosen[0].all_gather is not None:
                attached.append(_all_gather(chosen[0].all_gather, shard_group, modules))
        return chosen[0]

    if replica_group is None:
        begin_within()
    else:
        own: Exception | None = None
        try:
            choice = begin_within()
        except GradferryError as error:  # which all ranks of the shard group have, but no replica
            own = error

        def configuration() -> tuple[Config, Record]:
            if own is not None:
                raise own
            assert choice.replicas is not None
            return choice.replicas, {**choice.record(), **_values(model)}

        attached.insert(0, _averages(configuration, replica_group, modules))


def _connect(attached: Sequence[Attached]) -> None:
    """Lets the other exchanges know of errors in gathers."""
    gathers = next((each.gathers for each in attached if each.gathers is not None), None)
    if gathers is None:
        return
    averaging = [each for each in attached if each.averages]
    gathers.others = [each.running for each in averaging]
    for hook in (hook for each in averaging for hook in each.hooks):
        if isinstance(hook, ReduceScatterHook):
            hook.settle = gathers.settle


def _averages(
    configuration: Callable[[], tuple[Config, Record]],
    group: dist.ProcessGroup,
    modules: Sequence[ShardedModule],
) -> Attached:
    shards = [shard for module in modules for shard in module.shards]
    shard_group = modules[0].shard_group
    rank, size = (0, 1) if shard_group is None else (shard_group.rank(), shard_group.size())
    part = f"shard_{rank}_of_{size}{shards[0].place_in_mesh()}"

    def propose_here() -> Running:
        config, record = configuration()
        owned = [(shard, None) for shard in shards]
        return _propose(config, group, modules, {"shard": part, **record}, owned)

    running = _known_within(modules, lambda: _start(group, modules, propose_here))
    hooks = _gradient_hooks(ReplicaHook, running, modules)
    return Attached(REPLICAS, running, hooks, part)


def _known_within(modules: Sequence[ShardedModule], act: Callable[[], Running]) -> Running:
    """Returns what `act` does. Its error on one rank of the shard group is raised on all."""
    group, device = modules[0].shard_group, modules[0].device
    if group is None:
        return act()
    made: list[Running] = []
    own: Exception | None = None
    try:
        with interrupts_told(group):
            try:
                made.append(act())
            except Exception as error:
                own = error
            meet(group, patience(group, rendezvous_place(group, device)), "attach")
            records = gather_records({} if own is None else error_record(own), group, device)
        raise_first_error(records, group)
    except BaseException as error:
        made.clear()  # otherwise the traceback would keep the connections alive
        if own is None or isinstance(own, EchoError) or not isinstance(error, GradferryError):
            raise
        raise own from None
    return made[0]


def _reduce_scatter(
    config: Config, group: dist.ProcessGroup, modules: Sequence[ShardedModule]
) -> Attached:
    def expect_free(module: ShardedModule) -> list[Shard]:
        _expect_free(module, "a reduce-scatter", module.reduce_scatter)
        return module.shards

    running = _start_within(config, group, modules, expect_free, "reduce_scatter")
    hooks = _gradient_hooks(ReduceScatterHook, running, modules)
    part = f"group_of_rank_{min(world_ranks(group))}"
    return Attached(REDUCE_SCATTER, running, hooks, part)


def _all_gather(
    config: Config, group: dist.ProcessGroup, modules: Sequence[ShardedModule]
) -> Attached:
    def expect_free(module: ShardedModule) -> list[Shard]:
        _expect_free(module, "an all-gather", module.all_gather)
        return module.gathered

    running = _start_within(config, group, modules, expect_free, "all_gather")
    calls = _calls_of(running)
    gathers = Gathers(running)
    hooks, first = [], 0
    for number, module in enumerate(modules):
        hooks.append(GatherHook(running, module, number, calls, gathers, first))
        first += len(module.gathered) * running.world_size
    return Attached(ALL_GATHER, running, hooks, None, gathers)


def _start_within(
    config: Config,
    group: dist.ProcessGroup,
    modules: Sequence[ShardedModule],
    shards_of: Callable[[ShardedModule], list[Shard]],
    collective: str,
) -> Running:
    """Starts an exchange of the shard group, with shards in the order of FSDP2: those of the first
    rank of a module, then those of the second.
    """

    def propose_here() -> Running:
        ranks = range(dist.get_world_size(group))
        shards = [(shards_of(module), rank) for module in modules for rank in ranks]
        owned = [(shard, rank) for some, rank in shards for shard in some]
        return _propose(config, group, modules, {}, owned, collective)

    return _start(group, modules, propose_here)


def _start(
    group: dist.ProcessGroup, modules: Sequence[ShardedModule], propose_here: Callable[[], Running]
) -> Running:
    device = modules[0].device
    return start(group, device, propose_here, lambda running: running, purpose="call attach")


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
    record = {
        **record,
        "way in": "FSDP2",
        "modules": [[module.name, len(module.shards)] for module in modules],
    }
    averages = collective != "all_gather"  # what optimizers step is not what is gathered
    return propose(
        config,
        group,
        device,
        [(shard.name, shard.placeholder(device)) for shard, _ in owned],
        record,
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


def _calls_of(running: Running) -> _native.AllReducer | None:
    return None if running.engine is None else _native.AllReducer(engine=running.engine)


def _gradient_hooks(
    kind: type[GradientHook], running: Running, modules: Sequence[ShardedModule]
) -> list[ModuleHook]:
    calls = _calls_of(running)
    passes = Passes(running, modules, kind.num_parts(running.world_size))
    return [kind(running, each, number, calls, passes) for number, each in enumerate(modules)]


def _finish(
    model: nn.Module, modules: Sequence[ShardedModule], attached: Sequence[Attached]
) -> None:
    """After all ranks have started: sets the hooks, watches optimizers and later passes, warns."""
    for each in attached:
        for hook in each.hooks:
            hook.set()
        if each.gathers is not None:
            each.gathers.watch(model)
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
        if isinstance(module.all_reduce_group, ReplicaGroup):
            raise _attached_already(module)
        theirs = [world_ranks(group) for group in module.groups]
        if theirs != members:
            raise ConfigError(
                f"{module.name!r} is sharded and replicated over ranks {theirs}, "
                f"{modules[0].name!r} over {members}; use one mesh for all modules"
            )


def _attached_already(module: ShardedModule) -> ConfigError:
    return ConfigError(f"gradferry is attached to this model already, at {module.name!r}")


def _expect_free(module: ShardedModule, what: str, found: object) -> None:
    if isinstance(found, (ModuleHook, Settled)):
        raise _attached_already(module)
    if found is not None:
        raise ConfigError(
            f"{module.name!r} already has {what} that is not FSDP2's own, {found!r}; FSDP2 takes "
            "one, so leave out the other"
        )
