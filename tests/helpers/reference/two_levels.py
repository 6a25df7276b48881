"""The bytes of the exchange between nodes of several ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .layout import CHUNK_BYTES, HEADER_BYTES, Layout, assign_owners
from .scalars import DTYPES

CAP_BYTES = 96 << 20
MOST_DENSE_BYTES = 2 << 20
FEWEST_DENSE_BYTES = 32 << 10
PIECE_ELEMENTS = 16  # what tiles are rounded up to on their way to their leaders


def two_level_bytes_per_step(
    layout: Layout,
    nodes: Sequence[Sequence[int]],
    buckets: Sequence[Sequence[int]],
    rank: int,
    find_unused_parameters: bool = False,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    equal_scatter: bool = False,
    commits: int | None = None,
) -> tuple[int, int]:
    """What `rank` sends in a step to other nodes, and to the other ranks of its own.

    nodes: ranks by node, rising; buckets: indices of parameters; commits: None: one of every bucket
    that has chunks.
    """
    columns = min(map(len, nodes))
    candidates = sorted(r for members in nodes for r in members[:columns])
    owners = [candidates[i] for i in assign_owners(layout.tiles, len(candidates))]
    column_of = {r: members.index(r) for members in nodes for r in members}
    siblings = next([r for r in members if r != rank] for members in nodes if rank in members)
    elsewhere = [members for members in nodes if rank not in members]
    column = column_of[rank]
    peers = [members[column] for members in elsewhere] if column < columns else []
    limits = (chunk_bytes, chunk_bytes, dense_bytes(nodes, chunk_bytes))

    wire = local = 0
    for bucket in buckets:
        tiles = [t for parameter in bucket for t in layout.tiles_of[parameter]]
        chunks = _cut(layout, tiles, owners, [column_of[r] for r in owners], limits)
        for worker, owned, dense in chunks:
            own_column = [r for r in candidates if column_of[r] == column]
            longest = max(owned[r] for r in own_column) if peers else 0
            most = max(worker[r] for r in own_column) if peers else 0
            messages = sum(HEADER_BYTES + worker[r] for r in own_column)
            padding = len(own_column) * (HEADER_BYTES + most) - messages
            if equal_scatter and most <= chunk_bytes and 32 * padding <= messages:
                wire += len(peers) * (HEADER_BYTES + most)
            else:
                wire += sum(HEADER_BYTES + worker[peer] for peer in peers)
            wire += len(peers) * (HEADER_BYTES + longest)
            local += sum(HEADER_BYTES + dense[column_of[r]] for r in siblings)
            forwarded = HEADER_BYTES + len(nodes) * (HEADER_BYTES + max(owned.values()))
            local += len(siblings) * forwarded
        if chunks and commits is None:
            maps = -(-len(bucket) // 8) * 8 if find_unused_parameters else 0
            wire += sum(map(len, elsewhere)) * (HEADER_BYTES + maps)
            local += len(siblings) * (HEADER_BYTES + maps)
    if commits is not None:
        wire += commits * sum(map(len, elsewhere)) * HEADER_BYTES
        local += commits * len(siblings) * HEADER_BYTES
    return wire, local


def dense_bytes(nodes: Sequence[Sequence[int]], chunk_bytes: int = CHUNK_BYTES) -> int:
    """Most bytes of gradient of a column in a chunk."""
    siblings = max(map(len, nodes))
    messages = (2 + siblings) * len(nodes) * (HEADER_BYTES + chunk_bytes)
    left = (CAP_BYTES // 8 * 7 // 4 - messages) // (2 * siblings + 1) - 2 * HEADER_BYTES
    return min(MOST_DENSE_BYTES, max(FEWEST_DENSE_BYTES, left))


Sizes = tuple[Counter[int], Counter[int], Counter[int]]  # worker, owner by rank; dense by column


def _cut(
    layout: Layout,
    tiles: Sequence[int],
    owners: Sequence[int],
    column_of: Sequence[int],
    limits: tuple[int, int, int],
) -> list[Sizes]:
    """Bytes of every chunk of a bucket of these tiles; limits: as in Sizes."""
    chunks: list[Sizes] = []
    for index in tiles:
        tile, rank, column = layout.tiles[index], owners[index], column_of[index]
        item = DTYPES[layout.parameters[tile.parameter].dtype].item_bytes
        dense = -(-tile.num_elements // PIECE_ELEMENTS) * PIECE_ELEMENTS * item
        more = ((rank, tile.worker_bytes), (rank, tile.owner_bytes), (column, dense))
        if not chunks or any(
            sizes[key] + size > limit
            for sizes, (key, size), limit in zip(chunks[-1], more, limits, strict=True)
        ):
            chunks.append((Counter(), Counter(), Counter()))
        for sizes, (key, size) in zip(chunks[-1], more, strict=True):
            sizes[key] += size
    return chunks
