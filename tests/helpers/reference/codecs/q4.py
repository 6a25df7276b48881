"""q4: four-bit floats, an E4M3 scale per 32 elements, a power of two per 1024."""

from __future__ import annotations

import numpy as np

from ..scalars import canonical
from .base import DEFAULT, WORKER, Codec, Context, padded, store

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
BLOCK, GROUP = 32, 1024
BLOCKS_PER_GROUP = GROUP // BLOCK
LEAST_K, MOST_K = -118, 117
LEAST_SCALE = 2.0**-6
SCALE_NAN_BYTE = 0x7F


def round_to_4_bits(y: np.ndarray) -> np.ndarray:
    """y >= 0 to four significant bits, nearest, ties to even."""
    fraction, exponent = np.frexp(y.astype(np.float64))
    return np.ldexp(np.rint(fraction * 16) / 16, exponent)


def nearest_e2m1(t: np.ndarray) -> np.ndarray:
    """Codes 0..7 of the E2M1 values nearest to t >= 0, ties to the even code."""
    code = np.zeros(t.shape, np.uint8)
    for low in range(7):
        middle = (float(E2M1[low]) + float(E2M1[low + 1])) / 2
        code += (t > middle) if low % 2 == 0 else (t >= middle)
    return code


def e4m3_byte(s: np.ndarray) -> np.ndarray:
    """Of values that have an E4M3 form with at least its smallest normal; 0 for 0."""
    fraction, exponent = np.frexp(s)  # s = fraction * 2^exponent, fraction in [1/2, 1)
    byte = (exponent - 1 + 7) * 8 + (fraction * 16 - 8)
    return np.where(s == 0, 0, byte).astype(np.uint8)


def e4m3_value(byte: np.ndarray) -> np.ndarray:
    """Of normal E4M3 bytes, as float64; 0 for 0."""
    value = np.ldexp(1 + (byte & 7) / 8, (byte >> 3).astype(np.int64) - 7)
    return np.where(byte == 0, 0.0, value)


def power_of_two(k: np.ndarray) -> np.ndarray:
    return np.ldexp(np.float32(1), k.astype(np.int32))


class Q4(Codec):
    name = "q4"

    def payload_bytes(self, n: int, dtype: str, stage: str = WORKER) -> int:
        blocks, groups = -(-n // BLOCK), -(-n // GROUP)
        return padded(16 * blocks + blocks + groups)

    def _groups(self, values: np.ndarray) -> np.ndarray:
        """[tiles, n] -> [tiles, groups, blocks, 32], filled up with +0."""
        tiles, n = values.shape
        groups = -(-n // GROUP)
        full = np.pad(values, ((0, 0), (0, groups * GROUP - n)))
        return full.reshape(tiles, groups, BLOCKS_PER_GROUP, BLOCK)

    def non_finite(self, values: np.ndarray) -> np.ndarray:
        bad = ~np.isfinite(self._groups(values)).all(axis=(2, 3))
        return np.repeat(bad, GROUP, axis=1)[:, : values.shape[1]]

    def encode(self, values: np.ndarray, dtype: str, context: Context = DEFAULT) -> np.ndarray:
        tiles, n = values.shape
        v = self._groups(values)
        bad = ~np.isfinite(v).all(axis=(2, 3))
        v = np.where(bad[:, :, None, None], np.float32(0), v)
        magnitude = np.abs(v)
        block_max = magnitude.max(axis=3)
        _, exponent = np.frexp(block_max.max(axis=2))  # floor(log2 m) + 1; 0 for m = 0
        exponent = np.where(block_max.max(axis=2) == 0, -1000, exponent)
        k = np.maximum(exponent - 1 - 10, LEAST_K)[:, :, None]
        with np.errstate(under="ignore"):
            y = (block_max * power_of_two(-k)) / np.float32(6)
        s = round_to_4_bits(y)
        s = np.where((k == MOST_K) & (s > 320), 320.0, s)
        s = np.where(s < LEAST_SCALE, 0.0, s)
        step = s.astype(np.float32) * power_of_two(k)
        reciprocal = np.float32(1) / np.where(s == 0, np.float32(1), step)
        with np.errstate(under="ignore"):
            t = np.where(s[..., None] == 0, 0, magnitude * reciprocal[..., None])
        code = nearest_e2m1(t)
        code |= ((code != 0) & np.signbit(v)).astype(np.uint8) << 3
        exponent_byte = np.where((s == 0).all(axis=2), 0, k[:, :, 0] + 128)
        exponent_byte = np.where(bad, 255, exponent_byte).astype(np.uint8)

        blocks = -(-n // BLOCK)
        packed = code[..., :16] | (code[..., 16:] << 4)
        return store(
            packed.reshape(tiles, -1)[:, : 16 * blocks],
            e4m3_byte(s).reshape(tiles, -1)[:, :blocks],
            exponent_byte,
        )

    def _split(self, payload: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes [tiles, groups, 32, 16], scale bytes [tiles, groups, 32], exponents."""
        tiles = len(payload)
        blocks, groups = -(-n // BLOCK), -(-n // GROUP)
        missing = groups * BLOCKS_PER_GROUP - blocks
        codes = np.pad(payload[:, : 16 * blocks], ((0, 0), (0, 16 * missing)))
        scales = np.pad(payload[:, 16 * blocks : 17 * blocks], ((0, 0), (0, missing)))
        exponents = payload[:, 17 * blocks : 17 * blocks + groups]
        shape = (tiles, groups, BLOCKS_PER_GROUP)
        return codes.reshape(*shape, 16), scales.reshape(shape), exponents

    def corrupt(self, payload: np.ndarray, n: int, context: Context = DEFAULT) -> np.ndarray:
        _, scales, exponents = self._split(payload, n)
        outside = ((exponents >= 1) & (exponents <= 9)) | ((exponents >= 246) & (exponents <= 254))
        malformed = (scales >= SCALE_NAN_BYTE) | ((scales >= 1) & (scales <= 7))
        too_large = (scales > 0x7A) & (exponents == MOST_K + 128)[:, :, None]
        unused = (scales != 0) & ((exponents == 0) | (exponents == 255))[:, :, None]
        return outside | (malformed | too_large | unused).any(axis=2)

    def decode(
        self, payload: np.ndarray, n: int, dtype: str, context: Context = DEFAULT
    ) -> np.ndarray:
        codes, scales, exponents = self._split(payload, n)
        nan = self.corrupt(payload, n) | (exponents == 255)
        live = ~nan & (exponents != 0)
        k = np.where(live, exponents.astype(np.int64) - 128, 0)
        s = np.where(live[:, :, None], e4m3_value(np.where(live[:, :, None], scales, 0)), 0.0)
        step = s.astype(np.float32) * power_of_two(k)[:, :, None]
        code = np.concatenate([codes & 15, codes >> 4], axis=3)
        value = E2M1[code & 7] * step[..., None]
        value = np.where(((code & 8) != 0) & (step[..., None] != 0), -value, value)
        value = np.where(nan[:, :, None, None], np.float32(np.nan), value)
        return canonical(value.reshape(len(payload), -1)[:, :n])
