"""A hypothetical cluster: the costs of the parts of a step, from assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gradferry import _native
from gradferry.core.config import Config
from gradferry.forecast.buckets import parameter_codecs
from gradferry.forecast.costs import (
    CastCosts,
    CodecCosts,
    CollectiveCosts,
    Costs,
    Curve,
    LinkCosts,
    Parameter,
    ParameterCodec,
    StepProfile,
)
from gradferry.forecast.hook_names import BACKEND_HOOKS

_MOST_BYTES = 1 << 34  # beyond any message: curves are straight lines
# A transformer's step: forward 2, backward 4 operations for every parameter and token.
FLOPS_PER_PARAMETER = 6.0
BACKWARD_SHARE = 4.0 / 6.0
_MATRICES = 96  # the model is that many square ones, ready one after the other
_WIDTH = 4096
_GRADIENT = torch.float32


@dataclass(frozen=True)
class Cluster:
    """Machines and a model.

    Attributes:
        world: ranks, a GPU each.
        gpus_per_node: GPUs that share a node and its network card.
        link: bytes per second of a node's card, in each direction.
        latency_s: of a small collective between nodes.
        intra_link: bytes per second of a GPU to the others of its node, in each direction.
        parameters, tokens: of the model; per rank and step.
        flops: peak operations per second of a GPU, in the arithmetic of the model.
        mfu: the fraction of this peak that a training step reaches.
        copy: bytes per second that a GPU's codec kernels move, read plus written.
    """

    world: int
    gpus_per_node: int
    link: float
    latency_s: float
    intra_link: float
    parameters: float
    tokens: float
    flops: float
    mfu: float
    copy: float

    @property
    def nodes(self) -> int:
        return self.world // self.gpus_per_node

    def model(self, share: int = 1) -> list[Parameter]:
        """Matrices of one size that together have the model's parameters, or a share of them."""
        count = max(1, min(_MATRICES, int(self.parameters // _WIDTH)))
        rows = max(1, round(self.parameters / count / _WIDTH / share))
        return [Parameter(f"matrix{number}", (rows, _WIDTH), _GRADIENT) for number in range(count)]

    def profile(self) -> StepProfile:
        """The step: gradients become ready at even intervals, that of the last matrix first."""
        total = FLOPS_PER_PARAMETER * self.parameters * self.tokens / (self.flops * self.mfu)
        forward = total * (1 - BACKWARD_SHARE)
        count = len(self.model())
        ready = [forward + (total - forward) * (count - i) / count for i in range(count)]
        return StepProfile(total, total, tuple(ready), spare_cores=1.0)

    def at(self, link: float) -> Cluster:
        """The same cluster with another card in every node."""
        return replace(self, link=link)


def flat_costs(cluster: Cluster, configs: Sequence[Config]) -> Costs:
    """Costs of the flat exchange, in which all ranks of a node share its card."""
    world, local = cluster.world, cluster.gpus_per_node
    off_node = (world - local) / max(1, world - 1)  # of what a rank sends to all others
    per_byte = max(off_node * local / cluster.link, (1 - off_node) / cluster.intra_link)
    return _costs(cluster, world, per_byte, _all_reduce(cluster), configs)


def hierarchical_costs(cluster: Cluster, configs: Sequence[Config]) -> Costs:
    """Costs of the hierarchical exchange: each node reduces inside, each of its GPUs exchanges one
    share with the GPUs of other nodes, and the node gathers. For one share and one GPU per node.
    """
    per_byte = cluster.gpus_per_node / cluster.link
    return _costs(cluster, cluster.nodes, per_byte, _all_reduce(cluster), configs)


def inside_node_s(cluster: Cluster, num_bytes: float) -> float:
    """Reduce-scatter and all-gather of a node's GPUs, of `num_bytes` of gradients each."""
    share = (cluster.gpus_per_node - 1) / cluster.gpus_per_node
    return 2 * share * num_bytes / cluster.intra_link


def _all_reduce(cluster: Cluster) -> CollectiveCosts:
    """The backend's: rings through all nodes, each of which uses the whole card of a node."""
    nodes, local = cluster.nodes, cluster.gpus_per_node
    across = 2 * (nodes - 1) / nodes / cluster.link
    inside = 2 * (local - 1) / local / cluster.intra_link
    return _collective(cluster, max(across, inside))


def _collective(cluster: Cluster, s_per_byte: float) -> CollectiveCosts:
    line = Curve(((0.0, 0.0), (float(_MOST_BYTES), _MOST_BYTES * s_per_byte)))
    return CollectiveCosts(cluster.latency_s, line)


def _costs(
    cluster: Cluster,
    world_size: int,
    s_per_byte: float,
    all_reduce: CollectiveCosts,
    configs: Sequence[Config],
) -> Costs:
    exchange = _collective(cluster, s_per_byte)
    dtypes = set(BACKEND_HOOKS.values())
    wanted = {codec for c in configs for codec in parameter_codecs(c, cluster.model())}
    return Costs(
        world_size=world_size,
        link=LinkCosts(exchange, exchange, dict.fromkeys(dtypes, all_reduce)),
        casts={hook: _cast(cluster, dtype) for hook, dtype in BACKEND_HOOKS.items()},
        codecs={codec: _codec(cluster, codec, world_size) for codec in wanted},
    )


def _cast(cluster: Cluster, dtype: torch.dtype) -> CastCosts:
    """Reads one dtype and writes the other; fp32 is divided where it lies."""
    moved = _GRADIENT.itemsize + dtype.itemsize
    after = 0.0 if dtype == _GRADIENT else moved / cluster.copy
    return CastCosts(moved / cluster.copy, after)


def _codec(cluster: Cluster, codec: ParameterCodec, world_size: int) -> CodecCosts:
    """Costs of codec kernels: the bytes they read and write, at the speed of a copy."""
    tile = _native.TILE_ELEMENTS
    name = str(codec.codec)
    sent = _native.payload_bytes(name, tile, _GRADIENT, "worker") / tile
    returned = _native.payload_bytes(name, tile, _GRADIENT, "owner") / tile
    worker, owner = (8.0 * kept for kept in codec.residuals)  # fp32, read and written
    item = _GRADIENT.itemsize
    return CodecCosts(
        encode_per_element=(item + worker + sent) / cluster.copy,
        reduce_per_element=(world_size * sent + owner + returned) / cluster.copy,
        decode_per_element=(returned + item + worker * codec.momentum) / cluster.copy,
        check_per_byte=1.0 / cluster.copy,
    )
