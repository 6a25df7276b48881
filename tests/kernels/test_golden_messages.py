"""The NumPy twin writes the messages in golden/messages.tar, to the byte."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from golden import golden
from reference import Context, Header, Layout, Parameter, narrow, widen, word_sum
from reference.engine import encode_tiles, reduce_tiles
from reference.message import (
    COMMIT,
    COMMIT_RECORD,
    GATHER,
    MAGIC,
    PARAMETERS,
    SCATTER,
    WIRE_VERSION,
)

# As tests/kernels/golden/README.md says.
SIZES = {"a": 5196, "b": 70, "c": 200, "d": 300, "e": 1000, "f": 200, "g": 41}
CODECS = {"a": "q4", "b": "exact", "c": "q8", "d": "sign1", "e": "topk", "f": "rht", "g": "bf16"}
BUCKET = [4, 0, 2, 6, 1, 3, 5]
SEED, STEP, CHUNK, NUMBER = 7, 3, 5, 2
CONFIG_HASH, LAYOUT_HASH = 0x1122334455667788, 0x99AABBCCDDEEFF00
DTYPES = ("float32", "bfloat16", "float16")


MESSAGES = golden("messages")


def layout_of(dtype: str) -> Layout:
    # With every parameter under a rule the default ones do not matter.
    parameters = [Parameter(name, size, dtype) for name, size in SIZES.items()]
    return Layout(parameters, "q4", 2, list(CODECS.items()))


def gradients(dtype: str, rank: int) -> dict[int, np.ndarray]:
    """By parameter."""
    numbers = np.frombuffer(golden("gradient")[f"gradient_rank{rank}"], "<f4")
    sizes = list(SIZES.values())
    total = sum(sizes)
    bucket = narrow(np.resize(numbers, total) * np.float32(4096), dtype)
    result, begin = {}, 0
    for index in BUCKET:
        result[index] = bucket[begin : begin + sizes[index]]
        begin += sizes[index]
    return result


def header(phase: int, rank: int) -> Header:
    return Header(
        phase=phase,
        source_rank=rank,
        config_hash=CONFIG_HASH,
        layout_hash=LAYOUT_HASH,
        step=STEP,
        chunk=CHUNK,
    )


def payloads(dtype: str, rank: int) -> dict[int, np.ndarray]:
    """By tile, in bucket order."""
    layout, by_parameter = layout_of(dtype), gradients(dtype, rank)
    result = {}
    for index in BUCKET:
        for number in layout.tiles_of[index]:
            tile = layout.tiles[number]
            part = by_parameter[index][tile.offset : tile.offset + tile.num_elements]
            context = Context(seed=SEED, step=STEP, first_tile=number)
            encoded = encode_tiles(tile.codec, dtype, widen(part, dtype)[None], context=context)
            result[number] = encoded[0]
    return result


def write(header: Header, payload: np.ndarray) -> bytes:
    """A message whose `header` lacks only what follows from the payload."""
    full = dataclasses.replace(header, payload_bytes=len(payload), checksum=word_sum(payload))
    return full.pack() + payload.tobytes()


def write_commit(rank: int, status: int, failed: Sequence[int], used: Sequence[int]) -> bytes:
    """`failed`: chunk, phase and rank of the refused message, the values expected and received."""
    head = (MAGIC, WIRE_VERSION, COMMIT, status, rank, STEP, NUMBER, *failed)
    used_map = bytes(used).ljust(8, b"\0")
    summed = COMMIT_RECORD.pack(*head, 0)[:56] + used_map
    return COMMIT_RECORD.pack(*head, word_sum(np.frombuffer(summed, np.uint8))) + used_map


def _mix(state: int, word: int) -> int:
    x = (state ^ word) * 0x9E3779B97F4A7C15 % 2**64
    return x ^ (x >> 32)


def hash_bits(data: bytes) -> int:
    """Of a parameter, for checks of parameters."""
    numbers = [1, 2, 3, 4]
    whole = len(data) // 32 * 32
    for begin in range(0, whole, 32):
        words = struct.unpack_from("<4Q", data, begin)
        numbers = [_mix(number, word) for number, word in zip(numbers, words, strict=True)]
    state = _mix(0, len(data))
    for begin in range(whole, len(data), 8):
        state = _mix(state, int.from_bytes(data[begin : begin + 8], "little"))
    for number in numbers:
        state = _mix(state, number)
    return state


@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_are_the_golden_ones(dtype: str) -> None:
    layout, by_rank = layout_of(dtype), [payloads(dtype, rank) for rank in (0, 1)]
    for rank in (0, 1):
        owned = [number for number in by_rank[0] if layout.owners[number] == rank]
        sent = [each for tile, each in by_rank[rank].items() if tile not in owned]
        reduced = []
        for number in owned:
            tile = layout.tiles[number]
            context = Context(seed=SEED, step=STEP, first_tile=number)
            given = [each[number][None] for each in by_rank]
            reduced += list(
                reduce_tiles(tile.codec, dtype, given, tile.num_elements, context=context)
            )
        for phase, parts, name in (
            (SCATTER, sent, f"scatter_rank{rank}_to_rank{1 - rank}"),
            (GATHER, reduced, f"gather_rank{rank}"),
        ):
            assert write(header(phase, rank), np.concatenate(parts)) == MESSAGES[f"{dtype}_{name}"]
    by_parameter = gradients(dtype, 0)
    hashes = [hash_bits(by_parameter[index].tobytes()) for index in range(len(SIZES))]
    message = write(header(PARAMETERS, 0), np.array(hashes, "<u8").view(np.uint8))
    assert message == MESSAGES[f"{dtype}_hashes_rank0"]


def test_commits_are_the_golden_ones() -> None:
    used = [1, 0, 1, 1, 0, 1, 1]
    scale = int(np.float32(62500).view(np.uint32))
    failed = (CHUNK, GATHER, 0, 0x0123456789ABCDEF, 0xFEDCBA9876543210)
    assert write_commit(0, 0, (0,) * 5, used) == MESSAGES["commit_rank0"]
    assert write_commit(0, 0, (0, 0, 0, 0, scale), used) == MESSAGES["commit_scaled_rank0"]
    assert write_commit(1, 10, failed, [1, 1, 0, 1, 0, 0, 1]) == MESSAGES["commit_rank1"]
