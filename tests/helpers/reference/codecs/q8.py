"""q8: 8-bit integers, a bfloat16 scale per 128 elements."""

from __future__ import annotations

import numpy as np

from ..scalars import canonical, round_to_bfloat16
from .base import (
    DEFAULT,
    LEAST_SCALE,
    NON_FINITE_SCALE,
    Context,
    ScaledBlocks,
    in_blocks,
    out_of_blocks,
    read_scales,
    scale_values,
    store,
    written_scales,
)

LARGEST_CODE = 127
LARGEST_SCALE = 0x7C01


class Q8(ScaledBlocks):
    name = "q8"

    def code_bytes(self, n: int) -> int:
        return -(-n // 16) * 16

    def encode(self, values: np.ndarray, dtype: str, context: Context = DEFAULT) -> np.ndarray:
        v = in_blocks(values)
        bad = ~np.isfinite(v).all(axis=2)
        v = np.where(bad[..., None], np.float32(0), v)
        with np.errstate(under="ignore"):
            bits = round_to_bfloat16(np.abs(v).max(axis=2) / np.float32(LARGEST_CODE))
            zero = bits < LEAST_SCALE
            reciprocal = np.float32(1) / np.where(zero, np.float32(1), scale_values(bits))
            t = v * reciprocal[..., None]
        code = np.where(zero[..., None], 0, np.rint(t)).astype(np.int8)
        codes = out_of_blocks(code, self.code_bytes(values.shape[1]))
        return store(codes, written_scales(bits, bad))

    def _split(self, payload: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes [tiles, blocks, 128], 0 beyond n, and bits of the scales [tiles, blocks]."""
        codes = np.ascontiguousarray(payload[:, :n]).view(np.int8)
        return in_blocks(codes), read_scales(payload, self.code_bytes(n), n)

    def corrupt(self, payload: np.ndarray, n: int, context: Context = DEFAULT) -> np.ndarray:
        codes, bits = self._split(payload, n)
        special = (bits == 0) | (bits == NON_FINITE_SCALE)
        wrong_scale = (bits < LEAST_SCALE) | (bits > LARGEST_SCALE)
        return ~special & (wrong_scale | (codes == -LARGEST_CODE - 1).any(axis=2))

    def decode(
        self, payload: np.ndarray, n: int, dtype: str, context: Context = DEFAULT
    ) -> np.ndarray:
        codes, bits = self._split(payload, n)
        nan = self.corrupt(payload, n) | (bits == NON_FINITE_SCALE)
        scale = np.where(nan, np.float32(np.nan), scale_values(bits))
        # A block of scale 0 is +0: the product of 0 and a negative code would be -0.
        value = codes.astype(np.float32) * scale[..., None]
        value = np.where((bits == 0)[..., None], np.float32(0), value)
        return canonical(out_of_blocks(value, n))
