"""Starts engines and their lanes: connections that only the engine uses."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from socket import socket

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from gradferry import _native
from gradferry.core.agreement import EchoError
from gradferry.core.config import Config
from gradferry.core.connect import connect_ranks
from gradferry.core.device import CPU, Transport, transport_of
from gradferry.core.meeting import patience, store_of
from gradferry.core.parameters import ParameterLayout
from gradferry.errors import PeerError

LANES = 3  # on a host: scatter, gather, commit
# One thread posts everything in one order, so one lane suffices.
STAGED_LANES = 1


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
) -> _native.BucketEngine:
    """Starts an engine on its own connections. Collective; pass equal arguments on all ranks.

    Args:
        config: as agreed by all ranks.
        parameters: as agreed by all ranks.
        group: of the ranks.
        nonce: different for every engine of the group.
        transport: of the gradients; None: they are on the CPU.
        hashes: of (configuration, parameters), for message headers.
        tensors: the parameters themselves, for `check_every`.
        find_unused_parameters: that of DDP.

    Raises:
        PeerError: as `make_lanes`.
    """
    path = transport_of(CPU, group) if transport is None else transport
    on_host = path.device.type == "cpu"
    lanes: list[_native.Lane] = []
    if path.exchanges and not path.streams:
        # First, because it is collective: a rank that failed before it would block the others.
        lanes = make_lanes(group, nonce, LANES if on_host else STAGED_LANES, path.device)
    store = PrefixStore(f"gradferry/{nonce}/peers", store_of(group)) if path.exchanges else None
    options = _native.EngineOptions(
        parameters=[p.native() for p in parameters],
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        config_hash=hashes[0],
        layout_hash=hashes[1],
        seed=config.seed,
        warmup_steps=config.warmup_steps,
        compressed_warmup=config.compressed_warmup,
        momentum=config.momentum,
        raise_nonfinite=config.nonfinite == "raise",
        exact_skip=config.exact_skip,
        loss_scale=loss_scale(config, path.device),
        check_every=config.check_every,
        chunk_bytes=config.chunk_bytes_at(dist.get_world_size(group)),
        equal_scatter=config.equal_scatter,
        workspace_cap_bytes=config.workspace_cap_bytes,
        find_unused_parameters=find_unused_parameters,
        store=store,
    )
    if on_host:
        return _native.HostEngine(options, tensors=list(tensors), lanes=lanes)
    return _native.DeviceEngine(
        options,
        device=path.device,
        tensors=list(tensors),
        lane=lanes[0] if lanes else None,
        group_name=group.group_name if path.exchanges and path.streams else None,
    )


def make_lanes(
    group: dist.ProcessGroup, nonce: str, num_lanes: int = LANES, place: torch.device = CPU
) -> list[_native.Lane]:
    """Connects lanes between the ranks of the group, separate from its own connections. Collective.

    Args:
        group: of the ranks.
        nonce: equal on all ranks, and different for all lanes of the group.
        place: device of the gradients; the timeout is that of the group's backend for it.

    Raises:
        PeerError: this rank cannot connect, or others did not within half of `patience`. Lanes
            made so far are closed.
    """
    if place.type != "cpu" or not _gloo_takes_plain_tcp():
        return [_native.Lane(backend) for backend in make_backends(group, nonce, num_lanes, place)]
    store = PrefixStore(f"gradferry/{nonce}/sockets", store_of(group))
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    timeout_seconds = _timeout(group, place).total_seconds()
    deadline = time.monotonic() + (patience(group, place) / 2).total_seconds()
    lanes: list[list[socket | None]] = []
    with _telling_of_others(), ExitStack() as opened:
        for number in range(num_lanes):
            left = deadline - time.monotonic()
            lanes.append(connect_ranks(store, rank, world_size, number, left))
            for connection in filter(None, lanes[-1]):
                opened.enter_context(connection)
        opened.pop_all()
    return _native.socket_lanes(
        [[-1 if each is None else each.detach() for each in lane] for lane in lanes],
        rank=rank,
        timeout_seconds=timeout_seconds,
    )


def make_backends(
    group: dist.ProcessGroup, nonce: str, number: int, place: torch.device = CPU
) -> list[ProcessGroupGloo]:
    """Gloo backends between the ranks of the group, separate from its own. As `make_lanes`."""
    # Not by new_group(): its names clash for overlapping groups, and after a group was destroyed
    # and created again.
    store = store_of(group)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    backends: list[ProcessGroupGloo] = []
    for index in range(number):
        prefixed = PrefixStore(f"gradferry/{nonce}/{index}", store)
        with _telling_of_others():
            # A rank that cannot connect gives up early, and then waits to tell the others why. They
            # must not wait for it longer than it waits for them.
            backend = ProcessGroupGloo(prefixed, rank, world_size, patience(group, place) / 2)
        backends.append(backend)
    for backend in backends:
        backend._set_default_timeout(_timeout(group, place))
    return backends


def _timeout(group: dist.ProcessGroup, place: torch.device) -> timedelta:
    timeout: timedelta = group._get_backend(place).options._timeout
    return timeout


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
        if _is_echo(reason):
            raise EchoError(
                f"the other ranks did not connect: {reason}; look at their errors first"
            ) from error
        raise PeerError(
            f"cannot connect to the other ranks: {reason}; look at the limits of the process "
            "(ulimit -n) and at its network"
        ) from error


def _is_echo(reason: str) -> bool:
    """Whether the failure of another rank caused the error."""
    words = ("timed out", "timeout", "by peer", "refused")
    return any(word in reason.lower() for word in words)
