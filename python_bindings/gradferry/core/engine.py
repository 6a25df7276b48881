"""Starts engines and their lanes, and says how many bytes ranks would send."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    _DistributedBackendOptions,
)

from gradferry import _native
from gradferry.core.config import Config
from gradferry.core.device import CPU, Transport, explaining_refusal, starts_in_order, transport_of
from gradferry.core.node_memory import share_memory
from gradferry.core.nodes import Nodes
from gradferry.core.parameters import ParameterLayout
from gradferry.core.rendezvous import hear_failures, patience, store_of, timeout_of, world_ranks
from gradferry.errors import ConfigError, EchoError, PeerError

Members = Sequence[Sequence[int]]  # the ranks of every node
_ALL_STEPS = 2**63


def lanes_of_host(
    nodes: Members, rank: int, checks: bool, collective: str = "all_reduce"
) -> dict[str, list[int]]:
    """What lanes a rank's engine has on a host, and between which ranks each is, in its order.

    Every thread that posts has lanes of its own. `checks`: parameters are compared.
    """
    everyone = sorted(each for members in nodes for each in members)
    if collective == "reduce_scatter":
        return {"scatter": everyone, "commit": everyone}
    if collective == "all_gather":
        return {"gather": everyone, "commit": everyone}
    if len(nodes) == len(everyone):
        return {"scatter": everyone, "gather": everyone, "commit": everyone}
    siblings, peers = _neighbours(nodes, rank)
    lanes = {"local_scatter": siblings, "forward": siblings, "commit": everyone}
    if checks:
        lanes["hashes"] = everyone
    # Last, so that lanes have the same numbers on ranks that have no peers.
    return lanes | ({"scatter": peers, "gather": peers} if peers else {})


def lanes_of_device(nodes: Members, rank: int, streams: bool) -> dict[str, list[int]]:
    """What `lanes_of_host` says, for a device, where one thread posts everything in one order.

    `streams`: collectives between all ranks are those of DDP's own group.
    """
    everyone = sorted(each for members in nodes for each in members)
    lanes = {} if streams else {"staged": everyone}
    if len(nodes) == len(everyone):
        return lanes
    siblings, peers = _neighbours(nodes, rank)
    lanes["siblings"] = siblings
    return lanes | ({"peers": peers} if peers else {})


def _neighbours(nodes: Members, rank: int) -> tuple[list[int], list[int]]:
    """The siblings of a rank, and its peers, one per node; none where nodes have no such rank."""
    siblings = siblings_of(nodes, rank)
    place = siblings.index(rank)
    if place >= min(map(len, nodes)):
        return siblings, []
    return siblings, [members[place] for members in nodes]


def siblings_of(nodes: Members, rank: int) -> list[int]:
    """The ranks of a rank's node."""
    return next(list(members) for members in nodes if rank in members)


@torch.inference_mode(False)  # inference tensors could not be changed in training
def loss_scale(config: Config, place: torch.device) -> torch.Tensor | None:
    """The fp32 tensor in which the GradScaler keeps its scale for its whole life; None without."""
    scaler = config.grad_scaler
    if scaler is None:
        return None
    if scaler._scale is None:  # the scaler creates the tensor at its first use
        scaler._lazy_init_scale_growth_tracker(place)
    return scaler._scale


@torch.inference_mode(False)
def start_engine(
    config: Config,
    parameters: Sequence[ParameterLayout],
    group: dist.ProcessGroup,
    nonce: str,
    *,
    transport: Transport | None = None,
    hashes: tuple[int, int] = (0, 0),
    tensors: Sequence[torch.Tensor] = (),
    find_unused_parameters: bool = False,
    nodes: Members | None = None,
    recovery_hint: str = "",
    collective: str = "all_reduce",
    delivers: bool = False,
) -> _native.BucketEngine:
    """Starts an engine on its own connections. Collective; pass equal arguments on all ranks.

    Args:
        config: as agreed by all ranks.
        parameters: as agreed by all ranks.
        group: of the ranks.
        nonce: different for every engine of the group.
        transport: of the gradients; None: they are on the CPU.
        hashes: of (configuration, parameters), for message headers.
        tensors: the parameters themselves, for `check_every`; else none.
        find_unused_parameters: that of DDP.
        nodes: which ranks share a node, as agreed by all ranks; None: every rank is alone.
        recovery_hint: for people, what to do after an error has ended the engine.
        collective: "all_reduce"; "reduce_scatter": every rank gets the mean of the parameters
            whose owner it is; or "all_gather": every rank gets the parameters of all owners. In
            the last two all parameters have an owner, and no owner residual; every rank is alone,
            without momentum and find_unused_parameters. An all-gather has no residuals,
            and codecs whose payload depends on nothing but what is encoded.
        delivers: gradients are sent as in warm-up steps for as long as this engine runs, with
            residuals. Not in momentum mode, whose warm-up has no momentum.

    Raises:
        ConfigError: the collective cannot do that, or the GPU does not run the kernels.
        PeerError: as `make_lanes`.
    """
    path = transport_of(CPU, group) if transport is None else transport
    on_host = path.device.type == "cpu"
    rank, world_size = group.rank(), group.size()
    table = [[each] for each in range(world_size)] if nodes is None else nodes
    lanes: dict[str, _native.Lane] = {}
    # First, because it is collective: a rank that failed before it would block the others.
    if path.exchanges and on_host:
        ranks = lanes_of_host(table, rank, config.check_every != 0, collective)
        lanes = dict(zip(ranks, make_lanes(group, nonce, ranks, path.device), strict=True))
        if "scatter" in lanes and len(table) == world_size:  # which one thread posts, as hashes
            lanes["hashes"] = lanes["scatter"]
    elif path.exchanges:
        ranks = lanes_of_device(table, rank, path.streams)
        lanes = make_lanes_of_device(group, nonce, ranks, path)
    store = PrefixStore(f"gradferry/{nonce}/peers", store_of(group)) if path.exchanges else None
    given = config.for_engine(world_size)
    if delivers:
        given |= {"warmup_steps": _ALL_STEPS, "compressed_warmup": True}
    options = _native.EngineOptions(
        **given,
        parameters=[p.native() for p in parameters],
        rank=rank,
        nodes=table,
        config_hash=hashes[0],
        layout_hash=hashes[1],
        loss_scale=loss_scale(config, path.device),
        collective=collective,
        find_unused_parameters=find_unused_parameters,
        recovery_hint=recovery_hint,
        store=store,
        world_ranks=world_ranks(group),
    )
    if on_host:
        memory, local_stage = memory_of_node(options, table, group, nonce)
        return _native.HostEngine(
            options, tensors=list(tensors), lanes=lanes, memory=memory, local_stage=local_stage
        )
    with explaining_refusal(path.device):
        return _native.DeviceEngine(
            options,
            device=path.device,
            tensors=list(tensors),
            lanes=lanes,
            group_name=group.group_name if path.exchanges and path.streams else None,
            # Between nodes of one rank there is one communicator, which keeps the order.
            chained=len(table) < world_size and not starts_in_order(path.device),
        )


def make_lanes(
    group: dist.ProcessGroup,
    nonce: str,
    lanes: Mapping[str, Sequence[int]],
    place: torch.device = CPU,
) -> list[_native.Lane]:
    """Connects lanes between ranks of the group, separate from its own connections. Collective.

    Args:
        group: of the ranks.
        nonce: equal on all ranks, and another one in every call.
        lanes: between which ranks each is, in its order; this one is among them. A lane has the
            same place among the lanes of all its ranks.
        place: device of the gradients; the timeout is that of the group's backend for it.

    Raises:
        PeerError: this rank cannot connect. EchoError: others did not within half of `patience`, or
            one has called `say_failed`. Nothing stays open.
    """
    if place.type != "cpu" or not _gloo_takes_plain_tcp():
        return [_native.Lane(backend) for backend in make_backends(group, nonce, lanes, place)]
    return _native.connect_lanes(
        PrefixStore(f"gradferry/{nonce}/sockets", store_of(group)),
        rank=group.rank(),
        world_ranks=world_ranks(group),
        lanes=[list(ranks) for ranks in lanes.values()],
        longest_seconds=(patience(group, place) / 2).total_seconds(),
        between_polls=hear_failures(group),
        timeout_seconds=timeout_of(group, place).total_seconds(),
    )


def memory_of_node(
    options: _native.EngineOptions, nodes: Members, group: dist.ProcessGroup, nonce: str
) -> tuple[_native.SharedMemory | None, str]:
    """Memory that an engine on this rank shares with its siblings. Collective among them.

    Returns:
        The memory; None where this rank is alone on its node, or where one of them was refused it.
        Then what siblings exchange through: "shared memory", "sockets (rank 1: memfd_create:
        Operation not permitted)", or nothing.

    Raises:
        PeerError: as `make_lanes`.
    """
    rank, names = group.rank(), world_ranks(group)
    siblings = siblings_of(nodes, rank)
    if len(siblings) == 1:
        return None, ""
    num_bytes = _native.shared_memory_bytes(options)
    store = PrefixStore(f"gradferry/{nonce}/memory/{siblings[0]}", store_of(group))
    seconds = (patience(group, CPU) / 2).total_seconds()
    with _telling_of_others():
        memory, refusal = share_memory(
            store, names[rank], [names[each] for each in siblings], num_bytes, seconds
        )
    return memory, f"sockets ({refusal})" if memory is None else "shared memory"


def make_backends(
    group: dist.ProcessGroup,
    nonce: str,
    lanes: Mapping[str, Sequence[int]],
    place: torch.device = CPU,
) -> list[ProcessGroupGloo]:
    """Gloo backends between ranks of the group, separate from its own. As `make_lanes`."""
    # Not by new_group(): its names clash for overlapping groups, and after a group was destroyed
    # and created again.
    store = store_of(group)
    rank = group.rank()
    backends: list[ProcessGroupGloo] = []
    for name, ranks in lanes.items():
        prefixed = PrefixStore(f"gradferry/{nonce}/{name}/{min(ranks)}", store)
        with _telling_of_others():
            # A rank that cannot connect gives up early, and then waits to tell the others why. They
            # must not wait for it longer than it waits for them.
            backend = ProcessGroupGloo(
                prefixed, list(ranks).index(rank), len(ranks), patience(group, place) / 2
            )
        backends.append(backend)
    for backend in backends:
        backend._set_default_timeout(timeout_of(group, place))
    return backends


def make_lanes_of_device(
    group: dist.ProcessGroup, nonce: str, lanes: Mapping[str, Sequence[int]], transport: Transport
) -> dict[str, _native.Lane]:
    """Makes lanes by name, as `make_lanes` does. Collective.

    On streams they are on backends of the kind that the group has for the device.
    """
    place = transport.device
    if not transport.streams:
        return dict(zip(lanes, make_lanes(group, nonce, lanes, place), strict=True))
    store = store_of(group)
    made = {}
    for name, ranks in lanes.items():
        full_name = f"gradferry/{nonce}/{name}/{min(ranks)}"
        with _telling_of_others():
            backend = _new_device_backend(
                group, place, PrefixStore(full_name, store), ranks, full_name
            )
            # Now, and in one order on all ranks, and not in the middle of the first backward pass.
            if backend.supports_splitting:
                backend.eager_connect_single_device(place)
        made[name] = _native.Lane(backend)
    return made


# Not by new_group(), as in make_backends.
def _new_device_backend(
    group: dist.ProcessGroup,
    place: torch.device,
    store: PrefixStore,
    ranks: Sequence[int],
    name: str,
) -> Any:
    theirs: Any = group._get_backend(place)
    timeout = timeout_of(group, place)
    rank = list(ranks).index(group.rank())
    config = c10d.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    kind = config.get_device_backend_map()[place.type]
    options: Any = None
    if kind.startswith(dist.Backend.NCCL):
        options = nccl_options(theirs.options)
        options._timeout = timeout
    plugin = dist.Backend._plugins.get(kind.upper())
    if plugin is None and kind == dist.Backend.NCCL:  # until it became one
        options.group_name = name
        return dist.ProcessGroupNCCL(store, rank, len(ranks), options)
    if plugin is None:
        raise ConfigError(
            f"nodes= with several ranks per node needs a process group with NCCL or gloo for "
            f"{place.type!r}, not {kind!r}; attach with nodes='flat'"
        )
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, len(ranks), timeout)
    arguments: Any = _DistributedBackendOptions()
    arguments.store = store
    arguments.group_rank = rank
    arguments.group_size = len(ranks)
    arguments.timeout = timeout
    arguments.group_id = name
    names = world_ranks(group)
    arguments.global_ranks_in_group = [names[each] for each in ranks]
    arguments.process_group = group
    return plugin.creator_fn(arguments, options)


def nccl_options(theirs: object) -> Any:
    """Options for another communicator with the priority and configuration of a group's. Strings
    are copied: NCCL may free the name of its network with the communicator.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    if not isinstance(theirs, dist.ProcessGroupNCCL.Options):
        return options
    options.is_high_priority_stream = theirs.is_high_priority_stream
    # The struct as a whole would share its strings; the communicator's own name is not for others.
    for name in dir(theirs.config):
        value = getattr(theirs.config, name, None)
        if isinstance(value, int | str) and not name.startswith("_") and name != "comm_name":
            setattr(options.config, name, value)
    return options


def _gloo_takes_plain_tcp() -> bool:
    """Whether gloo would use plain TCP, as our own sockets do, and not, for example, TLS."""
    return os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") in ("TCP", "LINUX")


@contextmanager
def _telling_of_others() -> Iterator[None]:
    """Raises PeerError for errors while ranks connect."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        if _native.is_echo(reason):
            raise EchoError(
                f"the other ranks did not connect: {reason}; look at their errors first"
            ) from error
        raise PeerError(
            f"cannot connect to the other ranks: {reason}; look at the limits of the process "
            "(ulimit -n) and at its network"
        ) from error


def planned_bytes(
    config: Config,
    parameters: Sequence[ParameterLayout],
    nodes: Nodes,
    buckets: Sequence[Sequence[int]],
    *,
    collective: str = "all_reduce",
    hosts: Sequence[int] | None = None,
    in_warmup: bool = False,
    find_unused_parameters: bool = False,
) -> list[tuple[int, int, int, int]]:
    """What each rank sends to other hosts, and to other ranks of its own; headers included. Then
    its messages with tiles to other hosts: how many, and the bytes of the shortest (0: there are
    none).

    Args:
        config: of the hook.
        parameters: as the engine has them.
        nodes: which ranks add their gradients before they send them.
        buckets: of the step: the indices of the parameters of each, in bucket order.
        collective: of every bucket: "all_reduce", "reduce_scatter" or "all_gather".
        hosts: of every rank; the ranks of a node share one. None: every node is a host.
        in_warmup: the step is one of `warmup_steps`.
        find_unused_parameters: that of DDP, for gradients on the CPU.

    Raises:
        ConfigError: `workspace_cap_mb` is too small; with the least that is not.
    """
    options = _native.EngineOptions(
        **config.for_engine(nodes.world_size),
        parameters=[parameter.native() for parameter in parameters],
        nodes=nodes.members,
        collective=collective,
        find_unused_parameters=find_unused_parameters,
    )
    return _native.planned_bytes(
        options,
        buckets=buckets,
        hosts=nodes.of_rank if hosts is None else hosts,
        in_warmup=in_warmup,
    )
