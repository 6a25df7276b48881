"""The NumPy twin and the second rank write the messages in golden/messages, to the byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from reference import HEADER, Context, Header, Layout, Parameter, narrow, widen
from reference.engine import encode_tiles, reduce_tiles
from reference.message import GATHER, PARAMETERS, SCATTER
from second.messages import Fault, check, hash_bits, outcome, used_by_any, write, write_commit

GOLDEN = Path(__file__).with_name("golden")
# As tests/kernels/golden/README.md says.
SIZES = {"a": 5196, "b": 70, "c": 200, "d": 300, "e": 1000, "f": 200, "g": 41}
CODECS = {"a": "q4", "b": "exact", "c": "q8", "d": "sign1", "e": "topk", "f": "rht", "g": "bf16"}
BUCKET = [4, 0, 2, 6, 1, 3, 5]
SEED, STEP, CHUNK, NUMBER = 7, 3, 5, 2
CONFIG_HASH, LAYOUT_HASH = 0x1122334455667788, 0x99AABBCCDDEEFF00
DTYPES = ("float32", "bfloat16", "float16")


def golden(name: str) -> bytes:
    return (GOLDEN / "messages" / f"{name}.bin").read_bytes()


def layout_of(dtype: str) -> Layout:
    # With every parameter under a rule the default ones do not matter.
    parameters = [Parameter(name, size, dtype) for name, size in SIZES.items()]
    return Layout(parameters, "q4", 2, list(CODECS.items()))


def gradients(dtype: str, rank: int) -> dict[int, np.ndarray]:
    """By parameter."""
    numbers = np.fromfile(GOLDEN / f"gradient_rank{rank}.bin", "<f4")
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
            assert write(header(phase, rank), np.concatenate(parts)) == golden(f"{dtype}_{name}")
    by_parameter = gradients(dtype, 0)
    hashes = [hash_bits(by_parameter[index].tobytes()) for index in range(len(SIZES))]
    message = write(header(PARAMETERS, 0), np.array(hashes, "<u8").view(np.uint8))
    assert message == golden(f"{dtype}_hashes_rank0")


def test_commits_are_the_golden_ones() -> None:
    fault = Fault(10, GATHER, 0, 2**32 + CHUNK, 0x0123456789ABCDEF, 0xFEDCBA9876543210)
    used = ([1, 0, 1, 1, 0, 1, 1], [1, 1, 0, 1, 0, 0, 1])
    commits = [
        write_commit(0, STEP, NUMBER, None, used[0]),
        write_commit(1, STEP, NUMBER, fault, used[1]),
    ]
    assert commits == [golden("commit_rank0"), golden("commit_rank1")]
    scaled = write_commit(0, STEP, NUMBER, None, used[0], loss_scale=62500.0)
    assert scaled == golden("commit_scaled_rank0")
    reporter, read = outcome(commits, 0, STEP, NUMBER)
    assert (reporter, read) == (1, Fault(10, GATHER, 0, CHUNK, fault.expected, fault.received))
    assert used_by_any(commits, 7) == [True, True, True, True, False, True, True]


@pytest.mark.parametrize("file", sorted((GOLDEN / "messages").glob("*at*")), ids=lambda f: f.stem)
def test_every_flipped_bit_of_a_header_is_the_fault_of_its_field(file: Path) -> None:
    message = file.read_bytes()
    right = Header.unpack(message)
    assert check(message, right)[0] is None
    # Status of a fault, by the first bytes of fields; 48 to 55, the seed, may be anything.
    fields = {0: 1, 4: 2, 6: 3, 7: 13, 8: 4, 12: 9, 16: 5, 24: 6, 32: 7, 40: 8, 48: None, 56: 10}
    statuses = [fields[max(begin for begin in fields if begin <= byte)] for byte in range(64)]
    for byte, status in enumerate(statuses):
        changed = bytearray(message)
        changed[byte] ^= 1 << (byte % 8)
        fault, _ = check(bytes(changed), right)
        assert status is None or (fault is not None and fault.status == status), byte
    last = bytearray(message)
    last[-1] ^= 1
    assert len(message) > HEADER.size
    assert check(bytes(last), right)[0].status == 10
