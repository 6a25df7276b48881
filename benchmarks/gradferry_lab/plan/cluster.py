"""A hypothetical cluster: the costs of the parts of a step, from assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gradferry import _native
from gradferry.core.config import Config
from gradferry.core.nodes import Nodes
from gradferry.forecast.buckets import parameter_codecs
from gradferry.forecast.chunks import wire_bytes_per_step
from gradferry.forecast.costs import (
    CastCosts,
    CodecCosts,
    CollectiveCosts,
    Costs,
    Curve,
    LinkCosts,
    LocalCosts,
    NodeCosts,
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
    def nodes(self) -> Nodes:
        """Ranks of a node follow each other."""
        firsts = range(0, self.world, self.gpus_per_node)
        return Nodes(tuple(tuple(range(first, first + self.gpus_per_node)) for first in firsts))

    def model(self) -> list[Parameter]:
        """Matrices of one size that together have the model's parameters."""
        count = max(1, min(_MATRICES, int(self.parameters // _WIDTH)))
        rows = max(1, round(self.parameters / count / _WIDTH))
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


def costs_of(cluster: Cluster, nodes: Nodes, configs: Sequence[Config]) -> Costs:
    """Costs of the exchange between these nodes: those of the cluster, or of one rank each."""
    wanted = {codec for c in configs for codec in parameter_codecs(c, cluster.model())}
    ranks = max(nodes.ranks_per_node)
    return Costs(
        nodes=nodes,
        link=link_costs(cluster, nodes),
        casts={hook: _cast(cluster, dtype) for hook, dtype in BACKEND_HOOKS.items()},
        codecs={codec: _codec(cluster, codec, len(nodes.members)) for codec in wanted},
        node=None if nodes.is_flat else _node(cluster, ranks),
    )


def link_costs(cluster: Cluster, nodes: Nodes) -> LinkCosts:
    """The collectives of the exchange between these nodes. All ranks of a node share its card."""
    local = cluster.gpus_per_node
    inside = _collective(cluster, 1 / cluster.intra_link)
    all_reduce = dict.fromkeys(BACKEND_HOOKS.values(), _all_reduce(cluster))
    if nodes.is_flat:
        off_node = _share_off_node(cluster)
        per_byte = max(off_node * local / cluster.link, (1 - off_node) / cluster.intra_link)
        between = _collective(cluster, per_byte)
        return LinkCosts(between, between, all_reduce)
    between = _collective(cluster, local / cluster.link)
    return LinkCosts(between, between, all_reduce, local=LocalCosts(inside, inside))


def _share_off_node(cluster: Cluster) -> float:
    """Of what a rank of the flat exchange sends to all others, with a tile for each of them."""
    elements = [cluster.world * _native.TILE_ELEMENTS]
    hosts = cluster.nodes.of_rank
    leaving, all_of_it = (
        sum(wire_bytes_per_step(elements, _one_byte, [[0]], cluster.world, hosts=places))
        for places in (hosts, None)
    )
    return leaving / all_of_it


def _one_byte(parameter: int, num_elements: int) -> tuple[int, int]:
    return 1, 1


def _all_reduce(cluster: Cluster) -> CollectiveCosts:
    """The backend's: rings through all nodes, each of which uses the whole card of a node."""
    nodes, local = len(cluster.nodes.members), cluster.gpus_per_node
    across = 2 * (nodes - 1) / nodes / cluster.link
    inside = 2 * (local - 1) / local / cluster.intra_link
    return _collective(cluster, max(across, inside))


def _collective(cluster: Cluster, s_per_byte: float) -> CollectiveCosts:
    line = Curve(((0.0, 0.0), (float(_MOST_BYTES), _MOST_BYTES * s_per_byte)))
    return CollectiveCosts(cluster.latency_s, line)


def _node(cluster: Cluster, ranks: int) -> NodeCosts:
    """A copy reads and writes; a sum reads the gradients of all ranks and writes one."""
    item = _GRADIENT.itemsize
    return NodeCosts(2 * item / cluster.copy, (ranks + 1) * item / cluster.copy)


def _cast(cluster: Cluster, dtype: torch.dtype) -> CastCosts:
    """Reads one dtype and writes the other; fp32 is divided where it lies."""
    moved = _GRADIENT.itemsize + dtype.itemsize
    after = 0.0 if dtype == _GRADIENT else moved / cluster.copy
    return CastCosts(moved / cluster.copy, after)


def _codec(cluster: Cluster, codec: ParameterCodec, messages: int) -> CodecCosts:
    """Costs of codec kernels: the bytes they read and write, at the speed of a copy.

    messages: that an owner reduces.
    """
    tile = _native.TILE_ELEMENTS
    name = str(codec.codec)
    sent = _native.payload_bytes(name, tile, _GRADIENT, "worker") / tile
    returned = _native.payload_bytes(name, tile, _GRADIENT, "owner") / tile
    worker, owner = (8.0 * kept for kept in codec.residuals)  # fp32, read and written
    item = _GRADIENT.itemsize
    return CodecCosts(
        encode_per_element=(item + worker + sent) / cluster.copy,
        reduce_per_element=(messages * sent + owner + returned) / cluster.copy,
        decode_per_element=(returned + item + worker * codec.momentum) / cluster.copy,
        check_per_byte=1.0 / cluster.copy,
    )
