"""Section 4 of docs/reference/protocol.md, and records of the wire format `reference` lacks."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np
from reference.message import COMMIT, HEADER, MAGIC, WIRE_VERSION, Header, word_sum

RECORD = struct.Struct("<IHHIIQQIHHQQQ")
MASK = 2**64 - 1
(
    OK,
    BAD_MAGIC,
    BAD_VERSION,
    BAD_PHASE,
    BAD_SOURCE,
    BAD_CONFIG,
    BAD_LAYOUT,
    BAD_STEP,
    BAD_CHUNK,
    BAD_PAYLOAD_BYTES,
    BAD_CHECKSUM,
    CORRUPT_PAYLOAD,
    LOCAL_FAILURE,
    PEER_TROUBLE,
) = range(14)
BAD_LOSS_SCALE = 15
# The order of the checks.
CHECKS = (
    (BAD_MAGIC, "magic"),
    (BAD_VERSION, "wire_version"),
    (BAD_PHASE, "phase"),
    (BAD_SOURCE, "source_rank"),
    (BAD_CONFIG, "config_hash"),
    (BAD_LAYOUT, "layout_hash"),
    (BAD_STEP, "step"),
    (BAD_CHUNK, "chunk"),
    (BAD_PAYLOAD_BYTES, "payload_bytes"),
    (PEER_TROUBLE, "status"),
)


@dataclasses.dataclass(frozen=True)
class Fault:
    status: int
    phase: int
    rank: int
    chunk: int
    expected: int = 0
    received: int = 0


def write(header: Header, payload: np.ndarray) -> bytes:
    """A message whose `header` lacks only what follows from the payload."""
    full = dataclasses.replace(header, payload_bytes=len(payload), checksum=word_sum(payload))
    return full.pack() + payload.tobytes()


def check(message: bytes, wanted: Header) -> tuple[Fault | None, np.ndarray]:
    """The fault of a message, and its payload. `wanted`: but for its checksum."""
    found = Header.unpack(message)
    payload = np.frombuffer(message, np.uint8)[HEADER.size : HEADER.size + wanted.payload_bytes]

    def fault(status: int, expected: int, received: int) -> Fault:
        return Fault(status, wanted.phase, wanted.source_rank, wanted.chunk, expected, received)

    for status, field in CHECKS:
        if getattr(found, field) != getattr(wanted, field):
            return fault(status, getattr(wanted, field), getattr(found, field)), payload
    if found.checksum != word_sum(payload):
        return fault(BAD_CHECKSUM, found.checksum, word_sum(payload)), payload
    return None, payload


def map_bytes(num_parameters: int) -> int:
    return -(-num_parameters // 8) * 8


def _checksum(record: bytes) -> int:
    """Of a commit and its map, which counts as if it followed the first 56 bytes."""
    return word_sum(np.frombuffer(record[:56] + record[64:], np.uint8))


def write_commit(
    rank: int,
    step: int,
    bucket: int,
    fault: Fault | None,
    used: Sequence[int],
    loss_scale: float = 0.0,
) -> bytes:
    """`used`: by parameter of the bucket; empty: there is no map. `loss_scale`: 0.0: none."""
    failed = (0, 0, 0, 0, int(np.float32(loss_scale).view(np.uint32)))
    if fault:
        failed = (fault.chunk & 0xFFFFFFFF, fault.phase, fault.rank, fault.expected, fault.received)
    status = fault.status if fault else OK
    head = (MAGIC, WIRE_VERSION, COMMIT, status, rank, step, bucket, *failed)
    used_map = bytes(used).ljust(map_bytes(len(used)), b"\0")
    record = RECORD.pack(*head, 0) + used_map
    return RECORD.pack(*head, _checksum(record)) + used_map


def outcome(
    records: Sequence[bytes], rank: int, step: int, bucket: int
) -> tuple[int, Fault | None]:
    """Who reports the fault of a bucket, and the fault; without a GradScaler."""
    fields = [RECORD.unpack_from(record) for record in records]
    for source, (record, values) in enumerate(zip(records, fields, strict=True)):
        for status, wanted, came in (
            (BAD_MAGIC, MAGIC, values[0]),
            (BAD_VERSION, WIRE_VERSION, values[1]),
            (BAD_PHASE, COMMIT, values[2]),
            (BAD_SOURCE, source, values[4]),
            (BAD_CHECKSUM, _checksum(record), values[12]),
        ):
            if wanted != came:
                return rank, Fault(status, COMMIT, source, bucket, wanted, came)
    for echoes in (False, True):
        for source, values in enumerate(fields):
            if values[3] != OK and (values[3] == PEER_TROUBLE) == echoes:
                chunk, phase, failed_rank, expected, received = values[7:12]
                return source, Fault(values[3], phase, failed_rank, chunk, expected, received)
    for source, values in enumerate(fields):
        for status, wanted, came in ((BAD_STEP, step, values[5]), (BAD_CHUNK, bucket, values[6])):
            if wanted != came:
                return rank, Fault(status, COMMIT, source, bucket, wanted, came)
    for source, values in enumerate(fields):
        if values[11] != 0:
            return source, Fault(BAD_LOSS_SCALE, COMMIT, source, bucket, 0, values[11])
    return rank, None


def used_by_any(records: Sequence[bytes], num_parameters: int) -> list[bool]:
    return [any(record[64 + i] for record in records) for i in range(num_parameters)]


def _mix(state: int, word: int) -> int:
    x = (state ^ word) * 0x9E3779B97F4A7C15 & MASK
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
