"""What the codecs approximate: their quantizers in float64, without the roundings of a format.

Values are float64 [blocks, elements]; every function returns what they are replaced by. Scales are
real numbers here, but for q4's, whose four bits are a part of the quantizer.
"""

from __future__ import annotations

import math

import numpy as np

Q4_BLOCK = 32
Q4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def safe(divisor: np.ndarray) -> np.ndarray:
    return np.where(divisor == 0, 1.0, divisor)


def q8(v: np.ndarray) -> np.ndarray:
    """127 steps up to the largest magnitude of a block."""
    step = safe(np.abs(v).max(axis=1, keepdims=True) / 127)
    return np.rint(v / step) * step


def q4(v: np.ndarray) -> np.ndarray:
    """The nearest of the E2M1 values, 6 being the largest magnitude of a block but for rounding."""
    largest = safe(np.abs(v).max(axis=1, keepdims=True))
    fraction, exponent = np.frexp(largest / 6)
    step = np.ldexp(np.rint(fraction * 16) / 16, exponent)
    distance = np.abs(np.abs(v / step)[..., None] - Q4_VALUES)
    return np.sign(v) * Q4_VALUES[distance.argmin(axis=2)] * step


def sign1(v: np.ndarray) -> np.ndarray:
    """Signs times the mean magnitude of a block."""
    return np.copysign(np.abs(v).mean(axis=1, keepdims=True), v)


def topk(v: np.ndarray, k: int, values: str) -> np.ndarray:
    """The k largest of a tile, as they are or through q4, and zeros."""
    result = np.zeros_like(v)
    index = np.sort(np.argsort(-np.abs(v), axis=1, kind="stable")[:, :k], axis=1)
    kept = np.take_along_axis(v, index, axis=1)
    if values == "q4":
        blocks = -(-k // Q4_BLOCK)
        full = np.pad(kept, ((0, 0), (0, blocks * Q4_BLOCK - k))).reshape(-1, Q4_BLOCK)
        kept = q4(full).reshape(len(v), -1)[:, :k]
    np.put_along_axis(result, index, kept, axis=1)
    return result


def lloyd_max(num_levels: int) -> np.ndarray:
    """The positive levels of the best quantizer of a unit Gaussian with 2 num_levels levels."""
    levels = np.arange(num_levels) + 0.5
    for _ in range(4000):
        edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [math.inf]])
        density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([math.erf(edge / math.sqrt(2)) / 2 for edge in edges])
        levels = -np.diff(density) / np.diff(below)
    return levels


def sylvester(order: int) -> np.ndarray:
    """The Hadamard matrix of a power of two, without a factor."""
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def rht(v: np.ndarray, bits: int, signs: np.ndarray) -> np.ndarray:
    """Lloyd-Max for the Gaussian that rotated blocks resemble, with the best scale for each."""
    rotation = sylvester(v.shape[1]) / math.sqrt(v.shape[1])
    z = (v * signs) @ rotation
    levels = lloyd_max(2 ** (bits - 1))
    unit = np.abs(z) / safe(np.sqrt((z * z).mean(axis=1, keepdims=True)))
    nearest = levels[np.abs(unit[..., None] - levels).argmin(axis=2)]
    code = np.copysign(nearest, z)
    scale = (z * code).sum(axis=1, keepdims=True) / (code * code).sum(axis=1, keepdims=True)
    return (scale * code @ rotation) * signs
