"""Which ranks share a host and its network interface, and the bytes that it sends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gradferry.core.nodes import Nodes, found_nodes

from gradferry_lab.ranks.launch import default_group, gather_from_ranks
from gradferry_lab.ranks.network import sent_bytes

LOOPBACK = "loopback"
NETWORK = "network"  # of whoever started the ranks
DEVICE_VARIABLE = "GLOO_SOCKET_IFNAME"  # how gloo is told which interface to use


def found_hosts() -> Nodes:
    """The hosts of the default group's ranks: a host is a network namespace of a machine. In the
    order of their lowest ranks. Collective.
    """
    return found_nodes(default_group(), torch.device("cpu"))


def busiest_host(hosts: Nodes, by_rank: Sequence[int]) -> tuple[int, int]:
    """The host whose ranks send most to other hosts, and how much that is.

    by_rank: bytes that each rank sends to other hosts.
    """
    sums = [sum(by_rank[rank] for rank in ranks) for ranks in hosts.members]
    most = max(sums)
    return sums.index(most), most


class Where(NamedTuple):
    """Where the ranks of a run were: keys of its rows."""

    link: str
    ranks: int
    hosts: int
    ranks_per_host: int | None  # None where hosts have different numbers of ranks

    @classmethod
    def on(cls, link: str, hosts: Nodes) -> Where:
        """Ranks on these hosts. Under torchrun on several, `link` may be the default's name."""
        if link == LOOPBACK and len(hosts.members) > 1:
            link = NETWORK
        sizes = set(hosts.ranks_per_node)
        per_host = sizes.pop() if len(sizes) == 1 else None
        return cls(link, hosts.world_size, len(hosts.members), per_host)


def ranks_text(row: Mapping[str, Any]) -> str:
    """`4 ranks`, or `4 ranks on 2 hosts` where they share hosts that a network joins."""
    ranks, hosts = row["ranks"], row.get("hosts", 1)  # older files do not say
    return f"{ranks} ranks on {hosts} hosts" if 1 < hosts < ranks else f"{ranks} ranks"


class InterfaceCounter:
    """Bytes that the network interface of this rank's host sends to other hosts."""

    def __init__(self, hosts: Nodes) -> None:
        """Collective. Counts only where the ranks are on several hosts, and gloo was given one
        interface on each that the kernel counts.
        """
        self.hosts = hosts
        here = os.environ.get(DEVICE_VARIABLE, "")
        names = gather_from_ranks({"name": here, "counted": sent_bytes(here) is not None})
        ones = {(host, record["name"]) for host, record in zip(hosts.of_rank, names, strict=True)}
        counts = all(record["counted"] for record in names) and len(ones) == len(hosts.members) > 1
        self._device = here if counts else None
        self._before = 0

    def begin(self) -> None:
        """Counts from here on. Collective."""
        if self._device is not None:
            dist.barrier()  # so that what was sent before is gone
            self._before = self._read()
            dist.barrier()  # so that no rank of the host sends before the others have read

    def end(self) -> int | None:
        """Bytes sent since `begin`, protocol headers included: the host's, so about the same on all
        ranks of a host. None where they cannot be counted. Collective.
        """
        if self._device is None:
            return None
        dist.barrier()  # so that other ranks of the host have sent all
        return self._read() - self._before

    def _read(self) -> int:
        assert self._device is not None
        sent = sent_bytes(self._device)
        assert sent is not None
        return sent
