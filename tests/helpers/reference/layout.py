"""Sections 1 and 2 of docs/reference/wire_format.md: tiles, codecs, owners, chunks, bytes."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from collections.abc import Sequence

from .codecs import OWNER, WORKER, find_codec

TILE_ELEMENTS = 4096
CHUNK_BYTES = 524288
MOST_DENSE_BYTES = 2097152
HEADER_BYTES = 64
FEWEST_COMPRESSED_ELEMENTS = 1024


@dataclasses.dataclass(frozen=True)
class Parameter:
    """num_elements and dtype are those of the gradient: the real view, for complex ones."""

    name: str
    num_elements: int
    dtype: str = "float32"
    ndim: int = 2
    is_complex: bool = False


@dataclasses.dataclass(frozen=True)
class Tile:
    parameter: int
    offset: int  # elements from the start of the parameter
    num_elements: int
    codec: str
    worker_bytes: int
    owner_bytes: int


Rules = Sequence[tuple[str, str]]  # (pattern of the name, codec), the first match counts


def resolve_codec(parameter: Parameter, codec: str, rules: Rules = ()) -> str:
    if parameter.dtype == "float64" or parameter.is_complex:
        return "exact"
    for pattern, ruled in rules:
        if fnmatch.fnmatchcase(parameter.name, pattern):
            return ruled
    # Complex ones are gone, so num_elements is the parameter's own count here.
    if parameter.ndim <= 1 or parameter.num_elements < FEWEST_COMPRESSED_ELEMENTS:
        return "exact"
    return codec


class Layout:
    """The tiles of a model, numbered, with their codecs and owners."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        codec: str,
        world_size: int,
        rules: Rules = (),
        warmup: str = "exact",
        nodes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`nodes`: ranks by node; None: every rank is alone."""
        self.parameters = list(parameters)
        self.world_size = world_size
        self.nodes = nodes or [[rank] for rank in range(world_size)]
        self.codecs = [resolve_codec(p, codec, rules) for p in self.parameters]
        self.tiles: list[Tile] = []
        self.tiles_of: list[range] = []  # per parameter
        for index, parameter in enumerate(self.parameters):
            first = len(self.tiles)
            for offset in range(0, parameter.num_elements, TILE_ELEMENTS):
                n = min(TILE_ELEMENTS, parameter.num_elements - offset)
                sizes = (
                    find_codec(self.codecs[index]).payload_bytes(n, parameter.dtype, stage)
                    for stage in (WORKER, OWNER)
                )
                self.tiles.append(Tile(index, offset, n, self.codecs[index], *sizes))
            self.tiles_of.append(range(first, len(self.tiles)))
        smallest = min(map(len, self.nodes))
        owners = sorted(rank for ranks in self.nodes for rank in ranks[:smallest])
        self.owners = [owners[index] for index in assign_owners(self.tiles, len(owners))]
        # What is exact stays so in warm-up steps.
        self.warmup_codecs = [warmup if find_codec(own).lossy else "exact" for own in self.codecs]

    def in_warmup(self) -> Layout:
        """As tiles travel in warm-up steps: of other sizes, to the same owners."""
        layout = copy.copy(self)
        layout.tiles = []
        for tile in self.tiles:
            codec = self.warmup_codecs[tile.parameter]
            dtype = self.parameters[tile.parameter].dtype
            worker, owner = (
                find_codec(codec).payload_bytes(tile.num_elements, dtype, stage)
                for stage in (WORKER, OWNER)
            )
            layout.tiles.append(
                dataclasses.replace(tile, codec=codec, worker_bytes=worker, owner_bytes=owner)
            )
        return layout


def assign_owners(tiles: Sequence[Tile], world_size: int) -> list[int]:
    load = [0] * world_size
    owners = []
    for tile in tiles:
        owner = load.index(min(load))
        load[owner] += tile.worker_bytes + tile.owner_bytes
        owners.append(owner)
    return owners


def cut_chunks(layout: Layout, bucket: Sequence[int], chunk_bytes: int) -> list[list[int]]:
    """Numbers of the tiles of every chunk of a bucket, given as indices of parameters."""
    chunks: list[list[int]] = []
    is_flat = len(layout.nodes) == layout.world_size
    column_of = {rank: column for ranks in layout.nodes for column, rank in enumerate(ranks)}
    dense: dict[int, int] = {}  # bytes of gradient to the leader of a column
    worker = [0] * layout.world_size
    owner = [0] * layout.world_size
    for index in (t for parameter in bucket for t in layout.tiles_of[parameter]):
        tile, rank = layout.tiles[index], layout.owners[index]
        full = (
            worker[rank] + tile.worker_bytes > chunk_bytes
            or owner[rank] + tile.owner_bytes > chunk_bytes
        )
        column = column_of[rank]
        item = 2 if "16" in layout.parameters[tile.parameter].dtype else 4
        if layout.parameters[tile.parameter].dtype == "float64":
            item = 8
        gradient = -(-tile.num_elements // 16) * 16 * item
        full = full or (not is_flat and dense.get(column, 0) + gradient > MOST_DENSE_BYTES)
        if not chunks or full:
            chunks.append([])
            dense = {}
            worker = [0] * layout.world_size
            owner = [0] * layout.world_size
        chunks[-1].append(index)
        worker[rank] += tile.worker_bytes
        owner[rank] += tile.owner_bytes
        dense[column] = dense.get(column, 0) + gradient
    return chunks


def wire_bytes_per_step(
    layout: Layout,
    buckets: Sequence[Sequence[int]],
    rank: int,
    chunk_bytes: int = CHUNK_BYTES,
    find_unused_parameters: bool = False,
    equal_scatter: bool = False,
    hosts: Sequence[int] | None = None,
) -> int:
    """What `rank` sends to others in a step whose buckets hold these parameters; to siblings only
    commits.

    hosts: the host of every rank: only what goes to another host counts. None: to another node.
    """
    world_size = layout.world_size
    if world_size == 1:
        return 0
    nodes = enumerate(layout.nodes)
    own = {rank: node for node, ranks in nodes for rank in ranks}
    place = hosts or [own[rank] for rank in range(world_size)]
    others = [peer for peer in range(world_size) if place[peer] != place[rank]]
    smallest = min(map(len, layout.nodes))
    columns = [[ranks[column] for ranks in layout.nodes] for column in range(smallest)]
    column = next((peers for peers in columns if rank in peers), [])
    peers = [peer for peer in column if peer in others]
    total = 0
    for bucket in buckets:
        chunks = cut_chunks(layout, bucket, chunk_bytes)
        for chunk in chunks if peers else []:
            worker = dict.fromkeys(column, 0)
            owner = dict.fromkeys(column, 0)
            for index in chunk:
                if layout.owners[index] in worker:
                    worker[layout.owners[index]] += layout.tiles[index].worker_bytes
                    owner[layout.owners[index]] += layout.tiles[index].owner_bytes
            most = max(worker.values())
            padding = sum(most - n for n in worker.values())
            usual = sum(worker.values()) + len(column) * HEADER_BYTES
            if equal_scatter and most <= chunk_bytes and 32 * padding <= usual:
                total += len(peers) * (HEADER_BYTES + most)
            else:
                total += sum(HEADER_BYTES + worker[peer] for peer in peers)
            total += len(peers) * (HEADER_BYTES + max(owner.values()))
        if chunks:
            maps = -(-len(bucket) // 8) * 8 if find_unused_parameters else 0
            total += len(others) * (HEADER_BYTES + maps)
    return total
