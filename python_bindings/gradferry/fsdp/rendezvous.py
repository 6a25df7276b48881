"""The ranks of a sharded model meet, in the group of its shards and in that of its replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradferry.averaging.start import usable_group
from gradferry.core.agreement import (
    Record,
    error_record,
    gather_records,
    raise_first_error,
    rendezvous_place,
)
from gradferry.core.rendezvous import is_known, meet, patience, say_failed, world_ranks
from gradferry.errors import ConfigError, EchoError, GradferryError, PeerError
from gradferry.fsdp.model import ShardedModule

Result = TypeVar("Result")


def any_gives(
    given: bool, shard_group: dist.ProcessGroup, modules: Sequence[ShardedModule]
) -> bool:
    """Whether any rank of the shard group has given its replicas. Collective."""
    device = modules[0].device
    meet(shard_group, patience(shard_group, rendezvous_place(shard_group, device)), "call attach")
    records = gather_records({"replicate_group": given}, shard_group, device)
    return any(record.get("replicate_group") for record in records)


def known_to_all(
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
    device = modules[0].device
    try:
        meet(group, patience(group, rendezvous_place(group, device)), purpose, beside)
        return gather_records({} if own is None else error_record(own), group, device)
    except PeerError as error:
        if own is None:
            raise
        raise error from own


def _raise_first(own: Exception | None, records: list[Record], group: dist.ProcessGroup) -> None:
    """Raises the error of this rank, else that of another rank of the group."""
    if own is not None and not isinstance(own, EchoError):
        raise own
    raise_first_error(records, group)


def replicas_of(
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
        group = known_to_all(shard_group, modules, lambda: _replicate_group(given, shard_group))
    except GradferryError as error:
        own = error
        try:
            group = _replicate_group(given, shard_group)
        except GradferryError:
            raise own from None
    records: list[Record] = []

    def tell_and_hear() -> None:
        records.extend(_records(own, group, modules, "call attach", shard_group))
        _raise_first(own, records, group)

    try:
        if own is None:
            known_to_all(shard_group, modules, tell_and_hear)
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
    if not is_known(group):
        raise ConfigError(
            "torch.distributed does not know replicate_group, and cannot say which ranks of the "
            "job it has; make it with torch.distributed.new_group()"
        )
    both = set(world_ranks(shard_group)) & set(world_ranks(group))
    if both != {dist.get_rank()}:
        raise ConfigError(
            f"replicate_group has ranks {sorted(both)} of this rank's shard group; give the ranks "
            "that hold the same shard, such as mesh['replica']"
        )
    return group
