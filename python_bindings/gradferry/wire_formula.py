"""Bytes that a rank sends in one step, from docs/wire_format.md alone.

Written apart from the C++ that sends them, so that one can check the other: owner assignment,
chunking and padding are worked out here again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

TILE_ELEMENTS = 4096
HEADER_BYTES = 64
COMMIT_BYTES = 64
DEFAULT_CHUNK_BYTES = 524288

# payload_bytes(parameter, num_elements) -> (worker, owner): bytes of the payloads of a tile of
# `num_elements` elements (1..4096) of the parameter with that index.
PayloadBytes = Callable[[int, int], tuple[int, int]]


class _Tile(NamedTuple):
    owner: int  # rank that reduces it
    worker_bytes: int  # payload of every rank on its way to the owner
    owner_bytes: int  # payload on its way back to every rank


def wire_bytes_per_step(
    num_elements: Sequence[int],
    payload_bytes: PayloadBytes,
    buckets: Sequence[Sequence[int]],
    world_size: int,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> list[int]:
    """Returns the bytes each rank sends to others in one step, headers and padding included.

    num_elements: elements of every parameter, in the order of `named_parameters()`.
    buckets: per bucket of the step, the indices of its parameters in bucket order.
    chunk_bytes: the most payload bytes that one owner gets, or sends, in one chunk.
    """
    sent = [0] * world_size
    if world_size == 1:
        return sent
    tiles = _assign_owners(num_elements, payload_bytes, world_size)
    for bucket in buckets:
        bucket_tiles = [tile for parameter in bucket for tile in tiles[parameter]]
        if not bucket_tiles:
            continue
        for chunk in _chunks(bucket_tiles, world_size, chunk_bytes):
            _add_chunk(sent, chunk)
        for rank in range(world_size):
            sent[rank] += (world_size - 1) * COMMIT_BYTES
    return sent


def all_reduce_bytes(num_elements: int, item_bytes: int, world_size: int) -> int:
    """Bytes each rank sends in a bandwidth-optimal all-reduce: 2 (W-1)/W of the data, rounded."""
    return round(2 * (world_size - 1) * num_elements * item_bytes / world_size)


def _assign_owners(
    num_elements: Sequence[int], payload_bytes: PayloadBytes, world_size: int
) -> list[list[_Tile]]:
    """Tiles of every parameter; each tile goes to the rank with the fewest bytes so far."""
    load = [0] * world_size
    tiles: list[list[_Tile]] = []
    for parameter, elements in enumerate(num_elements):
        mine = []
        for start in range(0, elements, TILE_ELEMENTS):
            sizes = payload_bytes(parameter, min(TILE_ELEMENTS, elements - start))
            owner = load.index(min(load))
            load[owner] += sum(sizes)
            mine.append(_Tile(owner, *sizes))
        tiles.append(mine)
    return tiles


class _Chunk:
    """Consecutive tiles: payload bytes per owner, in both directions."""

    def __init__(self, world_size: int) -> None:
        self.worker_bytes = [0] * world_size
        self.owner_bytes = [0] * world_size
        self.num_tiles = 0

    def has_room(self, tile: _Tile, chunk_bytes: int) -> bool:
        worker = self.worker_bytes[tile.owner] + tile.worker_bytes
        owner = self.owner_bytes[tile.owner] + tile.owner_bytes
        return self.num_tiles == 0 or max(worker, owner) <= chunk_bytes

    def add(self, tile: _Tile) -> None:
        self.worker_bytes[tile.owner] += tile.worker_bytes
        self.owner_bytes[tile.owner] += tile.owner_bytes
        self.num_tiles += 1


def _chunks(tiles: Sequence[_Tile], world_size: int, chunk_bytes: int) -> Iterator[_Chunk]:
    chunk = _Chunk(world_size)
    for tile in tiles:
        if not chunk.has_room(tile, chunk_bytes):
            yield chunk
            chunk = _Chunk(world_size)
        chunk.add(tile)
    if chunk.num_tiles:
        yield chunk


def _add_chunk(sent: list[int], chunk: _Chunk) -> None:
    peers = len(sent) - 1
    gather_bytes = HEADER_BYTES + max(chunk.owner_bytes)
    for rank in range(len(sent)):
        to_owners = sum(chunk.worker_bytes) - chunk.worker_bytes[rank]
        sent[rank] += peers * HEADER_BYTES + to_owners + peers * gather_bytes
