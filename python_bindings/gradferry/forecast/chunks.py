"""Bytes that a rank sends in one step, without sending them: owners, chunks and padding.

It follows docs/reference/wire_format.md with the constants of the engine. The tests compare it with
the bytes that engines count, and with an independent formula.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from heapq import heapreplace
from itertools import chain
from typing import NamedTuple

import torch

from gradferry import _native
from gradferry.core.config import CHUNK_BYTES
from gradferry.core.nodes import Nodes, flat

# payload_bytes(parameter, num_elements) -> (worker, owner): bytes of the payloads of a tile of
# `num_elements` elements (1..TILE_ELEMENTS) of the parameter with that index.
PayloadBytes = Callable[[int, int], tuple[int, int]]


def payload_sizes(parameters: Sequence[tuple[str, torch.dtype]]) -> PayloadBytes:
    """Payload sizes from the codec tables; `parameters`: codec and dtype of each."""

    @cache
    def sizes(codec: str, dtype: torch.dtype, num_elements: int) -> tuple[int, int]:
        worker = _native.payload_bytes(codec, num_elements, dtype, "worker")
        return worker, _native.payload_bytes(codec, num_elements, dtype, "owner")

    def payload_bytes(parameter: int, num_elements: int) -> tuple[int, int]:
        return sizes(*parameters[parameter], num_elements)

    return payload_bytes


class Tile(NamedTuple):
    """Up to TILE_ELEMENTS elements of one parameter."""

    parameter: int
    num_elements: int
    owner: int  # rank that reduces it
    worker_bytes: int  # payload from every peer to the owner
    owner_bytes: int  # payload from the owner to every peer; 0 in a reduce-scatter
    dense_bytes: int  # of the gradient, from every sibling to the delegate


class Chunk:
    """Tiles that are sent in one all-to-all and one all-gather of every column; where nodes have
    several ranks also in one of each between siblings. A reduce-scatter `gathers` nothing.
    """

    def __init__(
        self,
        nodes: Nodes,
        chunk_bytes: int,
        *,
        equal_scatter: bool,
        dense_bytes: int,
        gathers: bool = True,
    ) -> None:
        self.nodes = nodes
        self.gathers = gathers
        self.tiles: list[Tile] = []
        self._chunk_bytes = chunk_bytes
        self._equal_scatter = equal_scatter
        self._worker_bytes = [0] * nodes.world_size  # payloads, by owner
        self._owner_bytes = [0] * nodes.world_size
        self._dense_bytes = [0] * len(nodes.columns)
        self._most_dense_bytes = math.inf if nodes.is_flat else dense_bytes

    def has_room(self, tile: Tile) -> bool:
        """Whether a tile still fits; the first tile always does."""
        worker = self._worker_bytes[tile.owner] + tile.worker_bytes
        owner = self._owner_bytes[tile.owner] + tile.owner_bytes
        dense = self._dense_bytes[self.nodes.of(tile.owner)[1]] + tile.dense_bytes
        fits = max(worker, owner) <= self._chunk_bytes and dense <= self._most_dense_bytes
        return fits or not self.tiles

    def add(self, tile: Tile) -> None:
        """Appends a tile."""
        self._worker_bytes[tile.owner] += tile.worker_bytes
        self._owner_bytes[tile.owner] += tile.owner_bytes
        self._dense_bytes[self.nodes.of(tile.owner)[1]] += tile.dense_bytes
        self.tiles.append(tile)

    def scatter_messages(self, column: int) -> list[int]:
        """Bytes of the message to every owner of a column, header included; an owner sends itself
        none.
        """
        worker_bytes = [self._worker_bytes[peer] for peer in self.nodes.columns[column]]
        messages = [_native.HEADER_BYTES + num_bytes for num_bytes in worker_bytes]
        padding = len(messages) * max(messages) - sum(messages)
        if (
            self._equal_scatter
            and max(worker_bytes) <= self._chunk_bytes
            and padding * _native.SCATTER_PADDING_PART <= sum(messages)
        ):
            messages = [max(messages)] * len(messages)
        return messages

    def most_scattered(self, column: int) -> int:
        """Bytes to the owners of a column by the peer that sends most."""
        messages = self.scatter_messages(column)
        return sum(messages) - min(messages)

    def gather_message(self, column: int) -> int:
        """Bytes of every owner's message to each of its peers: all are padded to the largest."""
        if not self.gathers:
            return 0
        owner_bytes = (self._owner_bytes[peer] for peer in self.nodes.columns[column])
        return _native.HEADER_BYTES + max(owner_bytes)

    def local_messages(self) -> list[int]:
        """Bytes of a rank's message to the delegate of every column on its node, header included;
        ranks beyond the columns get headers alone.
        """
        return [_native.HEADER_BYTES + num_bytes for num_bytes in self._dense_bytes]

    def forward_message(self) -> int:
        """Bytes of the message to each sibling: all that was gathered of the longest column."""
        longest = max(map(self.gather_message, range(len(self.nodes.columns))))
        return _native.HEADER_BYTES + len(self.nodes.members) * longest


def exchanged_bytes(
    buckets: Sequence[Sequence[Chunk]],
    commit_bytes: Sequence[int],
    nodes: Nodes,
    hosts: Sequence[int],
) -> list[int]:
    """Bytes that each rank sends to other hosts in one step: to its peers, and in commits to all.

    Args:
        buckets: the chunks of every bucket.
        commit_bytes: of the message, to each other rank, that ends each bucket.
        nodes: of the exchange, as of the chunks.
        hosts: of every rank; the ranks of a node are on one.
    """
    sent = [0] * len(hosts)
    everyone = Counter(hosts)
    for chunks, commit in zip(buckets, commit_bytes, strict=True):
        if not chunks:
            continue
        for rank, host in enumerate(hosts):
            sent[rank] += (len(hosts) - everyone[host]) * commit
        for column, peers in enumerate(nodes.columns):
            on_hosts = [hosts[peer] for peer in peers]
            peers_on = Counter(on_hosts)
            to_owners: Counter[int] = Counter()  # by the owners' host
            for chunk in chunks:
                for host, num_bytes in zip(on_hosts, chunk.scatter_messages(column), strict=True):
                    to_owners[host] += num_bytes
            to_each = sum(chunk.gather_message(column) for chunk in chunks)
            for peer, host in zip(peers, on_hosts, strict=True):
                sent[peer] += to_owners.total() - to_owners[host]
                sent[peer] += (len(on_hosts) - peers_on[host]) * to_each
    return sent


def wire_bytes_per_step(
    num_elements: Sequence[int],
    payload_bytes: PayloadBytes,
    buckets: Sequence[Sequence[int]],
    world_size: int,
    chunk_bytes: int = CHUNK_BYTES,
    *,
    equal_scatter: bool = False,
    sent_as: PayloadBytes | None = None,
    find_unused_parameters: bool = False,
    hosts: Sequence[int] | None = None,
    nodes: Nodes | None = None,
    dense_bytes: int = _native.MOST_DENSE_BYTES,
    item_bytes: Sequence[int] | None = None,
    owners: Sequence[int] | None = None,
) -> list[int]:
    """Returns the bytes each rank sends to others in one step, headers and padding included.

    num_elements: elements of every parameter, in the order of `named_parameters()`.
    buckets: per bucket of the step, the indices of its parameters in bucket order.
    chunk_bytes: the most payload bytes that one owner receives, or sends, in one chunk.
    equal_scatter: messages to owners are padded to one size where that costs little.
    sent_as: payloads of the step where they are not `payload_bytes`, as in warm-up steps.
    find_unused_parameters: that of DDP, for gradients on the CPU.
    hosts: the host of every rank: only what goes to another host counts. None: what goes to
        another node.
    nodes: which ranks add their gradients before they send them; None: every rank is alone.
    dense_bytes: the most bytes of gradient that a rank sends a sibling in one chunk.
    item_bytes: of an element of every parameter's gradient; None: fp32.
    owners: the rank that gets the mean of each parameter, in a reduce-scatter; None: all ranks get
        all means.
    """
    if world_size == 1:
        return [0]
    table = nodes or flat(world_size)
    tiles = assign_owners(num_elements, payload_bytes, table, sent_as, item_bytes, owners)
    cut = [
        cut_chunks(
            tiles,
            bucket,
            table,
            chunk_bytes,
            equal_scatter=equal_scatter,
            dense_bytes=dense_bytes,
            gathers=owners is None,
        )
        for bucket in buckets
    ]
    commits = [
        _native.COMMIT_BYTES + find_unused_parameters * used_map_bytes(len(bucket))
        for bucket in buckets
    ]
    return exchanged_bytes(cut, commits, table, hosts or table.of_rank)


def used_map_bytes(num_parameters: int) -> int:
    """Bytes of a commit's map of the parameters that a rank used."""
    return -(-num_parameters // 8) * 8


def all_reduce_bytes(num_elements: int, item_bytes: int, world_size: int) -> int:
    """Bytes each rank sends in a bandwidth-optimal all-reduce: 2 (W-1)/W of the data, rounded."""
    return round(2 * (world_size - 1) * num_elements * item_bytes / world_size)


def ring_exchange(num_bytes: int, hosts: Sequence[int]) -> list[int]:
    """Bytes that each rank sends to other hosts in ring all-reduces: each rank sends `num_bytes` to
    the one after it, the last to the first. hosts: of every rank.
    """
    after = [*hosts[1:], hosts[0]]
    return [num_bytes * (one != other) for one, other in zip(hosts, after, strict=True)]


def assign_owners(
    num_elements: Sequence[int],
    payload_bytes: PayloadBytes,
    nodes: Nodes,
    sent_as: PayloadBytes | None = None,
    item_bytes: Sequence[int] | None = None,
    owners: Sequence[int] | None = None,
) -> list[list[Tile]]:
    """Tiles of every parameter; each tile goes to the rank with the fewest bytes so far, of those
    that have a column.

    They count as `payload_bytes`, whatever they are sent as. item_bytes, owners: as
    `wire_bytes_per_step`.
    """
    alignment = _native.PIECE_ALIGNMENT
    candidates = sorted(rank for peers in nodes.columns for rank in peers)
    load = [(0, rank) for rank in candidates]  # a heap; the lowest rank wins a tie
    tiles: list[list[Tile]] = []
    for parameter, elements in enumerate(num_elements):
        item = 4 if item_bytes is None else item_bytes[parameter]
        cut = []
        for start in range(0, elements, _native.TILE_ELEMENTS):
            count = min(_native.TILE_ELEMENTS, elements - start)
            sizes = payload_bytes(parameter, count)
            sent = sent_as(parameter, count) if sent_as else sizes
            dense = -(-count // alignment) * alignment * item
            if owners is not None:
                cut.append(Tile(parameter, count, owners[parameter], sent[0], 0, dense))
                continue
            num_bytes, owner = load[0]
            heapreplace(load, (num_bytes + sum(sizes), owner))
            cut.append(Tile(parameter, count, owner, *sent, dense))
        tiles.append(cut)
    return tiles


def cut_chunks(
    tiles: Sequence[Sequence[Tile]],
    bucket: Sequence[int],
    nodes: Nodes,
    chunk_bytes: int = CHUNK_BYTES,
    *,
    equal_scatter: bool = False,
    dense_bytes: int = _native.MOST_DENSE_BYTES,
    gathers: bool = True,
) -> list[Chunk]:
    """The chunks of a bucket.

    tiles: of every parameter, from `assign_owners` with the same nodes.
    bucket: the indices of its parameters, in bucket order.
    chunk_bytes, equal_scatter, dense_bytes: as for `wire_bytes_per_step`.
    gathers: False: the owners of the tiles were given, in a reduce-scatter.
    """
    in_order = [tile for parameter in bucket for tile in tiles[parameter]]
    chunks: list[Chunk] = []
    for tile in in_order if gathers else _in_turns(in_order):
        if not chunks or not chunks[-1].has_room(tile):
            chunks.append(
                Chunk(
                    nodes,
                    chunk_bytes,
                    equal_scatter=equal_scatter,
                    dense_bytes=dense_bytes,
                    gathers=gathers,
                )
            )
        chunks[-1].add(tile)
    return chunks


def _in_turns(tiles: Iterable[Tile]) -> list[Tile]:
    """The first tile of every owner, then the second of each, and so on."""
    counts: Counter[int] = Counter()
    turns: list[list[Tile]] = []
    for tile in tiles:
        if counts[tile.owner] == len(turns):
            turns.append([])
        turns[counts[tile.owner]].append(tile)
        counts[tile.owner] += 1
    return list(chain.from_iterable(turns))
