"""sign1: signs, and the mean magnitude per 128 elements as a bfloat16."""

from __future__ import annotations

import numpy as np

from ..scalars import canonical, round_to_bfloat16
from .base import (
    BLOCK,
    DEFAULT,
    LEAST_SCALE,
    NON_FINITE_SCALE,
    Context,
    ScaledBlocks,
    in_blocks,
    num_blocks,
    out_of_blocks,
    read_scales,
    scale_values,
    store,
    written_scales,
)

LARGEST_BFLOAT16 = np.float32(float.fromhex("0x1.fep127"))
SHRINK = np.float32(2.0**-7)


def tree_sum(p: np.ndarray) -> np.ndarray:
    """Of a power of two numbers along the last axis, adjacent ones first."""
    while p.shape[-1] > 1:
        p = p[..., 0::2] + p[..., 1::2]
    return p[..., 0]


class Sign1(ScaledBlocks):
    name = "sign1"

    def code_bytes(self, n: int) -> int:
        return 2 * -(-n // 16)

    def encode(self, values: np.ndarray, dtype: str, context: Context = DEFAULT) -> np.ndarray:
        n = values.shape[1]
        v = in_blocks(values)
        bad = ~np.isfinite(v).all(axis=2)
        v = np.where(bad[..., None], np.float32(0), v)
        members = np.minimum(BLOCK, n - BLOCK * np.arange(num_blocks(n))).astype(np.float32)
        with np.errstate(under="ignore", over="ignore"):
            mean = tree_sum(np.abs(v) * SHRINK) / (members * SHRINK)
        bits = round_to_bfloat16(np.minimum(mean, LARGEST_BFLOAT16))
        scales = written_scales(bits, bad)
        live = (scales != 0) & ~bad
        signs = out_of_blocks(np.signbit(v) & live[..., None], n)
        bytes_ = np.packbits(signs, axis=1, bitorder="little")
        unused = self.code_bytes(n) - bytes_.shape[1]
        return store(np.pad(bytes_, ((0, 0), (0, unused))), scales)

    def corrupt(self, payload: np.ndarray, n: int, context: Context = DEFAULT) -> np.ndarray:
        bits = read_scales(payload, self.code_bytes(n), n)
        special = (bits == 0) | (bits == NON_FINITE_SCALE)
        return ~special & ((bits < LEAST_SCALE) | (bits >= 0x7F80))

    def decode(
        self, payload: np.ndarray, n: int, dtype: str, context: Context = DEFAULT
    ) -> np.ndarray:
        bits = read_scales(payload, self.code_bytes(n), n)
        nan = self.corrupt(payload, n) | (bits == NON_FINITE_SCALE)
        scale = np.where(nan, np.float32(np.nan), scale_values(bits))
        signs = np.unpackbits(payload[:, : self.code_bytes(n)], axis=1, count=n, bitorder="little")
        negative = in_blocks(signs) & (bits != 0)[..., None]
        value = np.where(negative != 0, -scale[..., None], scale[..., None])
        return canonical(out_of_blocks(value, n))
