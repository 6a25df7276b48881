"""Philox 4x32-10, of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011."""

from __future__ import annotations

import numpy as np

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)


def philox_4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """uint32 [..., 4] of counters [..., 4], under one key."""
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter).astype(np.uint64), -1, 0)
    k0, k1 = key
    for _ in range(ROUNDS):
        p0 = c0 * np.uint64(MULTIPLIERS[0])
        p1 = c2 * np.uint64(MULTIPLIERS[1])
        c0 = (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0)
        c2 = (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & LOW, p0 & LOW
        k0 = (k0 + KEY_INCREMENTS[0]) % 2**32
        k1 = (k1 + KEY_INCREMENTS[1]) % 2**32
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)
