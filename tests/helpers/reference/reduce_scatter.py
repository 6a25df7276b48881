"""A reduce-scatter of docs/reference/wire_format.md: all ranks of a world, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .codecs import WORKER, Context, find_codec
from .engine import accumulate_tiles, cut_into_tiles, encode_tiles
from .layout import CHUNK_BYTES, HEADER_BYTES, TILE_ELEMENTS, message_sizes
from .scalars import widen


class ReferenceReduceScatter:
    """What its owner has of every parameter after a step, and what all ranks withhold.

    Attributes:
        worker_residual: by parameter and rank, flat; empty lists without.
    """

    def __init__(
        self,
        world_size: int,
        sizes: Sequence[int],
        codecs: Sequence[str],
        dtype: str,
        *,
        keeps: Sequence[bool],
        seed: int = 0,
    ) -> None:
        """sizes, codecs, keeps: elements, codec and whether it has a residual, by parameter."""
        self._ranks = range(world_size)
        self._codecs = codecs
        self._dtype = dtype
        self._seed = seed
        self.worker_residual = [
            [np.zeros(size, np.float32) for _ in self._ranks] if kept else []
            for size, kept in zip(sizes, keeps, strict=True)
        ]

    def step(
        self,
        number: int,
        gradients: Sequence[Sequence[np.ndarray]],
        warmup: str | None = None,
    ) -> list[np.ndarray]:
        """gradients[rank][parameter] -> means by parameter.

        warmup: the codec that lossy ones give way to in this step; `exact` leaves residuals alone.
        """
        means = []
        first_tile = 0
        for index, codec in enumerate(self._codecs):
            by_rank = [gradients[rank][index] for rank in self._ranks]
            residuals = self.worker_residual[index] if warmup != "exact" else []
            used = codec if warmup is None or codec == "exact" else warmup
            means.append(self._mean(number, used, by_rank, residuals, first_tile))
            first_tile += -(-len(by_rank[0]) // 4096)
        return means

    def _mean(
        self,
        step: int,
        codec: str,
        by_rank: Sequence[np.ndarray],
        residuals: Sequence[np.ndarray],
        first_tile: int,
    ) -> np.ndarray:
        wide = [cut_into_tiles(widen(flat, self._dtype)) for flat in by_rank]
        kept = [cut_into_tiles(flat) for flat in residuals]
        pieces = [by_rank[0][:0]]
        for part in range(len(wide[0])):
            tiles, n = wide[0][part].shape
            context = Context(WORKER, self._seed, step, first_tile)
            payloads = [
                encode_tiles(
                    codec,
                    self._dtype,
                    wide[rank][part],
                    kept[rank][part] if kept else None,
                    context=context,
                )
                for rank in self._ranks
            ]
            mean = accumulate_tiles(codec, self._dtype, payloads, n, len(payloads), context)
            pieces.append(mean.reshape(-1))
            first_tile += tiles
        return np.concatenate(pieces)


def scattered_bytes_per_step(
    sizes: Sequence[int],
    codecs: Sequence[str],
    owners: Sequence[int],
    buckets: Sequence[Sequence[int]],
    world_size: int,
    chunk_bytes: int = CHUNK_BYTES,
    dtype: str = "float32",
) -> list[int]:
    """What each rank sends to others in a step. sizes, codecs, owners: of the parameters."""
    sent = [0] * world_size
    for bucket in buckets:
        chunks = _chunks_in_turns(sizes, codecs, owners, bucket, world_size, chunk_bytes, dtype)
        for rank in range(world_size):
            for chunk in chunks:
                messages = message_sizes(chunk, equal=False)
                sent[rank] += sum(messages) - messages[rank]
            sent[rank] += bool(chunks) * (world_size - 1) * HEADER_BYTES  # commits
    return sent


def gathered_bytes_per_step(
    sizes: Sequence[int],
    codecs: Sequence[str],
    owners: Sequence[int],
    buckets: Sequence[Sequence[int]],
    world_size: int,
    dtype: str = "float32",
) -> list[int]:
    """What each rank sends to others when all buckets are all-gathered on a host."""
    sent = [0] * world_size
    for bucket in buckets:
        chunks = _chunks_in_turns(sizes, codecs, owners, bucket, world_size, CHUNK_BYTES, dtype)
        gathered = [message_sizes(chunk, equal=True) for chunk in chunks]
        for rank in range(world_size):
            to_each = sum(each[rank] for each in gathered) + bool(chunks) * HEADER_BYTES  # commits
            sent[rank] += to_each * (world_size - 1)
    return sent


def _chunks_in_turns(
    sizes: Sequence[int],
    codecs: Sequence[str],
    owners: Sequence[int],
    bucket: Sequence[int],
    world_size: int,
    chunk_bytes: int,
    dtype: str,
) -> list[list[int]]:
    """Payload bytes by owner, of each chunk."""
    queues: dict[int, list[tuple[int, int]]] = {}  # by owner: place in the bucket, bytes
    place = 0
    for index in bucket:
        for begin in range(0, sizes[index], TILE_ELEMENTS):
            n = min(TILE_ELEMENTS, sizes[index] - begin)
            payload = find_codec(codecs[index]).payload_bytes(n, dtype, WORKER)
            queues.setdefault(owners[index], []).append((place, payload))
            place += 1
    chunks: list[list[int]] = []
    for turn in range(max(map(len, queues.values()), default=0)):
        tiles = [(*queue[turn], owner) for owner, queue in queues.items() if turn < len(queue)]
        for _, payload, owner in sorted(tiles):
            most = chunk_bytes if chunks and chunks[-1][owner] else payload
            if not chunks or chunks[-1][owner] + payload > most:
                chunks.append([0] * world_size)
            chunks[-1][owner] += payload
    return chunks
