"""Sections 1 and 2 of docs/reference/wire_format.md: tiles, codecs, owners, chunks, bytes."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .codecs import OWNER, WORKER, find_codec
from .scalars import DTYPES

TILE_ELEMENTS = 4096
CHUNK_BYTES = 131072
CAP_BYTES = 96 << 20
STREAM_CAP_BYTES = 512 << 20
MOST_DENSE_BYTES = 2 << 20
FEWEST_DENSE_BYTES = 32 << 10
PIECE_ELEMENTS = 16  # what tiles are rounded up to on their way to their leaders
HEADER_BYTES = 64
PADDING_PART = 32  # padding is at most one part in so many
MOST_WITHOUT_TILES = 8  # owners, if they get and send headers
FEWEST_COMPRESSED_ELEMENTS = 1024
COARSE_BITS = 3
SMALL_PERCENT = 3
SMALL_CODEC = "q4"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """num_elements and dtype are those of the gradient: the real view, for complex ones. `whole`:
    elements of the parameter that this is a shard of; None: it is whole.
    """

    name: str
    num_elements: int
    dtype: str = "float32"
    ndim: int = 2
    is_complex: bool = False
    whole: int | None = None

    def count(self) -> int:
        """Elements of the whole parameter, of which a complex one has one for two numbers."""
        return self.whole or self.num_elements // (1 + self.is_complex)


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


def is_coarse(codec: str) -> bool:
    bits = 8 * find_codec(codec).payload_bytes(TILE_ELEMENTS, "float32", WORKER)
    return bits < COARSE_BITS * TILE_ELEMENTS


def small_names(parameters: Sequence[Parameter], rules: Rules = ()) -> set[str]:
    """Parameters that never have a coarse codec, but where a rule gives it."""
    counts = {p.name: p.count() for p in parameters}
    open_to_codecs = [p.name for p in parameters if resolve_codec(p, "", rules) == ""]
    small = set(open_to_codecs)
    while 100 * sum(counts[n] for n in small) > SMALL_PERCENT * sum(counts.values()):
        largest = max(counts[n] for n in small)
        small = {n for n in small if counts[n] < largest}
    return small


def resolve_codecs(
    parameters: Sequence[Parameter], codec: str, rules: Rules = (), warmup: str = "exact"
) -> tuple[list[str], list[str]]:
    """Codecs of the parameters that are averaged together, and those of warm-up steps."""
    small = small_names(parameters, rules)
    codecs, warmup_codecs = [], []
    for parameter in parameters:
        own = resolve_codec(parameter, codec, rules)
        first = warmup if find_codec(own).lossy else "exact"  # what is exact stays so
        if parameter.name in small:
            own, first = (SMALL_CODEC if is_coarse(each) else each for each in (own, first))
        codecs.append(own)
        warmup_codecs.append(first)
    return codecs, warmup_codecs


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
        self.codecs, self.warmup_codecs = resolve_codecs(self.parameters, codec, rules, warmup)
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
        self._own_tiles = self.tiles  # which assign owners, in warm-up steps, too
        self._place(nodes or [[rank] for rank in range(world_size)])

    def _place(self, nodes: Sequence[Sequence[int]]) -> None:
        self.nodes = nodes
        self.rail_of = {rank: rail for ranks in nodes for rail, rank in enumerate(ranks)}
        leaders = sorted(rank for rail in self.rails() for rank in rail)
        self.owners = [leaders[i] for i in assign_owners(self._own_tiles, len(leaders))]

    def rails(self) -> list[list[int]]:
        """The ranks of every rail."""
        return [list(rail) for rail in zip(*self.nodes, strict=False)]

    def on(self, nodes: Sequence[Sequence[int]]) -> Layout:
        """The same tiles, whose owners are ranks on these nodes."""
        layout = copy.copy(self)
        layout._place(nodes)
        return layout

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


def dense_bytes(nodes: Sequence[Sequence[int]], chunk_bytes: int, on_streams: bool) -> int:
    """Most bytes of gradient of a rail in a chunk."""
    siblings = max(map(len, nodes))
    messages = (2 + siblings) * len(nodes) * (HEADER_BYTES + chunk_bytes)
    memory = bytes_per_chunk(on_streams) * (2 if on_streams else 1)
    left = max(FEWEST_DENSE_BYTES, (memory - messages) // (2 * siblings + 1) - 2 * HEADER_BYTES)
    return left if on_streams else min(MOST_DENSE_BYTES, left)


def bytes_per_chunk(on_streams: bool) -> int:
    return (STREAM_CAP_BYTES if on_streams else CAP_BYTES) // 8 * 7 // 4


def message_sizes(payloads: Sequence[int], *, equal: bool) -> list[int]:
    """Of a chunk's messages in one stage, by peer. equal: where that costs little."""
    are_sent = payloads.count(0) <= MOST_WITHOUT_TILES
    sizes = [HEADER_BYTES + n if n or are_sent else 0 for n in payloads]
    return padded(sizes) if equal else sizes


def padded(sizes: Sequence[int]) -> list[int]:
    padding = len(sizes) * max(sizes) - sum(sizes)
    return [max(sizes)] * len(sizes) if PADDING_PART * padding <= sum(sizes) else list(sizes)


def cut_chunks(
    layout: Layout, bucket: Sequence[int], chunk_bytes: int, on_streams: bool = False
) -> list[list[int]]:
    """Numbers of the tiles of every chunk of a bucket, given as indices of parameters."""
    chunks: list[list[int]] = []
    is_flat = len(layout.nodes) == layout.world_size
    most_dense = dense_bytes(layout.nodes, chunk_bytes, on_streams)
    most_of_rail = bytes_per_chunk(on_streams) // 3 // len(layout.rails())
    sizes = _sizes(layout, [])
    for index in (t for parameter in bucket for t in layout.tiles_of[parameter]):
        rank, more = layout.owners[index], _sizes(layout, [index])
        worker, owner, dense = (a + b for a, b in zip(sizes, more, strict=True))
        rail = layout.rail_of[rank]
        full = sizes[0][rank] > 0 and max(worker[rank], owner[rank]) > chunk_bytes
        full = full or (not is_flat and dense[rail] > most_dense)
        for stage in (worker, owner):
            of_rail = [n for peer, n in stage.items() if layout.rail_of[peer] == rail]
            full = full or sum(of_rail) + HEADER_BYTES * len(of_rail) > most_of_rail
        if not chunks or full:
            chunks.append([])
            worker, owner, dense = more
        sizes = worker, owner, dense
        chunks[-1].append(index)
    return chunks


Sizes = tuple[Counter[int], Counter[int], Counter[int]]  # worker, owner by rank; dense by rail


def _sizes(layout: Layout, tiles: Sequence[int]) -> Sizes:
    """Bytes of a chunk of these tiles."""
    worker: Counter[int] = Counter()
    owner: Counter[int] = Counter()
    dense: Counter[int] = Counter()
    for index in tiles:
        tile, rank = layout.tiles[index], layout.owners[index]
        item = DTYPES[layout.parameters[tile.parameter].dtype].item_bytes
        worker[rank] += tile.worker_bytes
        owner[rank] += tile.owner_bytes
        pieces = -(-tile.num_elements // PIECE_ELEMENTS)
        dense[layout.rail_of[rank]] += pieces * PIECE_ELEMENTS * item
    return worker, owner, dense


def sent_per_step(
    layout: Layout,
    buckets: Sequence[Sequence[int]],
    rank: int,
    chunk_bytes: int = CHUNK_BYTES,
    find_unused_parameters: bool = False,
    on_streams: bool = False,
    commits: int | None = None,
) -> list[int]:
    """What `rank` sends to every rank in a step whose buckets hold these parameters.

    commits: None: one of every bucket that has chunks.
    """
    sent = [0] * layout.world_size
    siblings = next([r for r in ranks if r != rank] for ranks in layout.nodes if rank in ranks)
    rail = next((ranks for ranks in layout.rails() if rank in ranks), [])
    for bucket in buckets:
        chunks = cut_chunks(layout, bucket, chunk_bytes, on_streams)
        for worker, owner, dense in (_sizes(layout, chunk) for chunk in chunks):
            if rail:
                own = rail.index(rank)
                to_owners = message_sizes([worker[peer] for peer in rail], equal=on_streams)
                gathered = message_sizes([owner[peer] for peer in rail], equal=True)
                for peer, num_bytes in zip(rail, to_owners, strict=True):
                    sent[peer] += num_bytes + gathered[own]
            forwarded = [
                HEADER_BYTES + sum(message_sizes([owner[peer] for peer in peers], equal=True))
                for peers in layout.rails()
            ]
            forwarded += [HEADER_BYTES] * (max(map(len, layout.nodes)) - len(forwarded))
            forwarded = padded(forwarded)
            for sibling in siblings:
                sent[sibling] += HEADER_BYTES + dense[layout.rail_of[sibling]]
                sent[sibling] += forwarded[layout.rail_of[rank]]
        if chunks and commits is None:
            maps = -(-len(bucket) // 8) * 8 if find_unused_parameters else 0
            sent = [num_bytes + HEADER_BYTES + maps for num_bytes in sent]
    if commits is not None:
        sent = [num_bytes + commits * HEADER_BYTES for num_bytes in sent]
    sent[rank] = 0
    return sent


def wire_bytes_per_step(
    layout: Layout,
    buckets: Sequence[Sequence[int]],
    rank: int,
    *options: Any,
    hosts: Sequence[int] | None = None,
    **named: Any,
) -> int:
    """What `rank` sends to other hosts; the options are those of `sent_per_step`.

    hosts: the host of every rank. None: a node is one.
    """
    nodes = enumerate(layout.nodes)
    host_of = hosts or {each: node for node, ranks in nodes for each in ranks}
    sent = sent_per_step(layout, buckets, rank, *options, **named)
    return sum(n for peer, n in enumerate(sent) if host_of[peer] != host_of[rank])


def two_level_bytes_per_step(
    layout: Layout,
    nodes: Sequence[Sequence[int]],
    buckets: Sequence[Sequence[int]],
    rank: int,
    find_unused_parameters: bool = False,
    **named: Any,
) -> tuple[int, int]:
    """What `rank` sends to other nodes, and to the other ranks of its own; ranks by node rise."""
    named = {"find_unused_parameters": find_unused_parameters, **named}
    total = sum(sent_per_step(layout.on(nodes), buckets, rank, **named))
    elsewhere = wire_bytes_per_step(layout.on(nodes), buckets, rank, **named)
    return elsewhere, total - elsewhere
