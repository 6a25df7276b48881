"""The four scalar types of a gradient. bfloat16 lives in uint16 arrays, the rest in NumPy's own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class DType:
    name: str
    storage: type  # of the arrays that hold it
    bits: type  # unsigned integer of the same size
    canonical_nan: int

    @property
    def item_bytes(self) -> int:
        return np.dtype(self.storage).itemsize


DTYPES = {
    d.name: d
    for d in (
        DType("float32", np.float32, np.uint32, 0x7FC00000),
        DType("bfloat16", np.uint16, np.uint16, 0x7FC0),
        DType("float16", np.float16, np.uint16, 0x7E00),
        DType("float64", np.float64, np.uint64, 0x7FF8000000000000),
    )
}


def widen(array: np.ndarray, dtype: str) -> np.ndarray:
    """Exactly: to float64 for float64, to float32 for everything else."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float64 if dtype == "float64" else np.float32)


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> bits of the nearest bfloat16, ties to even; overflow gives infinity."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds to nearest, ties to even, to `dtype`; overflow gives infinity, NaN is canonical."""
    if dtype == "bfloat16":
        return round_to_bfloat16(values)
    kind = DTYPES[dtype]
    with np.errstate(over="ignore", under="ignore"):
        result = np.array(values.astype(kind.storage))
    result.view(kind.bits)[np.isnan(values)] = kind.canonical_nan
    return result


def divided_sum(terms: Sequence[np.ndarray], divisor: int) -> np.ndarray:
    """The sum in this order, times 1 / divisor; all is rounded to the dtype of the terms."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        total = functools.reduce(np.add, terms)
        return total * (total.dtype.type(1) / total.dtype.type(divisor))


def canonical(values: np.ndarray) -> np.ndarray:
    """The same float32 or float64 values with every NaN canonical."""
    return narrow(values, values.dtype.name)
