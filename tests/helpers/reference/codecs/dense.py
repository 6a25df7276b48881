"""The codecs that keep every element: exact and bf16."""

from __future__ import annotations

import numpy as np

from ..scalars import DTYPES, canonical, narrow, round_to_bfloat16, widen
from .base import DEFAULT, WORKER, Codec, Context, padded, store


def bfloat16_saturated(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16, ties to even; what is finite stays finite."""
    bits = round_to_bfloat16(values)
    overflowed = np.isfinite(values) & ((bits & 0x7FFF) == 0x7F80)
    return np.where(overflowed, (bits & 0x8000) | 0x7F7F, bits).astype("<u2")


class Exact(Codec):
    name = "exact"
    lossy = False

    def payload_bytes(self, n: int, dtype: str, stage: str = WORKER) -> int:
        return padded(n * DTYPES[dtype].item_bytes)

    def non_finite(self, values: np.ndarray) -> np.ndarray:
        return ~np.isfinite(values)

    def encode(self, values: np.ndarray, dtype: str, context: Context = DEFAULT) -> np.ndarray:
        return store(narrow(values, dtype))

    def decode(
        self, payload: np.ndarray, n: int, dtype: str, context: Context = DEFAULT
    ) -> np.ndarray:
        kind = DTYPES[dtype]
        raw = np.ascontiguousarray(payload[:, : n * kind.item_bytes])
        return canonical(widen(raw.view(kind.storage), dtype))


class BFloat16(Codec):
    name = "bf16"

    def payload_bytes(self, n: int, dtype: str, stage: str = WORKER) -> int:
        return padded(2 * n)

    def non_finite(self, values: np.ndarray) -> np.ndarray:
        return ~np.isfinite(values)

    def encode(self, values: np.ndarray, dtype: str, context: Context = DEFAULT) -> np.ndarray:
        return store(bfloat16_saturated(values))

    def decode(
        self, payload: np.ndarray, n: int, dtype: str, context: Context = DEFAULT
    ) -> np.ndarray:
        raw = np.ascontiguousarray(payload[:, : 2 * n])
        return canonical(widen(raw.view("<u2"), "bfloat16"))
