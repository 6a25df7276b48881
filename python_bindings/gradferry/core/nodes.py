"""Which ranks share a machine: all ranks compute the same table from where each of them runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradferry import _native
from gradferry.core.agreement import gather_records
from gradferry.core.rendezvous import world_ranks
from gradferry.core.values import as_whole
from gradferry.errors import ConfigError

AUTO = "auto"
FLAT = "flat"
# Names of exchanges, of which the first is also an option `nodes`.
TWO_LEVEL = "two-level"
# A checked option `nodes`: AUTO, FLAT, the number of ranks per node, or the global ranks by node.
NodesOption = str | int | tuple[tuple[int, ...], ...]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Identity:
    """Where a rank runs. Ranks where both are equal share a machine and its loopback.

    Containers of one machine have one boot id, and inodes of namespaces repeat from machine to
    machine, so both are needed. Host names can be equal on different machines, and
    `LOCAL_WORLD_SIZE` also counts processes outside the group.

    Attributes:
        boot_id: of the running kernel.
        network: inode of the network namespace, unique while that kernel runs.
        unread: why one of the two could not be read; empty if both were.
    """

    boot_id: str = ""
    network: int = 0
    unread: str = ""


def identity() -> Identity:
    """Where this process runs. What cannot be read is no error, but a reason in the result."""
    try:
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
        network = _NETWORK.stat().st_ino
    except (OSError, ValueError) as error:
        return Identity(unread=str(error))
    return Identity(boot_id, network) if boot_id else Identity(unread=f"{_BOOT_ID} is empty")


@dataclass(frozen=True)
class Nodes:
    """The table of nodes, equal on all ranks.

    Attributes:
        members: the ranks of every node in the process group, ascending; nodes are in the order of
            their lowest ranks.
        note: what could not be found out, for people; empty if nothing.
    """

    members: tuple[tuple[int, ...], ...]
    note: str = field(default="", compare=False)

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return sum(self.ranks_per_node)

    @cached_property
    def of_rank(self) -> tuple[int, ...]:
        """The node of every rank."""
        node_of = {rank: node for node, ranks in enumerate(self.members) for rank in ranks}
        return tuple(node_of[rank] for rank in sorted(node_of))

    @property
    def ranks_per_node(self) -> tuple[int, ...]:
        """By node."""
        return tuple(len(ranks) for ranks in self.members)

    @property
    def smallest(self) -> int:
        """Ranks of the smallest node."""
        return min(self.ranks_per_node)

    @property
    def is_flat(self) -> bool:
        """Whether every rank is alone on its node."""
        return max(self.ranks_per_node) == 1

    def describe(self) -> str:
        """ "2 nodes of 2 ranks", "3 nodes of 1 to 2 ranks"."""
        count, least, most = len(self.members), self.smallest, max(self.ranks_per_node)
        sizes = f"{least}" if least == most else f"{least} to {most}"
        return f"{count} node{'s' * (count > 1)} of {sizes} rank{'s' * (most > 1)}"


def flat(world_size: int) -> Nodes:
    """The table in which every rank is alone."""
    return Nodes(tuple((rank,) for rank in range(world_size)))


def check_option(option: object) -> NodesOption:
    """Checks what can be checked of the option `nodes` without knowing the other ranks.

    Args:
        option: ``"auto"``, ``"flat"``, the number of consecutive ranks per node, or a DeviceMesh of
            two dimensions, whose rows are nodes.

    Returns:
        The option as JSON can hold it, which ranks compare.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(option, DeviceMesh):
        if option.ndim != 2:
            raise ConfigError(
                f"nodes= has a DeviceMesh of {option.ndim} dimension{'s' * (option.ndim > 1)} and "
                "needs 2, whose rows are nodes: init_device_mesh(device_type, (nodes, ranks per "
                "node)), or two dimensions of a larger mesh"
            )
        return tuple(tuple(row) for row in option.mesh.tolist())
    if (ranks := as_whole(option)) is not None:
        if ranks < 1:
            raise ConfigError(f"nodes={option}: a node has 1 rank or more; or use {AUTO!r}")
        return ranks
    if isinstance(option, str) and option in (AUTO, FLAT):
        return option
    raise ConfigError(
        f"nodes={option!r} must be {AUTO!r}, {FLAT!r}, a number of ranks per node, or a DeviceMesh "
        "of two dimensions, whose rows are nodes"
    )


def resolve(
    option: NodesOption, global_ranks: Sequence[int], identities: Sequence[Identity]
) -> Nodes:
    """The table of nodes. The same arguments, and so the same outcome, on all ranks.

    A rank that does not know where it runs is a node of its own with AUTO. Where the option says
    which ranks form a node, it is believed about that rank.

    Args:
        option: checked; equal on all ranks.
        global_ranks: those of the process group, in its order.
        identities: of these ranks.

    Raises:
        ConfigError: the option does not fit these ranks, or puts ranks on one node that do not
            share a machine and a network namespace.
    """
    world_size = len(global_ranks)
    if option == FLAT:
        return flat(world_size)
    if option == AUTO:
        return _found(identities, global_ranks)
    if isinstance(option, int):
        if world_size % option:
            raise ConfigError(
                f"nodes={option} must divide the number of ranks of the process group, "
                f"{world_size}; use another number, a DeviceMesh, or {AUTO!r}, which takes nodes "
                "of any size"
            )
        starts = range(0, world_size, option)
        members = tuple(tuple(range(start, start + option)) for start in starts)
    else:
        assert not isinstance(option, str)
        members = _of_mesh(option, global_ranks)
    _expect_shared(members, identities, global_ranks)
    together = {rank for ranks in members if len(ranks) > 1 for rank in ranks}
    return Nodes(members, _note(together, "not checked", identities, global_ranks))


def found_nodes(group: dist.ProcessGroup, device: torch.device) -> Nodes:
    """The nodes of a group's ranks, with gradients on a device, as AUTO finds them. Collective."""
    records = gather_records(vars(identity()), group, device)
    return resolve(AUTO, world_ranks(group), [Identity(**record) for record in records])


def exchange_between(nodes: Nodes) -> str:
    """FLAT or TWO_LEVEL."""
    return FLAT if nodes.is_flat else TWO_LEVEL


@dataclass(frozen=True)
class Exchange:
    """Which exchange runs, and why. Equal on all ranks.

    Attributes:
        nodes: whose ranks add up their gradients before they send; with every rank alone the
            exchange is flat, between all ranks, wherever they are.
        reason: for people, to follow "because".
    """

    nodes: Nodes
    reason: str = field(compare=False)

    @property
    def name(self) -> str:
        """FLAT or TWO_LEVEL."""
        return exchange_between(self.nodes)


def choose_exchange(option: NodesOption, found: Nodes, *, on_host: bool) -> Exchange:
    """The exchange between ranks. The same arguments, and so the same outcome, on all ranks.

    With AUTO, ranks add up their gradients inside nodes wherever that saves bytes on a network
    card: where there are two nodes or more and one of them has several ranks. On a device they do
    so only where the option asks for it, or a trial (`exchanges_to_choose_from`) found it faster.

    Args:
        option: checked.
        found: by `resolve`.
        on_host: whether gradients are in host memory.
    """
    alone = flat(found.world_size)
    if option == FLAT:
        return Exchange(alone, f"nodes={FLAT!r}")
    if found.is_flat:
        return Exchange(alone, "every rank is on a node of its own")
    if option == AUTO and len(found.members) == 1:
        return Exchange(alone, "all ranks are on one node")
    if option == AUTO and not on_host:
        return Exchange(alone, "a device runs two levels where nodes= or a trial asks for them")
    if option == AUTO:
        return Exchange(found, f"nodes={AUTO!r} found several ranks on a node")
    given = f"nodes={option}" if isinstance(option, int) else "a DeviceMesh says so"
    return Exchange(found, given)


def exchanges_to_choose_from(option: NodesOption, found: Nodes, *, on_host: bool) -> list[Exchange]:
    """What a trial chooses from: with AUTO both exchanges where there are two, else the one that
    the option asks for. Arguments as for `choose_exchange`, whose answer is the last.
    """
    other, chosen = (
        choose_exchange(option, found, on_host=each) for each in (not on_host, on_host)
    )
    return [other, chosen] if other != chosen else [chosen]


def option_for(nodes: Nodes) -> str | int | None:
    """The option `nodes` that makes attach take the exchange between these nodes; None: no simple
    one does.
    """
    if nodes.is_flat:
        return FLAT
    size = nodes.smallest
    ranks = range(nodes.world_size)
    consecutive = tuple(tuple(ranks[first : first + size]) for first in ranks[::size])
    return size if nodes.members == consecutive else None


def _found(identities: Sequence[Identity], global_ranks: Sequence[int]) -> Nodes:
    found: dict[Identity | int, list[int]] = {}
    for rank, place in enumerate(identities):
        found.setdefault(rank if place.unread else place, []).append(rank)
    members = tuple(map(tuple, found.values()))
    everybody = range(len(identities))
    return Nodes(members, _note(everybody, "alone", identities, global_ranks))


def _of_mesh(
    rows: tuple[tuple[int, ...], ...], global_ranks: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    held = Counter(rank for row in rows for rank in row)
    wrong = {
        "lacks": sorted(set(global_ranks) - set(held)),
        "has besides": sorted(set(held) - set(global_ranks)),
        "has more than once": sorted(rank for rank, count in held.items() if count > 1),
    }
    if any(wrong.values()):
        reasons = [f"{verb} {_native.name_ranks(ranks)}" for verb, ranks in wrong.items() if ranks]
        raise ConfigError(
            "the DeviceMesh of nodes= must hold every rank of the process group once, and "
            f"{', '.join(reasons)}; give it the ranks of the group, or use {AUTO!r}"
        )
    in_group = {rank: number for number, rank in enumerate(global_ranks)}
    return tuple(sorted(tuple(sorted(in_group[rank] for rank in row)) for row in rows))


def _expect_shared(
    members: tuple[tuple[int, ...], ...],
    identities: Sequence[Identity],
    global_ranks: Sequence[int],
) -> None:
    for ranks in members:
        known = [rank for rank in ranks if not identities[rank].unread]
        for rank in known[1:]:
            one, other = identities[known[0]], identities[rank]
            if one == other:
                continue
            apart = "machines" if one.boot_id != other.boot_id else "network namespaces"
            both = _native.name_ranks([global_ranks[known[0]], global_ranks[rank]])
            raise ConfigError(
                f"nodes= puts {both} on one node, but they run in different {apart}: the ranks of "
                f"a node share memory and loopback; use {AUTO!r}, or start the ranks in the order "
                "of their nodes"
            )


def _note(
    ranks: Iterable[int], what: str, identities: Sequence[Identity], global_ranks: Sequence[int]
) -> str:
    """Names those that do not know where they run, and why the first does not; empty without."""
    unread = [rank for rank in sorted(ranks) if identities[rank].unread]
    if not unread:
        return ""
    names = _native.name_ranks([global_ranks[rank] for rank in unread])
    return f"machine unknown, so {what}: {names} ({identities[unread[0]].unread})"
