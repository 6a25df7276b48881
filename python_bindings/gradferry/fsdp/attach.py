"""`attach` and `attach_reduce_scatter`: what an FSDP2 model exchanges goes through a codec."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from gradferry import _native
from gradferry.core.agreement import (
    Record,
    error_record,
    gather_records,
    meeting_place,
    raise_first_error,
)
from gradferry.core.config import COARSE_BITS, Config, make_config
from gradferry.core.meeting import meet, patience, say_failed, world_ranks
from gradferry.core.names import first_of
from gradferry.core.nodes import FLAT
from gradferry.core.options import Options, complete, takes_options
from gradferry.core.warn import warn
from gradferry.errors import ConfigError, EchoError, GradferryError, PeerError
from gradferry.fsdp.hooks import ModuleHook, Passes, ReduceScatterHook, ReplicaHook
from gradferry.fsdp.model import Shard, ShardedModule, sharded_modules, unsharded_parameters
from gradferry.fsdp.state import ShardedState
from gradferry.fsdp.watch import Guard, watch
from gradferry.reduction.advice import warn_about_rules, warn_about_surroundings, watch_optimizer
from gradferry.reduction.running import Running, propose
from gradferry.reduction.start import start, usable_group

Hook = TypeVar("Hook", bound=ModuleHook)
Result = TypeVar("Result")

_RECOVERY_HINT = (
    "This model is finished, on all ranks, since FSDP2 does not recover from a backward pass that "
    "failed. To go on, build and shard a new one, attach, and load the last checkpoint."
)
# A step that is skipped because of another shard would go unnoticed here.
_NOT_SHARDED = ("exact_skip",)
# What a reduce-scatter leaves out, because only its owner sees a mean.
_NOT_SCATTERED = ("momentum", "exact_skip", "check_every", "nodes")


@takes_options(_NOT_SHARDED)
def attach(
    model: nn.Module,
    codec: str = "q4",
    replicate_group: dist.ProcessGroup | DeviceMesh | None = None,
    **options: Unpack[Options],
) -> ShardedState:
    """Hybrid sharding whose averages over replicas are compressed. Collective.

    FSDP2 shards the model over the ranks of one dimension of a mesh, and reduces gradients there as
    always. From now on the reduced shards are averaged over the ranks that hold the same shard of
    other replicas. Where replicas are on different machines, only this crosses the network.

    >>> mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replica", "shard"))
    >>> for block in (*model.blocks, model):
    ...     fully_shard(block, mesh=mesh["shard"])
    >>> state = gradferry.fsdp.attach(model, "q4", mesh["replica"])

    Call it once on every rank, after the last ``fully_shard`` and change to the model, and before
    the first backward pass. Replicas must begin with equal parameters.

    Errors name ranks of the world. Groups of ``init_device_mesh`` have a timeout of their own, not
    that of ``init_process_group``: how long ranks wait here for one that does not come, half of it
    and at most five minutes, and in a backward pass. ``torch.distributed.set_timeout`` changes it.

    ``check_every`` compares this shard between its replicas, and raises `StateError` for a
    parameter that was added or unfrozen after attach and that FSDP2 does not reduce. ``momentum``
    needs a gradient of every parameter in every pass.

    Args:
        model: under ``torch.distributed.fsdp.fully_shard``, over a mesh of one dimension.
        codec: as for `gradferry.attach`, but not ``"auto"``, which tries codecs in the steps of
            DistributedDataParallel. The number of dimensions and elements that decide which
            parameters are sent as they are is that of this rank's shard.
        replicate_group: of the ranks that hold this rank's shard: a process group, or a DeviceMesh
            of one dimension.
        **options: see `gradferry.Options`.

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
    modules = sharded_modules(model)
    shards = [shard for module in modules for shard in module.shards]
    shard_group = modules[0].shard_group
    part = f"shard_{dist.get_rank(shard_group)}_of_{dist.get_world_size(shard_group)}"
    part += shards[0].place_in_mesh()
    group = _replicas(replicate_group, shard_group, modules)

    def propose_here() -> Running:
        _check_modules(modules)
        _check_replicas(modules)
        owned = [(shard, None) for shard in shards]
        record = {"shard": part, **_values(model)}
        config = _config(codec, complete(options, _NOT_SHARDED))
        return _propose(config, group, modules, record, owned)

    running = _known_to_all(shard_group, modules, lambda: _start(group, modules, propose_here))
    hooks = _hooks(ReplicaHook, running, modules)
    _finish(model, modules, running, hooks, averages_replicas=True)
    return ShardedState(running, hooks, part)


@takes_options(_NOT_SCATTERED, error_feedback="none")
def attach_reduce_scatter(
    model: nn.Module,
    codec: str = "q4",
    **options: Unpack[Options],
) -> ShardedState:
    """Compresses the reduce-scatter of gradients among the ranks of a sharded model. Collective.

    For models that are sharded over a slow link. Each rank sends every other one that one's shards
    of its gradients, encoded once; their owner adds up what it decodes, and nothing is encoded
    again. FSDP2 gathers parameters as it always does. Gradients must be on the CPU.

    >>> for block in (*model.blocks, model):
    ...     fully_shard(block)
    >>> state = gradferry.fsdp.attach_reduce_scatter(model, "q4", error_feedback="worker")

    Call it once on every rank, after the last ``fully_shard`` and before the first backward pass.

    ``error_feedback`` is ``"none"``, or ``"worker"``, which keeps on every rank the compression
    error of the *whole* model's gradients: 4 bytes for each of its parameters, not divided by the
    number of ranks. Codecs below 3 bits need it, and ``grad_scaler`` has a meaning only there.

    Args:
        model: under ``torch.distributed.fsdp.fully_shard``.
        codec: as for `gradferry.attach`, but not ``"auto"``.
            The number of dimensions and elements that decide which parameters are sent as they are
            is that of a shard.
        **options: see `gradferry.Options`.

    Returns:
        The hook's state. The hook lives as long as the model, whether the state is kept or not.

    Raises:
        ConfigError: an argument or the model cannot be used; nothing was changed.
        RankMismatchError: ranks differ in configuration or model; nothing was changed.
        PeerError: a rank did not call this, or failed to set up its connections or memory; nothing
            was changed.
        StateError: there is no process group.

    A backward pass raises PeerError, ProtocolError or StateError on all ranks of the shard group,
    and so does every forward pass after it.
    """
    modules = sharded_modules(model)
    group = modules[0].shard_group
    # The order of FSDP2: shards of the first rank, then those of the second.
    owned = [
        (shard, rank)
        for module in modules
        for rank in range(dist.get_world_size(group))
        for shard in module.shards
    ]

    def propose_here() -> Running:
        _check_modules(modules)
        for module in modules:
            _expect_free(module, "a reduce-scatter", module.reduce_scatter)
        asked = complete({"error_feedback": "none", **options}, _NOT_SCATTERED)
        config = _config(codec, {**asked, "nodes": FLAT})
        _check_feedback(config, owned)
        return _propose(config, group, modules, {}, owned)

    running = _start(group, modules, propose_here)
    hooks = _hooks(ReduceScatterHook, running, modules)
    _finish(model, modules, running, hooks)
    return ShardedState(running, hooks, f"group_of_rank_{min(world_ranks(group))}")


def _config(codec: str, options: Options) -> Config:
    config = make_config(codec, options)
    if config.chooses:
        raise ConfigError(
            "codec='auto' tries codecs in the steps of DistributedDataParallel; name a codec for "
            "FSDP2, such as 'q4'"
        )
    return config


def _propose(
    config: Config,
    group: dist.ProcessGroup,
    modules: Sequence[ShardedModule],
    record: Record,
    owned: Sequence[tuple[Shard, int | None]],
) -> Running:
    """The configuration of this rank. `owned`: what the engine takes for parameters, each with the
    rank that gets its mean; None: all ranks do.
    """
    device, rank = modules[0].device, dist.get_rank(group)
    record = {
        **record,
        "way in": "FSDP2",
        "modules": [[module.name, len(module.shards)] for module in modules],
    }
    return propose(
        config,
        group,
        device,
        [(shard.name, shard.placeholder(device)) for shard, _ in owned],
        record,
        _RECOVERY_HINT,
        known_as=[shard.parameter if own in (None, rank) else None for shard, own in owned],
        owners=[own for _, own in owned],
    )


def _start(
    group: dist.ProcessGroup, modules: Sequence[ShardedModule], propose_here: Callable[[], Running]
) -> Running:
    def build(running: Running, nonce: str) -> Running:
        running.start(group, nonce)
        return running

    return start(group, modules[0].device, propose_here, build, purpose="come to attach")


def _known_to_all(
    shard_group: dist.ProcessGroup,
    modules: Sequence[ShardedModule],
    begin: Callable[[], Result],
) -> Result:
    """Returns what `begin` does. Its error on one rank of the shard group is raised on all."""
    result: list[Result] = []
    own: Exception | None = None
    try:
        result.append(begin())
    except Exception as error:
        own = error
        say_failed(shard_group)  # for ranks that wait beside it
    try:
        _raise_first(own, _records(own, shard_group, modules, "attach"), shard_group)
    except BaseException:
        result.clear()  # otherwise the traceback would keep the connections alive
        raise
    return result[0]


def _records(
    own: Exception | None,
    group: dist.ProcessGroup,
    modules: Sequence[ShardedModule],
    purpose: str,
    beside: dist.ProcessGroup | None = None,
) -> list[Record]:
    """The errors of a group's ranks. Collective. `purpose` and `beside` as for `meet`."""
    place = meeting_place(group, modules[0].device)
    try:
        meet(group, patience(group, place), purpose, beside)
        return gather_records({} if own is None else error_record(own), group, place)
    except PeerError as error:
        if own is None:
            raise
        raise error from own


def _raise_first(own: Exception | None, records: list[Record], group: dist.ProcessGroup) -> None:
    """Raises the error of this rank, else that of another rank of the group."""
    if own is not None and not isinstance(own, EchoError):
        raise own
    raise_first_error(records, group)


def _values(model: nn.Module) -> Record:
    """Hashes of all parameters, also of those that are frozen, as this rank has them."""
    local = {name: getattr(p, "_local_tensor", p) for name, p in model.named_parameters()}
    hashes = _native.parameter_hashes(list(local.values()))
    return {
        f"values of {name!r}, in which replicas must begin equal (seed them alike, or load one "
        "checkpoint)": hashed
        for name, hashed in zip(local, hashes, strict=True)
    }


def _hooks(kind: type[Hook], running: Running, modules: Sequence[ShardedModule]) -> list[Hook]:
    calls = None if running.engine is None else _native.AllReducer(engine=running.engine)
    passes = Passes(running, modules, kind.num_parts(running.world_size))
    return [kind(running, passes, each, number, calls) for number, each in enumerate(modules)]


def _finish(
    model: nn.Module,
    modules: Sequence[ShardedModule],
    running: Running,
    hooks: Sequence[ModuleHook],
    *,
    averages_replicas: bool = False,
) -> None:
    """After all ranks have started: sets the hooks, watches optimizers and later passes, warns."""
    for hook in hooks:
        hook.set()
    apart = list(unsharded_parameters(model, modules))
    watch(model, Guard(modules, running, hooks, apart, averages_replicas=averages_replicas))
    watch_optimizer(running)
    # Warnings come last: the user's filters may make them errors.
    if apart:
        warn(
            f"FSDP2 does not reduce the gradients of {first_of(apart)}: they will differ from "
            "rank to rank; call fully_shard on the whole model, too, and then attach"
        )
    if running.engine is None:
        return
    exchanges = running.transport.exchanges
    warn_about_rules(running.config, running.parameters, exchanges=exchanges)
    warn_about_surroundings(running.transport, running.group)


def _replicas(
    given: dist.ProcessGroup | DeviceMesh | None,
    shard_group: dist.ProcessGroup,
    modules: Sequence[ShardedModule],
) -> dist.ProcessGroup:
    """The group of this rank's replicas. Collective, since a rank without one cannot tell them:
    ranks with other shards hear of it in the shard group, and tell their replicas.

    Before a rank that told or was told returns, those that were told have told their shard group:
    otherwise it could come to the next call while others still wait for it in this one. With three
    shards or more a rank that heard in its shard group first may be earlier.
    """
    own: Exception | None = None
    try:
        group = _known_to_all(shard_group, modules, lambda: _replicate_group(given, shard_group))
    except GradferryError as error:
        own = error
        try:
            group = _replicate_group(given, shard_group)
        except GradferryError:
            raise own from None
    records: list[Record] = []

    def tell_and_hear() -> None:
        records.extend(_records(own, group, modules, "come to attach", shard_group))
        _raise_first(own, records, group)

    try:
        if own is None:
            _known_to_all(shard_group, modules, tell_and_hear)
        else:
            tell_and_hear()
    except GradferryError as error:
        if own is not None:
            say_failed(shard_group)  # one that tells is enough: replicas of the others may not come
        # A rank that has lost its shard group cannot say that this one knows.
        if any("error" in record for record in records) and not isinstance(error, PeerError):
            with contextlib.suppress(GradferryError):
                _records(error, group, modules, "hear of an error")
        if own is None:
            raise
        raise own from None
    return group


def _replicate_group(
    given: dist.ProcessGroup | DeviceMesh | None, shard_group: dist.ProcessGroup
) -> dist.ProcessGroup:
    if given is None:
        raise ConfigError(
            "replicate_group is missing: give the group, or the dimension of the mesh, of the "
            "ranks that hold the same shard, such as mesh['replica']"
        )
    if isinstance(given, DeviceMesh) and given.ndim != 1:
        raise ConfigError(
            f"replicate_group is a mesh of {given.ndim} dimensions, {given}; give the dimension of "
            "the replicas alone, such as mesh['replica']"
        )
    group = usable_group(given.get_group() if isinstance(given, DeviceMesh) else given)
    both = set(world_ranks(shard_group)) & set(world_ranks(group))
    if both != {dist.get_rank()}:
        raise ConfigError(
            f"replicate_group has ranks {sorted(both)} of this rank's shard group; give the ranks "
            "that hold the same shard, such as mesh['replica']"
        )
    return group


def _check_modules(modules: Sequence[ShardedModule]) -> None:
    members = world_ranks(modules[0].shard_group)
    for module in modules:
        module.expect_values()
        theirs = world_ranks(module.shard_group)
        if theirs != members:
            raise ConfigError(
                f"{module.name!r} is sharded over ranks {theirs}, {modules[0].name!r} over "
                f"{members}; shard all modules over one mesh"
            )


def _check_replicas(modules: Sequence[ShardedModule]) -> None:
    for module in modules:
        if module.averages_replicas:
            raise ConfigError(
                f"FSDP2 averages {module.name!r} over replicas itself, since its mesh has two "
                "dimensions; shard over one, fully_shard(module, mesh=mesh['shard'])"
            )
        _expect_free(module, "an all-reduce hook", module.all_reduce_hook)


def _expect_free(module: ShardedModule, what: str, found: object) -> None:
    if isinstance(found, ModuleHook):
        raise ConfigError(f"gradferry is attached to this model already, at {module.name!r}")
    if found is not None:
        raise ConfigError(
            f"{module.name!r} already has {what} that is not FSDP2's own, {found!r}; FSDP2 takes "
            "one, so leave out the other"
        )


def _check_feedback(config: Config, owned: Sequence[tuple[Shard, int | None]]) -> None:
    """Raises ConfigError for an error feedback that a reduce-scatter cannot have."""
    if config.error_feedback not in ("none", "worker"):
        raise ConfigError(
            f"error_feedback={config.error_feedback!r}: means are not encoded in a reduce-scatter, "
            "so that only 'worker' and 'none' are left"
        )
    codecs = [config.codec, *(rule.codec for rule in config.rules)]
    coarse = next((each for each in codecs if each.lossy and each.bits() < COARSE_BITS), None)
    if coarse is not None and config.error_feedback == "none":
        mebibytes = sum(4 * shard.size.numel() for shard, _ in owned) / 2**20
        raise ConfigError(
            f"{coarse} needs error_feedback='worker' here, which takes {mebibytes:.1f} MiB on "
            "every rank, 4 bytes for each parameter of the whole model; or take a codec of 3 bits"
        )
