"""All ranks agree on what they average and how, connect, and start their engines."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from gradferry.averaging.running import Running
from gradferry.core.agreement import (
    Record,
    error_record,
    gather_records,
    interrupts_told,
    on_all_ranks,
    raise_first_error,
    raise_first_mismatch,
    rendezvous_place,
)
from gradferry.core.nodes import Identity, choose_exchange, identity, resolve
from gradferry.core.rendezvous import exists, meet, patience, say_failed
from gradferry.errors import ConfigError, PeerError, StateError

Started = TypeVar("Started")


def usable_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one, if it exists.

    Raises:
        ConfigError, StateError: on this rank alone, which without a group cannot tell the others.
    """
    if group is None and not dist.is_initialized():
        raise StateError("there is no process group; call init_process_group() first, or give one")
    members = dist.group.WORLD if group is None else group
    if not isinstance(members, dist.ProcessGroup):
        raise ConfigError(
            f"group={group!r} is no process group that this rank is in; call this only on the "
            "ranks of the group"
        )
    if not members._device_types:
        raise ConfigError(
            f"group={members!r} has no backend of its own: call its _register_backend(), or, where "
            "it wraps a group, give that"
        )
    if not exists(members):
        raise StateError(
            f"the process group {members.group_name!r} was destroyed, as far as torch.distributed "
            "knows; pass one that exists"
        )
    return members


def start(
    group: dist.ProcessGroup,
    device: torch.device,
    propose: Callable[[], Running],
    build: Callable[[Running], Started],
    *,
    purpose: str,
) -> Started:
    """Agrees with all ranks of the group and starts the engine. Collective.

    Args:
        group: of the ranks.
        device: of what is averaged.
        propose: the configuration of this rank. An error in it is raised on all ranks.
        build: what is made of the configuration that all ranks agreed on, with its engine started.
            An error in it, too, is raised on all ranks.
        purpose: what ranks that stay away did not do, for example "call attach".

    Returns:
        What `build` returned.

    Raises:
        ConfigError, StateError: this or another rank cannot; the same text on every rank.
        RankMismatchError: the ranks differ; the same text on every rank.
        PeerError: a rank did not come, or failed to set up its connections or memory. Nothing was
            changed: all ranks can try again.
    """
    longest = patience(group, rendezvous_place(group, device))
    meet(group, longest, purpose)
    running: Running | None = None

    def propose_here() -> Record:
        nonlocal running
        running = propose()
        own = {"nonce": uuid.uuid4().hex, "identity": vars(identity())}  # by rank
        return {**running.record(), **own}

    records = on_all_ranks(propose_here, group, device)
    nonce, *_ = [str(record.pop("nonce", None)) for record in records]
    identities = [record.pop("identity", {}) for record in records]
    raise_first_mismatch(records, group)
    assert running is not None  # otherwise on_all_ranks() has raised this rank's error
    names, asked = running.world_ranks, running.config.nodes
    running.nodes = resolve(asked, names, [Identity(**each) for each in identities])
    running.exchange = choose_exchange(asked, running.nodes, on_host=running.transport.on_host)

    built: Started | None = None
    interrupted: KeyboardInterrupt | None = None
    outcome: Record = {}
    try:
        running.start(group, nonce)
        built = build(running)
    except Exception as error:
        outcome = error_record(error)
    except KeyboardInterrupt as error:
        interrupted = error
        outcome = error_record(PeerError("interrupted while it connected"))
    try:
        if outcome:
            say_failed(group)  # the others wait for this rank's connections
        with interrupts_told(group):
            # A rank that could not connect must still tell the others.
            meet(group, longest, "connect")
            raise_first_error(gather_records(outcome, group, device), group)
    except BaseException:
        built = running = None  # otherwise the traceback would keep the connections alive
        if interrupted is not None:
            raise interrupted from None
        raise
    assert built is not None
    return built
