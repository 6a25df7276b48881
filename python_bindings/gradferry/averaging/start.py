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
    raise_first_error,
    raise_first_mismatch,
    rendezvous_place,
)
from gradferry.core.nodes import choose_exchange, identity, received_identities, resolve
from gradferry.core.rendezvous import exists, meet, patience, say_failed, world_ranks
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
    build: Callable[[Running, str], Started],
    *,
    purpose: str,
) -> Started:
    """Agrees with all ranks of the group and starts the engine. Collective.

    Args:
        group: of the ranks.
        device: of what is averaged.
        propose: the configuration of this rank. An error in it is raised on all ranks.
        build: of the configuration that all ranks agreed on and a nonce, which is equal on all
            ranks and never comes twice. It starts the engine, and is collective.
        purpose: what ranks that stay away did not do, for example "come to attach".

    Returns:
        What `build` returned.

    Raises:
        ConfigError, StateError: this or another rank cannot; the same text on every rank.
        RankMismatchError: the ranks differ; the same text on every rank.
        PeerError: a rank did not come, or failed to set up its connections or memory. Nothing was
            changed: all ranks can try again.
    """
    place = rendezvous_place(group, device)
    longest = patience(group, place)
    meet(group, longest, purpose)
    running: Running | None = None
    with interrupts_told(group):
        try:
            running = propose()
            record = running.record()
        except Exception as error:
            record = error_record(error)
        mine = {"nonce": uuid.uuid4().hex, "identity": vars(identity()), "record": record}
        envelopes = gather_records(mine, group, place)
    # A rank that makes something else, such as a DiLoCo, has no envelope around its record.
    records = [_record(envelope.get("record", envelope)) for envelope in envelopes]
    raise_first_error(records, group)
    raise_first_mismatch(records, group)
    assert running is not None  # otherwise raise_first_error() has raised this rank's error
    names = world_ranks(group)
    identities = received_identities([envelope.get("identity") for envelope in envelopes], names)
    asked = running.config.nodes
    running.nodes = resolve(asked, names, identities)
    running.exchange = choose_exchange(asked, running.nodes, on_host=running.transport.on_host)

    built: Started | None = None
    interrupted: KeyboardInterrupt | None = None
    try:
        built = build(running, str(envelopes[0].get("nonce")))
        outcome: Record = {}
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
            raise_first_error(gather_records(outcome, group, place), group)
    except BaseException:
        built = running = None  # otherwise the traceback would keep the connections alive
        if interrupted is not None:
            raise interrupted from None
        raise
    assert built is not None
    return built


def _record(received: object) -> Record:
    return received if isinstance(received, dict) else {}
