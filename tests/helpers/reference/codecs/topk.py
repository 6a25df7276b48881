"""topk: the k largest magnitudes of a tile, and where they are."""

from __future__ import annotations

import math

import numpy as np

from ..scalars import canonical, widen
from .base import DEFAULT, OWNER, WORKER, Codec, Context, padded, store
from .dense import bfloat16_saturated
from .q4 import Q4

MILLION = 10**6
LARGEST_RATIO = 250_000  # in millionths
Q4_BLOCK = 32


def millionths(ratio: float) -> int:
    return math.floor(ratio * 1e6 + 0.5)


class BFloat16Values:
    """The section of values, for `values=bf16`."""

    def num_bytes(self, k: int) -> int:
        return 2 * k

    def encode(self, kept: np.ndarray) -> np.ndarray:
        bits = bfloat16_saturated(kept)
        return np.where(bits == 0x8000, 0, bits).astype("<u2").view(np.uint8)

    def non_finite(self, k: int) -> np.ndarray:
        return np.array([0x7FC0] + [0] * (k - 1), "<u2").view(np.uint8)

    def decode(self, section: np.ndarray, k: int) -> np.ndarray | None:
        """The values, or None if the section is corrupt."""
        bits = section.view("<u2")
        if ((bits & 0x7F80) == 0x7F80).any():
            return None
        return widen(bits, "bfloat16")


class Q4Values:
    """Likewise for `values=q4`: one group of a q4 tile, without the unused ends of its codes."""

    def _code_bytes(self, k: int) -> tuple[int, int]:
        """Those of q4's full blocks, and those of them that are written."""
        blocks = -(-k // Q4_BLOCK)
        return 16 * blocks, 16 * (blocks - 1) + min(k - Q4_BLOCK * (blocks - 1), 16)

    def num_bytes(self, k: int) -> int:
        return self._code_bytes(k)[1] + -(-k // Q4_BLOCK) + 1

    def encode(self, kept: np.ndarray) -> np.ndarray:
        k = kept.shape[1]
        full, written = self._code_bytes(k)
        payload = Q4().encode(kept, "float32")
        rest = full + -(-k // Q4_BLOCK) + 1
        return np.concatenate([payload[:, :written], payload[:, full:rest]], axis=1)

    def non_finite(self, k: int) -> np.ndarray:
        return np.array([0] * (self.num_bytes(k) - 1) + [255], np.uint8)

    def decode(self, section: np.ndarray, k: int) -> np.ndarray | None:
        full, written = self._code_bytes(k)
        unwritten = np.zeros(full - written, np.uint8)
        payload = np.concatenate([section[:written], unwritten, section[written:]])[None]
        if section[-1] == 255 or Q4().corrupt(payload, k).any():
            return None
        return Q4().decode(payload, k, "float32")[0]


class TopK(Codec):
    def __init__(
        self, ratio: float = 0.01, owner_ratio: float | None = None, values: str = "bf16"
    ) -> None:
        written = "" if owner_ratio is None else f",owner_ratio={owner_ratio!r}"
        self.name = f"topk:ratio={ratio!r}{written},values={values}"
        worker = millionths(ratio)
        self.sent_share = worker / MILLION
        given = min(4 * worker, LARGEST_RATIO) if owner_ratio is None else millionths(owner_ratio)
        self._millionths = {WORKER: worker, OWNER: given}
        self._values = {"bf16": BFloat16Values(), "q4": Q4Values()}[values]

    def num_kept(self, n: int, stage: str) -> int:
        return max(1, (self._millionths[stage] * n + MILLION // 2) // MILLION)

    def sections(self, n: int, stage: str) -> tuple[int, int]:
        """Bytes of the values and of the positions."""
        k = self.num_kept(n, stage)
        return self._values.num_bytes(k), min(-(-12 * k // 8), -(-n // 8))

    @staticmethod
    def has_bitmap(n: int, k: int) -> bool:
        return -(-n // 8) < -(-12 * k // 8)

    def payload_bytes(self, n: int, dtype: str, stage: str = WORKER) -> int:
        return padded(sum(self.sections(n, stage)))

    def non_finite(self, values: np.ndarray) -> np.ndarray:
        bad = ~np.isfinite(values).all(axis=1)
        return np.broadcast_to(bad[:, None], values.shape)

    def encode(self, values: np.ndarray, dtype: str, context: Context = DEFAULT) -> np.ndarray:
        n = values.shape[1]
        k = self.num_kept(n, context.stage)
        bad = ~np.isfinite(values).all(axis=1)
        values = np.where(bad[:, None], np.float32(0), values)
        key = (values.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)
        index = np.sort(np.argsort(-key, axis=1, kind="stable")[:, :k], axis=1)
        section = self._values.encode(np.take_along_axis(values, index, axis=1))
        positions = self._pack_positions(index, n)
        section[bad] = self._values.non_finite(k)
        positions[bad] = 0
        return store(section, positions)

    def _pack_positions(self, index: np.ndarray, n: int) -> np.ndarray:
        tiles, k = index.shape
        if self.has_bitmap(n, k):
            bits = np.zeros((tiles, n), np.uint8)
            np.put_along_axis(bits, index, 1, axis=1)
        else:
            bits = ((index[:, :, None] >> np.arange(12)) & 1).astype(np.uint8)
        return np.packbits(bits.reshape(tiles, -1), axis=1, bitorder="little")

    def _unpack_positions(self, section: np.ndarray, n: int, k: int) -> np.ndarray | None:
        """Indices of the kept elements, or None if the section is corrupt."""
        bits = np.unpackbits(section, bitorder="little")
        if self.has_bitmap(n, k):
            index = np.flatnonzero(bits)
            valid = len(index) == k and index[-1] < n
        else:
            index = bits[: 12 * k].reshape(k, 12) @ (1 << np.arange(12))
            valid = (np.diff(index) > 0).all() and index[-1] < n and not bits[12 * k :].any()
        return index if valid else None

    def _decode_tile(self, payload: np.ndarray, n: int, stage: str) -> tuple[np.ndarray, bool]:
        """Values of one tile, and whether it is corrupt."""
        k = self.num_kept(n, stage)
        num_values, num_positions = self.sections(n, stage)
        section = np.ascontiguousarray(payload[:num_values])
        positions = payload[num_values : num_values + num_positions]
        if not section.any() and not positions.any():
            return np.zeros(n, np.float32), False
        if (section == self._values.non_finite(k)).all() and not positions.any():
            return np.full(n, np.nan, np.float32), False
        kept = self._values.decode(section, k)
        index = self._unpack_positions(positions, n, k)
        if kept is None or index is None:
            return np.full(n, np.nan, np.float32), True
        result = np.zeros(n, np.float32)
        result[index] = np.where(kept == 0, np.float32(0), kept)
        return result, False

    def corrupt(self, payload: np.ndarray, n: int, context: Context = DEFAULT) -> np.ndarray:
        flags = [self._decode_tile(tile, n, context.stage)[1] for tile in payload]
        return np.array(flags, bool).reshape(-1, 1)

    def decode(
        self, payload: np.ndarray, n: int, dtype: str, context: Context = DEFAULT
    ) -> np.ndarray:
        tiles = [self._decode_tile(tile, n, context.stage)[0] for tile in payload]
        return canonical(np.array(tiles, np.float32).reshape(len(payload), n))
