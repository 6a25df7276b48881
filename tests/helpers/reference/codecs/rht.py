"""rht: random signs, a Hadamard transform, a codebook for Gaussians, a scale per 128 elements."""

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
from .philox import philox_4x32

LARGEST = float(np.finfo(np.float32).max)
BLOCKS_PER_TILE = 32
LOW_WORD, HIGH_WORD = np.uint64(2**32 - 1), np.uint64(32)  # a mask, a shift
MAGNITUDES = {4: (5, 15, 25, 36, 48, 62, 79, 104), 3: (10, 31, 55, 88), 2: (3, 10)}
THRESHOLDS = {
    4: (
        "0x1.0c76a8p-2",
        "0x1.0c76a8p-1",
        "0x1.996826p-1",
        "0x1.19e2fcp+0",
        "0x1.712326p+0",
        "0x1.d92abap+0",
        "0x1.330e1cp+1",
    ),
    3: ("0x1.009630p-1", "0x1.0d1a64p+0", "0x1.bf764ep+0"),
    2: ("0x1.f6a4f8p-1",),
}
# Width of every plane of codes, with the lowest bit of a code that it holds.
PLANES = {4: ((4, 0),), 3: ((2, 0), (1, 2)), 2: ((2, 0),)}

# z[p] = H(x)[ORDER[p]]
ORDER = np.empty(BLOCK, np.int64)
for _m in range(4):
    for _l in range(16):
        ORDER[32 * _m + 2 * _l] = 32 * _m + _l
        ORDER[32 * _m + 2 * _l + 1] = 32 * _m + 16 + _l


def block_signs(context: Context, tiles: int, blocks: int) -> np.ndarray:
    """+1 or -1, int8 [tiles, blocks, 128]."""
    number = BLOCKS_PER_TILE * (context.first_tile + np.arange(tiles))[:, None] + np.arange(blocks)
    number = number.astype(np.uint64)
    step = np.full_like(number, context.step)
    counter = [number & LOW_WORD, number >> HIGH_WORD, step & LOW_WORD, step >> HIGH_WORD]
    key = (context.seed % 2**32, context.seed // 2**32)
    drawn = philox_4x32(np.stack(counter, axis=-1), key)
    bits = (drawn[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    return (1 - 2 * bits.astype(np.int8)).reshape(tiles, blocks, BLOCK)


def hadamard(x: np.ndarray) -> np.ndarray:
    """H(x) over the last axis, without a factor, in the arithmetic of x."""
    x = x.copy()
    index = np.arange(BLOCK)
    for stride in (16, 32, 64, 1, 2, 4, 8):
        low = index[index & stride == 0]
        upper, lower = x[..., low] + x[..., low + stride], x[..., low] - x[..., low + stride]
        x[..., low], x[..., low + stride] = upper, lower
    return x


def folded_sum(x: np.ndarray) -> np.ndarray:
    """Over the last axis: the upper half is added to the lower one, down to one number."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def normalised(v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, its sum of squares Q, and e, of finite blocks v [tiles, blocks, 128]: x = v / 2^e."""
    with np.errstate(over="ignore", under="ignore"):
        Q = folded_sum(v * v)
        exponent = np.frexp(np.abs(v).max(axis=2))[1] - 1  # floor(log2 a)
        e = np.clip(exponent, -126, 126)
        e = np.where((Q >= 2.0**-100) & (Q <= 2.0**100), 0, e)
        x = v * np.ldexp(np.float32(1), -e)[..., None]
        return x, folded_sum(x * x), e


class RHT(ScaledBlocks):
    def __init__(self, bits: int = 4) -> None:
        self.name = f"rht:bits={bits}"
        self._bits = bits
        self.magnitudes = np.array(MAGNITUDES[bits])
        self.thresholds = np.array([float.fromhex(t) for t in THRESHOLDS[bits]], np.float32)

    def code_bytes(self, n: int) -> int:
        return 16 * self._bits * num_blocks(n)

    def _values_of(self, codes: np.ndarray) -> np.ndarray:
        magnitude = self.magnitudes[codes & (2 ** (self._bits - 1) - 1)]
        return np.where(codes >> (self._bits - 1) != 0, -magnitude, magnitude)

    def _pack(self, codes: np.ndarray) -> np.ndarray:
        """[tiles, blocks, 128] -> bytes [tiles, blocks, 16 bits]."""
        planes = []
        for width, lowest in PLANES[self._bits]:
            part = ((codes >> lowest) & (2**width - 1)).reshape(*codes.shape[:2], -1, 16 * width)
            shifts = width * np.arange(8 // width)
            planes.append((part << shifts[:, None]).sum(axis=2))
        return np.concatenate(planes, axis=2).astype(np.uint8)

    def _unpack(self, raw: np.ndarray) -> np.ndarray:
        codes = np.zeros((*raw.shape[:2], BLOCK), np.int64)
        start = 0
        for width, lowest in PLANES[self._bits]:
            plane = raw[..., None, start : start + 16 * width].astype(np.int64)
            start += 16 * width
            shifts = width * np.arange(8 // width)
            part = (plane >> shifts[:, None]) & (2**width - 1)
            codes |= part.reshape(*raw.shape[:2], BLOCK) << lowest
        return codes

    def _transformed_back(self, codes: np.ndarray) -> np.ndarray:
        """u, as integers."""
        h = np.empty_like(codes)
        h[..., ORDER] = self._values_of(codes)
        return hadamard(h)

    def encode(self, values: np.ndarray, dtype: str, context: Context = DEFAULT) -> np.ndarray:
        v = in_blocks(values)
        tiles, blocks, _ = v.shape
        bad = ~np.isfinite(v).all(axis=2)
        v = np.where(bad[..., None], np.float32(0), v)
        dead = (v == 0).all(axis=2)

        x, Q, e = normalised(v)
        r = np.sqrt(Q)
        z = hadamard(block_signs(context, tiles, blocks).astype(np.float32) * x)[..., ORDER]
        limits = self.thresholds * r[..., None]
        codes = (np.abs(z)[..., None] > limits[..., None, :]).sum(axis=3)
        codes |= np.signbit(z).astype(np.int64) << (self._bits - 1)
        c = self._values_of(codes)
        P = folded_sum(np.abs(z) * np.abs(c).astype(np.float32))
        N = (c * c).sum(axis=2).astype(np.float32)
        # Eight significant bits times a power of two: float64 holds it whatever e is.
        s = np.ldexp(scale_values(round_to_bfloat16(P / N)).astype(np.float64), e - 7)
        zero = dead | (s < 2.0**-126)
        scale_bits = round_to_bfloat16(np.where(zero, 0, s).astype(np.float32)).astype(np.int64)
        reach = np.abs(self._transformed_back(codes)).max(axis=2)
        while True:
            # Only blocks with e >= 120 can have a value that is not finite.
            too_large = ~zero & (reach * scale_values(scale_bits).astype(np.float64) > LARGEST)
            if not too_large.any():
                break
            scale_bits -= too_large
        codes[zero | bad] = 0
        return store(self._pack(codes), written_scales(scale_bits, bad))

    def _split(self, payload: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """u [tiles, blocks, 128] and the bits of the scales [tiles, blocks]."""
        raw = payload[:, : self.code_bytes(n)].reshape(len(payload), num_blocks(n), -1)
        u = self._transformed_back(self._unpack(raw))
        return u, read_scales(payload, self.code_bytes(n), n)

    def corrupt(self, payload: np.ndarray, n: int, context: Context = DEFAULT) -> np.ndarray:
        u, bits = self._split(payload, n)
        special = (bits == 0) | (bits == NON_FINITE_SCALE)
        reach = np.abs(u).max(axis=2) * scale_values(bits).astype(np.float64)
        return ~special & ((bits < LEAST_SCALE) | (bits >= 0x7F80) | (reach > LARGEST))

    def decode(
        self, payload: np.ndarray, n: int, dtype: str, context: Context = DEFAULT
    ) -> np.ndarray:
        u, bits = self._split(payload, n)
        nan = self.corrupt(payload, n) | (bits == NON_FINITE_SCALE)
        live = ~nan & (bits != 0)
        signs = block_signs(context, *bits.shape)
        # A zero of u has the sign of g, which the product of +0 and g has.
        product = signs.astype(np.float32) * u.astype(np.float32)
        scale = np.where(live, scale_values(bits), np.float32(0))
        value = np.where(live[..., None], scale[..., None] * product, np.float32(0))
        value = np.where(nan[..., None], np.float32(np.nan), value)
        return canonical(out_of_blocks(value, n))
