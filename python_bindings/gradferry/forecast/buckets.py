"""DDP's buckets, and the chunks of a codec with their costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import _distributed_c10d

from gradferry import _native
from gradferry.core.config import EXACT, Config
from gradferry.core.nodes import Nodes
from gradferry.forecast.chunks import (
    Chunk,
    assign_owners,
    cut_chunks,
    exchanged_bytes,
    payload_sizes,
)
from gradferry.forecast.costs import CodecCosts, Costs, Parameter, ParameterCodec
from gradferry.forecast.simulate import ChunkCost, LocalChunkCost

# DDP's default for bucket_cap_mb.
DEFAULT_CAP_MB = 25.0


def ddp_buckets(
    parameters: Sequence[Parameter], ready_s: Sequence[float], cap_mb: float | None
) -> list[list[int]]:
    """Indices of the parameters by bucket, as DDP arranges them after its first step.

    ready_s: when the gradient of each parameter is there.
    cap_mb: DDP's bucket_cap_mb; None: its default, with a smaller first bucket.
    """
    order = sorted(range(len(parameters)), key=lambda index: ready_s[index])
    tensors = [_meta(parameters[index]) for index in order]
    limit = int((cap_mb or DEFAULT_CAP_MB) * 2**20)
    first = _distributed_c10d._DEFAULT_FIRST_BUCKET_BYTES if cap_mb is None else limit
    # With a given order, the result holds indices into `tensors`.
    assigned, _ = _distributed_c10d._compute_bucket_assignment_by_size(
        tensors, [first, limit], [False] * len(tensors), list(range(len(tensors)))
    )
    return [[order[place] for place in bucket] for bucket in assigned]


def _meta(parameter: Parameter) -> torch.Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def parameter_codecs(config: Config, parameters: Sequence[Parameter]) -> list[ParameterCodec]:
    """The codec and residuals of each parameter."""
    chosen = []
    for parameter in parameters:
        codec = config.codec_of(parameter.name, len(parameter.shape), parameter.num_elements)
        if parameter.dtype == torch.float64:
            codec = EXACT
        residuals = config.residuals_of(codec)
        chosen.append(ParameterCodec(codec, residuals, config.momentum != 0))
    return chosen


class CodecTraffic:
    """A model's tiles under a configuration, for any buckets."""

    def __init__(self, config: Config, parameters: Sequence[Parameter], nodes: Nodes) -> None:
        self._codecs = parameter_codecs(config, parameters)
        self._nodes = nodes
        self._chunk_bytes = config.chunk_bytes_at(nodes.world_size)
        self._dense_bytes = config.dense_bytes_between(nodes)
        self._equal_scatter = config.equal_scatter
        codecs = [str(chosen.codec) for chosen in self._codecs]
        sizes = payload_sizes(list(zip(codecs, (p.dtype for p in parameters), strict=True)))
        self._tiles = assign_owners(
            [p.num_elements for p in parameters],
            sizes,
            nodes,
            item_bytes=[p.dtype.itemsize for p in parameters],
        )

    def cut(self, buckets: Sequence[Sequence[int]]) -> list[list[Chunk]]:
        """The chunks of every bucket."""
        return [
            cut_chunks(
                self._tiles,
                bucket,
                self._nodes,
                self._chunk_bytes,
                equal_scatter=self._equal_scatter,
                dense_bytes=self._dense_bytes,
            )
            for bucket in buckets
        ]

    def cost(self, cut: Sequence[Sequence[Chunk]], costs: Costs) -> list[list[ChunkCost]]:
        """The costs of every chunk, for the rank with most work in it."""
        by_parameter = [costs.codecs[codec] for codec in self._codecs]
        return [[self._cost(chunk, by_parameter, costs) for chunk in bucket] for bucket in cut]

    def sent_bytes(self, cut: Sequence[Sequence[Chunk]]) -> int:
        """Bytes per step of the rank that sends most."""
        commits = [_native.COMMIT_BYTES] * len(cut)
        return max(exchanged_bytes(cut, commits, self._nodes, self._nodes.of_rank))

    def _cost(
        self,
        chunk: Chunk,
        costs: Sequence[CodecCosts],
        whole: Costs,
    ) -> ChunkCost:
        """costs: by parameter."""
        nodes = self._nodes
        parameters = {tile.parameter for tile in chunk.tiles}
        columns = range(len(nodes.columns))
        encode = [max(costs[index].encode_launch for index in parameters)] * len(columns)
        decode = max(costs[index].decode_launch for index in parameters)
        reduce = [max(costs[index].reduce_launch for index in parameters)] * nodes.world_size
        elements = [0] * len(columns)
        for tile in chunk.tiles:
            cost = costs[tile.parameter]
            column = nodes.of(tile.owner)[1]
            elements[column] += tile.num_elements
            encode[column] += tile.num_elements * cost.encode_per_element
            decode += tile.num_elements * cost.decode_per_element
            decode += tile.owner_bytes * cost.check_per_byte
            arriving = len(nodes.members) * tile.worker_bytes
            reduce[tile.owner] += tile.num_elements * cost.reduce_per_element
            reduce[tile.owner] += arriving * cost.check_per_byte
        return ChunkCost(
            encode_s=max(encode),
            scatter_bytes=max(map(chunk.most_scattered, columns)),
            reduce_s=max(reduce),
            gather_bytes=(len(nodes.members) - 1) * max(map(chunk.gather_message, columns)),
            decode_s=decode,
            keeps_sent=any(self._codecs[index].residuals[0] for index in parameters),
            local=_local_cost(chunk, elements, whole),
        )


def _local_cost(chunk: Chunk, elements: Sequence[int], costs: Costs) -> LocalChunkCost | None:
    """elements: of every column."""
    node, local = costs.node, costs.link.local
    if node is None or local is None:
        return None
    largest = max(chunk.nodes.ranks_per_node)
    messages = chunk.local_messages()
    # A rank keeps what is of its own column; one beyond the columns gives all.
    beyond = largest > len(messages)
    scattered = sum(messages) - (0 if beyond else min(messages))
    forwarded = (largest - 1) * chunk.forward_message()
    if local.shares_memory:
        scattered = forwarded = (largest - 1) * _native.HEADER_BYTES
    packed = sum(elements) - (0 if beyond else min(elements))
    return LocalChunkCost(
        pack_s=node.pack_launch + packed * node.pack_per_element,
        scatter_bytes=scattered,
        sum_s=node.sum_launch + max(elements) * node.sum_per_element,
        forward_bytes=forwarded,
    )
