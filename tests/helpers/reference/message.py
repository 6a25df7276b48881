"""Headers, checksums, and the message that holds a single tensor."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .codecs import Context, find_codec
from .layout import TILE_ELEMENTS
from .scalars import divided_sum, narrow, widen

MAGIC = 0x59524647
WIRE_VERSION = 2
SINGLE_TENSOR = 4  # phase
HEADER = struct.Struct("<IHBBIIQQQQQQ")


@dataclasses.dataclass
class Header:
    magic: int = MAGIC
    wire_version: int = WIRE_VERSION
    phase: int = SINGLE_TENSOR
    status: int = 0
    source_rank: int = 0
    payload_bytes: int = 0
    config_hash: int = 0
    layout_hash: int = 0
    step: int = 0
    chunk: int = 0
    seed: int = 0
    checksum: int = 0

    def pack(self) -> bytes:
        return HEADER.pack(*dataclasses.astuple(self))

    @classmethod
    def unpack(cls, message: bytes) -> Header:
        return cls(*HEADER.unpack_from(message))


def word_sum(payload: np.ndarray) -> int:
    words = np.ascontiguousarray(payload, np.uint8).view("<u4").astype(np.uint64)
    weights = 2 * np.arange(len(words), dtype=np.uint64) + 3
    return int((words * weights).sum())  # uint64 arithmetic is modulo 2^64


def message_checksum(payloads: Iterable[np.ndarray]) -> int:
    """Of a message, given what it covers: the payloads of its tiles in order."""
    return word_sum(np.concatenate([np.zeros(0, np.uint8), *payloads]))


def hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _tile_lengths(num_elements: int) -> list[int]:
    return [
        min(TILE_ELEMENTS, num_elements - start) for start in range(0, num_elements, TILE_ELEMENTS)
    ]


def encode_tensor(
    elements: np.ndarray, codec: str, dtype: str = "float32", *, seed: int = 0, step: int = 0
) -> bytes:
    """What gradferry.encode writes for a tensor with these elements."""
    values = widen(elements.reshape(-1), dtype)
    payloads = []
    for number, start in enumerate(range(0, len(values), TILE_ELEMENTS)):
        tile = values[None, start : start + TILE_ELEMENTS]
        context = Context(seed=seed, step=step, first_tile=number)
        payload = find_codec(codec).encode(tile, dtype, context)[0]
        payloads.append(payload if tile.any() else np.zeros_like(payload))
    header = Header(
        config_hash=hash64(find_codec(codec).name),
        layout_hash=hash64(f"{dtype}|{len(values)}"),
        step=step,
        payload_bytes=sum(map(len, payloads)),
        seed=seed,
    )
    header.checksum = message_checksum([*payloads, np.frombuffer(header.pack(), np.uint8)])
    return header.pack() + b"".join(p.tobytes() for p in payloads)


def decode_tensor(message: bytes, num_elements: int, codec: str, dtype: str) -> np.ndarray:
    """The elements of a message that encode_tensor could have written, in storage of `dtype`."""
    return narrow(_decoded_values(message, num_elements, codec, dtype), dtype)


def accumulate_tensors(
    messages: Sequence[bytes], num_elements: int, codec: str, dtype: str, divisor: int
) -> np.ndarray:
    """The sum of what such messages hold, times 1 / divisor, in storage of `dtype`."""
    values = [_decoded_values(message, num_elements, codec, dtype) for message in messages]
    return narrow(divided_sum(values, divisor), dtype)


def _decoded_values(message: bytes, num_elements: int, codec: str, dtype: str) -> np.ndarray:
    """Not yet rounded to `dtype`: float64 for float64, float32 for everything else."""
    header = Header.unpack(message)
    payload = np.frombuffer(message, np.uint8)[HEADER.size :]
    pieces = []
    for number, n in enumerate(_tile_lengths(num_elements)):
        size = find_codec(codec).payload_bytes(n, dtype)
        context = Context(seed=header.seed, step=header.step, first_tile=number)
        pieces.append(find_codec(codec).decode(payload[None, :size], n, dtype, context)[0])
        payload = payload[size:]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)


def documented_example() -> bytes:
    """The bytes of the code blocks of section 5 of docs/reference/wire_format.md."""
    document = Path(__file__).parents[3] / "docs" / "reference" / "wire_format.md"
    section = document.read_text().split("## 5. A worked example")[1]
    lines = "".join(section.split("```")[1::2]).splitlines()
    return b"".join(bytes.fromhex(re.split(r" {4,}", line)[0]) for line in lines)


def example_values() -> np.ndarray:
    """The elements of the tensor whose message it is."""
    i = np.arange(40, dtype=np.float32)
    return np.where(i < 32, (i - 20) / 8, (i - 36) / 64).astype(np.float32)
