"""What all codecs have in common, and the blocks of 128 elements that several of them use."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..scalars import widen

WORKER, OWNER = "worker", "owner"
NON_FINITE_SCALE = 0x7FC0
LEAST_SCALE = 0x0080  # 2^-126, the smallest normal bfloat16
BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Context:
    """What the bytes of consecutive tiles depend on besides their values."""

    stage: str = WORKER
    seed: int = 0
    step: int = 0
    first_tile: int = 0  # number of the first of them


DEFAULT = Context()


class Codec:
    """Takes many tiles of equal length n at once.

    Values are [tiles, n], payloads uint8 [tiles, payload_bytes]. Values are float32 (float64 where
    the gradient is float64). `name` is the canonical text.
    """

    name = ""
    lossy = True
    sent_share = 1.0  # of the elements of a tile, in a worker's payload

    def payload_bytes(self, n: int, dtype: str, stage: str = WORKER) -> int:
        raise NotImplementedError

    def non_finite(self, values: np.ndarray) -> np.ndarray:
        """True for each element whose unit is non-finite."""
        raise NotImplementedError

    def encode(self, values: np.ndarray, dtype: str, context: Context = DEFAULT) -> np.ndarray:
        raise NotImplementedError

    def decode(
        self, payload: np.ndarray, n: int, dtype: str, context: Context = DEFAULT
    ) -> np.ndarray:
        raise NotImplementedError

    def corrupt(self, payload: np.ndarray, n: int, context: Context = DEFAULT) -> np.ndarray:
        """True for each unit [tiles, units] that breaks the format."""
        return np.zeros((len(payload), 0), bool)


def padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def store(*parts: np.ndarray) -> np.ndarray:
    """Arrays [tiles, any] of any dtype -> their bytes side by side, uint8 [tiles, padded]."""
    raw = [np.ascontiguousarray(p).view(np.uint8).reshape(len(p), -1) for p in parts]
    joined = np.concatenate(raw, axis=1)
    return np.pad(joined, ((0, 0), (0, padded(joined.shape[1]) - joined.shape[1])))


def num_blocks(n: int) -> int:
    return -(-n // BLOCK)


def in_blocks(values: np.ndarray) -> np.ndarray:
    """[tiles, n] -> [tiles, blocks, 128], the last block filled up with zeros."""
    tiles, n = values.shape
    blocks = num_blocks(n)
    return np.pad(values, ((0, 0), (0, blocks * BLOCK - n))).reshape(tiles, blocks, BLOCK)


def out_of_blocks(blocks: np.ndarray, n: int) -> np.ndarray:
    return blocks.reshape(len(blocks), -1)[:, :n]


class ScaledBlocks(Codec):
    """Codes of all blocks, then a bfloat16 scale for each."""

    def code_bytes(self, n: int) -> int:
        raise NotImplementedError

    def payload_bytes(self, n: int, dtype: str, stage: str = WORKER) -> int:
        return padded(self.code_bytes(n) + 2 * num_blocks(n))

    def non_finite(self, values: np.ndarray) -> np.ndarray:
        bad = ~np.isfinite(in_blocks(values)).all(axis=2)
        return np.repeat(bad, BLOCK, axis=1)[:, : values.shape[1]]


def written_scales(bits: np.ndarray, bad: np.ndarray) -> np.ndarray:
    """bfloat16 bits of scales as a payload holds them: 0 below 2^-126, a NaN where `bad`."""
    kept = np.where(bits < LEAST_SCALE, 0, bits)
    return np.where(bad, NON_FINITE_SCALE, kept).astype("<u2")


def read_scales(payload: np.ndarray, offset: int, n: int) -> np.ndarray:
    """bfloat16 bits of the scales of all blocks, [tiles, blocks]."""
    raw = np.ascontiguousarray(payload[:, offset : offset + 2 * num_blocks(n)])
    return raw.view("<u2").astype(np.uint16)


def scale_values(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16 bits; 0 for those that are no normal number."""
    normal = (bits >= LEAST_SCALE) & (bits < 0x7F80)
    return widen(np.where(normal, bits, 0).astype(np.uint16), "bfloat16")
