"""Bytes that a rank sends in one step, without sending them: owners, chunks and padding.

It follows docs/wire_format.md with the constants of the engine. The tests compare it with the bytes
that engines count, and with an independent formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from heapq import heapreplace
from typing import NamedTuple

import torch

from gradferry import _native
from gradferry.core.config import CHUNK_BYTES

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
    worker_bytes: int  # payload from every rank to the owner
    owner_bytes: int  # payload from the owner to every rank


class Chunk:
    """Consecutive tiles that are sent in one all-to-all and one all-gather."""

    def __init__(self, world_size: int, chunk_bytes: int, *, equal_scatter: bool) -> None:
        self.tiles: list[Tile] = []
        self._chunk_bytes = chunk_bytes
        self._equal_scatter = equal_scatter
        self._worker_bytes = [0] * world_size  # payloads, by owner
        self._owner_bytes = [0] * world_size

    def has_room(self, tile: Tile) -> bool:
        """Whether a tile still fits; the first tile always does."""
        worker = self._worker_bytes[tile.owner] + tile.worker_bytes
        owner = self._owner_bytes[tile.owner] + tile.owner_bytes
        return not self.tiles or max(worker, owner) <= self._chunk_bytes

    def add(self, tile: Tile) -> None:
        """Appends a tile."""
        self._worker_bytes[tile.owner] += tile.worker_bytes
        self._owner_bytes[tile.owner] += tile.owner_bytes
        self.tiles.append(tile)

    def scatter_messages(self) -> list[int]:
        """Bytes of the message to every owner, header included; an owner sends itself none."""
        messages = [_native.HEADER_BYTES + num_bytes for num_bytes in self._worker_bytes]
        padding = len(messages) * max(messages) - sum(messages)
        if (
            self._equal_scatter
            and max(self._worker_bytes) <= self._chunk_bytes
            and padding * _native.SCATTER_PADDING_PART <= sum(messages)
        ):
            messages = [max(messages)] * len(messages)
        return messages

    def scatter_bytes(self, rank: int) -> int:
        """Bytes that `rank` sends to the owners, headers included."""
        messages = self.scatter_messages()
        return sum(messages) - messages[rank]

    def gather_message(self) -> int:
        """Bytes of every owner's message to every other rank: all are padded to the largest."""
        return _native.HEADER_BYTES + max(self._owner_bytes)

    def gather_bytes(self) -> int:
        """Bytes that every rank sends to all others."""
        return (len(self._owner_bytes) - 1) * self.gather_message()


# exchange(buckets, commit_bytes, hosts) -> bytes that each rank sends to other hosts in one step.
# buckets: the chunks of every bucket; commit_bytes: of the message, to each other rank, that ends
# each bucket; hosts: of every rank.
Exchange = Callable[[Sequence[Sequence[Chunk]], Sequence[int], Sequence[int]], list[int]]


def flat_exchange(
    buckets: Sequence[Sequence[Chunk]], commit_bytes: Sequence[int], hosts: Sequence[int]
) -> list[int]:
    """Every rank sends to every other: of its W - 1 messages, W - G go to other hosts where G ranks
    share one. An `Exchange`.
    """
    ranks_on = Counter(hosts)
    sent = [0] * len(hosts)
    for chunks, commit in zip(buckets, commit_bytes, strict=True):
        if not chunks:
            continue
        to_owners: Counter[int] = Counter()  # by the owners' host
        for chunk in chunks:
            for host, num_bytes in zip(hosts, chunk.scatter_messages(), strict=True):
                to_owners[host] += num_bytes
        to_each = sum(chunk.gather_message() for chunk in chunks) + commit
        for rank, host in enumerate(hosts):
            sent[rank] += to_owners.total() - to_owners[host]
            sent[rank] += (len(hosts) - ranks_on[host]) * to_each
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
    exchange: Exchange = flat_exchange,
) -> list[int]:
    """Returns the bytes each rank sends to others in one step, headers and padding included.

    num_elements: elements of every parameter, in the order of `named_parameters()`.
    buckets: per bucket of the step, the indices of its parameters in bucket order.
    chunk_bytes: the most payload bytes that one owner receives, or sends, in one chunk.
    equal_scatter: messages to owners are padded to one size where that costs little.
    sent_as: payloads of the step where they are not `payload_bytes`, as in warm-up steps.
    find_unused_parameters: that of DDP, for gradients on the CPU.
    hosts: the host of every rank: only what goes to another host counts. None: all counts.
    exchange: who sends what to whom.
    """
    if world_size == 1:
        return [0]
    tiles = assign_owners(num_elements, payload_bytes, world_size, sent_as)
    cut = [
        cut_chunks(tiles, bucket, world_size, chunk_bytes, equal_scatter=equal_scatter)
        for bucket in buckets
    ]
    commits = [
        _native.COMMIT_BYTES + find_unused_parameters * used_map_bytes(len(bucket))
        for bucket in buckets
    ]
    return exchange(cut, commits, hosts or range(world_size))


def used_map_bytes(num_parameters: int) -> int:
    """Bytes of a commit's map of the parameters that a rank used."""
    return -(-num_parameters // 8) * 8


def sent_bytes(buckets: Sequence[Sequence[Chunk]], world_size: int) -> list[int]:
    """As `wire_bytes_per_step`, for the chunks of every bucket."""
    return flat_exchange(buckets, [_native.COMMIT_BYTES] * len(buckets), range(world_size))


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
    world_size: int,
    sent_as: PayloadBytes | None = None,
) -> list[list[Tile]]:
    """Tiles of every parameter; each tile goes to the rank with the fewest bytes so far.

    They count as `payload_bytes`, whatever they are sent as.
    """
    load = [(0, rank) for rank in range(world_size)]  # a heap; the lowest rank wins a tie
    tiles: list[list[Tile]] = []
    for parameter, elements in enumerate(num_elements):
        cut = []
        for start in range(0, elements, _native.TILE_ELEMENTS):
            count = min(_native.TILE_ELEMENTS, elements - start)
            sizes = payload_bytes(parameter, count)
            num_bytes, owner = load[0]
            heapreplace(load, (num_bytes + sum(sizes), owner))
            sent = sent_as(parameter, count) if sent_as else sizes
            cut.append(Tile(parameter, count, owner, *sent))
        tiles.append(cut)
    return tiles


def cut_chunks(
    tiles: Sequence[Sequence[Tile]],
    bucket: Sequence[int],
    world_size: int,
    chunk_bytes: int = CHUNK_BYTES,
    *,
    equal_scatter: bool = False,
) -> list[Chunk]:
    """The chunks of a bucket.

    tiles: of every parameter, from `assign_owners`.
    bucket: the indices of its parameters, in bucket order.
    chunk_bytes, equal_scatter: as for `wire_bytes_per_step`.
    """
    chunks: list[Chunk] = []
    for parameter in bucket:
        for tile in tiles[parameter]:
            if not chunks or not chunks[-1].has_room(tile):
                chunks.append(Chunk(world_size, chunk_bytes, equal_scatter=equal_scatter))
            chunks[-1].add(tile)
    return chunks
