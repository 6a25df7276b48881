"""What the ranks of a sharded model send each other in a step, exchange by exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch
from gradferry.core.config import Config
from gradferry.core.engine import planned_bytes
from gradferry.core.nodes import flat
from gradferry.core.parameters import describe_parameters
from gradferry.fsdp.choice import Choice, choose
from gradferry.fsdp.model import Shard, ShardedModule
from torch import nn

from gradferry_lab.workloads.hooks import PARAM_DTYPE, ring_exchange, split_options

REPLICAS, REDUCE_SCATTER, ALL_GATHER = "replicas", "reduce_scatter", "all_gather"  # in `stats()`
COLLECTIVES = {REPLICAS: "all_reduce", REDUCE_SCATTER: REDUCE_SCATTER, ALL_GATHER: ALL_GATHER}
NO_CODECS = Choice(None, None, None)  # FSDP2 alone
_ROOT = "the model"  # the name of its module, which keeps what it gathered until backward ends
_CPU = torch.device("cpu")

# A shard, and the rank of the group that owns it; None: all ranks do.
Piece = tuple[Shard, int | None]
Bucket = Sequence[Piece]


@dataclass(frozen=True)
class Exchange:
    """What ranks of a group send each other in a step.

    Attributes:
        name: of COLLECTIVES.
        config: of its codec; None: FSDP2 does it.
        groups: of ranks of the default group.
        buckets: of a step, once that is known.
    """

    name: str
    config: Config | None
    groups: Sequence[Sequence[int]]
    buckets: Callable[[], Sequence[Bucket]]

    @property
    def is_counted(self) -> bool:
        """Whether an engine counts its bytes. PyTorch does not."""
        return self.config is not None and not self.config.passes_through

    def ring_bytes(self, item_bytes: int | None = None) -> int:
        """What a rank sends in a ring, without a codec. `item_bytes`: None: as the dtypes say."""
        passes, ranks = (2 if self.name == REPLICAS else 1), len(self.groups[0])
        shards = [shard for bucket in self.buckets() for shard, _ in bucket]
        content = sum(each.size.numel() * (item_bytes or each.dtype.itemsize) for each in shards)
        return round(passes * (ranks - 1) * content / ranks)

    def sent(self, hosts: Sequence[int], *, steps: int = 0) -> list[int]:
        """Bytes in a step from every rank to those on other hosts. `hosts`: of every rank.

        steps: that were made; the last one is meant. 0: one behind all `warmup_steps`.
        """
        by_rank = [0] * len(hosts)
        for ranks in self.groups:
            found = self._sent_in_group([hosts[rank] for rank in ranks], steps)
            for rank, num_bytes in zip(ranks, found, strict=True):
                by_rank[rank] = num_bytes
        return by_rank

    def _sent_in_group(self, hosts: Sequence[int], steps: int) -> list[int]:
        if self.config is None or not self.is_counted:
            return ring_exchange(self.ring_bytes(), hosts)
        buckets = self.buckets()
        pieces = [piece for bucket in buckets for piece in bucket]
        parameters = describe_parameters(
            [(shard.name, shard.placeholder(_CPU)) for shard, _ in pieces],
            self.config,
            [owner for _, owner in pieces],
            [shard.whole_size for shard, _ in pieces],
            exchanges=True,
        )
        numbers = iter(range(len(pieces)))
        sent = planned_bytes(
            self.config,
            parameters,
            flat(len(hosts)),
            [[next(numbers) for _ in bucket] for bucket in buckets],
            collective=COLLECTIVES[self.name],
            hosts=hosts,
            in_warmup=0 < steps <= self.config.warmup_steps,
        )
        return [elsewhere for elsewhere, *_ in sent]


Modules = Sequence[ShardedModule] | Sequence["MatrixModule"]


def choice_of(hook: str, modules: Modules, *, averages: bool) -> Choice:
    """The codec of every exchange under a hook.

    Args:
        hook: its name, which is none of FSDP2's own.
        modules: of the model.
        averages: whether there are replicas.

    Raises:
        ConfigError: as `gradferry.fsdp.attach`.
    """
    codec, options = split_options(hook, sharded=True)
    options.pop(PARAM_DTYPE, None)
    return choose(codec, options, cast(Sequence[ShardedModule], modules), averages=averages)


@dataclass(frozen=True)
class MatrixModule:
    """A module of one matrix, in place of one of FSDP2's where there is no model. All has the
    meaning that it has in a ShardedModule.
    """

    num_elements: int  # of one rank's shard
    dtype: torch.dtype | None = None  # in which it is gathered; None: fp32
    ranks: int = 2
    name: str = "matrix"
    device: torch.device = _CPU

    @property
    def shard_group(self) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: self.ranks)

    @property
    def shards(self) -> list[Shard]:
        return [self._shard(torch.float32)]

    @property
    def gathered(self) -> list[Shard]:
        return [self._shard(self.dtype or torch.float32)]

    def _shard(self, dtype: torch.dtype) -> Shard:
        whole = nn.Parameter(torch.empty(self.num_elements * self.ranks, device="meta"))
        return Shard(self.name, whole, torch.Size((1, self.num_elements)), dtype)

    def order(self) -> list[int]:
        return [0]

    def expect_gatherable(self) -> None:
        pass


def exchanges_of(modules: Modules, choice: Choice, mesh: Sequence[Sequence[int]]) -> list[Exchange]:
    """What FSDP2 exchanges of a model: between replicas where there are several, else within one.

    Args:
        modules: of the model.
        choice: the codecs.
        mesh: the ranks of every replica.
    """
    if len(mesh) > 1:

        def averaged() -> list[Bucket]:
            return [[(each, None) for each in _in_order(module)] for module in modules]

        columns = list(zip(*mesh, strict=True))
        return [Exchange(REPLICAS, choice.replicas, columns, averaged)]
    ranks = range(len(mesh[0]))
    keeps = choice.all_gather is not None and choice.all_gather.keep_gathered

    def scattered() -> list[Bucket]:
        return [
            [(each, rank) for rank in ranks for each in _in_order(module)] for module in modules
        ]

    def gathered() -> list[Bucket]:
        again = [] if keeps else [module for module in modules if module.name != _ROOT]
        return [
            [(each, rank) for rank in ranks for each in module.gathered]
            for module in (*modules, *again)
        ]

    return [
        Exchange(REDUCE_SCATTER, choice.reduce_scatter, mesh, scattered),
        Exchange(ALL_GATHER, choice.all_gather, mesh, gathered),
    ]


def _in_order(module: ShardedModule | MatrixModule) -> list[Shard]:
    return [module.shards[number] for number in module.order()]
