"""Which ranks share a host and its network interface, and the bytes that it sends."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from gradferry.core.nodes import AUTO, identity, received_identities, resolve
from gradferry.lab.ranks.launch import gather_from_ranks
from gradferry.lab.ranks.network import sent_bytes

DEVICE_VARIABLE = "GLOO_SOCKET_IFNAME"  # how gloo is told which interface to use


@dataclass(frozen=True)
class Hosts:
    """The host of every rank. Hosts are numbered in the order of their lowest ranks."""

    of_rank: tuple[int, ...]

    @classmethod
    def found(cls) -> Hosts:
        """Those of the default group: a host is a network namespace of a machine. Collective."""
        identities = received_identities(gather_from_ranks(vars(identity())))
        ranks = range(len(identities))
        nodes = resolve(AUTO, ranks, identities)
        return cls(tuple(nodes.of(rank)[0] for rank in ranks))

    def __len__(self) -> int:
        return len(set(self.of_rank))

    @property
    def ranks_per_host(self) -> int | None:
        """None where hosts have different numbers of ranks."""
        sizes = set(Counter(self.of_rank).values())
        return sizes.pop() if len(sizes) == 1 else None

    def first_rank(self, host: int) -> int:
        """The lowest rank of a host."""
        return self.of_rank.index(host)

    def busiest(self, by_rank: Sequence[int]) -> tuple[int, int]:
        """The host whose ranks send most to other hosts, and how much that is.

        by_rank: bytes that each rank sends to other hosts.
        """
        sums = Counter(dict.fromkeys(self.of_rank, 0))
        for host, num_bytes in zip(self.of_rank, by_rank, strict=True):
            sums[host] += num_bytes
        return sums.most_common(1)[0]


class Where(NamedTuple):
    """Where the ranks of a run were: keys of its rows."""

    link: str
    ranks: int
    hosts: int
    ranks_per_host: int | None  # None where hosts have different numbers of ranks


def ranks_text(row: Mapping[str, Any]) -> str:
    """`4 ranks`, or `4 ranks on 2 hosts` where they share hosts that a network joins."""
    ranks, hosts = row["ranks"], row.get("hosts", 1)  # older files do not say
    return f"{ranks} ranks on {hosts} hosts" if 1 < hosts < ranks else f"{ranks} ranks"


class InterfaceCounter:
    """Bytes that the network interface of this rank's host sends to other hosts."""

    def __init__(self, hosts: Hosts) -> None:
        """Collective. Counts only where the ranks are on several hosts, and gloo was given one
        interface on each that the kernel counts.
        """
        self.hosts = hosts
        here = os.environ.get(DEVICE_VARIABLE, "")
        names = gather_from_ranks({"name": here, "counted": sent_bytes(here) is not None})
        ones = {(host, record["name"]) for host, record in zip(hosts.of_rank, names, strict=True)}
        counts = all(record["counted"] for record in names) and len(ones) == len(hosts) > 1
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
