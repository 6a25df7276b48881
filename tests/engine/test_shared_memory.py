"""Memory that another process gives: whatever its kind, size and seals, it is mapped as agreed on,
or refused before it is touched."""

from __future__ import annotations

import fcntl
import os
import tempfile

import pytest
from gradferry import PeerError, StateError, _native
from hypothesis import given, settings
from hypothesis import strategies as st

PAGE = 4096
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
SEALS = (fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SEAL)
SIZES = st.one_of(st.integers(0, 3 * PAGE), st.sampled_from([PAGE, 2 * PAGE, 2 * PAGE + 1]))
OFFSETS = st.one_of(st.integers(0, 3 * PAGE), st.sampled_from([2**31, 2**63, 2**64 - 1]))
QUICK = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def memfd(num_bytes: int, seals: set[int]) -> int:
    descriptor = os.memfd_create("gradferry", os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, sum(seals))
    return descriptor


@QUICK
@given(SIZES, st.one_of(SIZES, OFFSETS, st.none()), st.sets(st.sampled_from(SEALS)))
def test_memory_is_mapped_if_its_size_is_sealed_and_as_agreed_on(
    num_bytes: int, agreed: int | None, seals: set[int]
) -> None:
    agreed = num_bytes if agreed is None else agreed
    right = agreed == num_bytes > 0 and SIZE_SEALS & sum(seals) == SIZE_SEALS
    descriptor = memfd(num_bytes, seals)
    try:
        memory = _native.SharedMemory(descriptor, agreed)
    except PeerError:
        # What cannot be written is refused, too.
        assert not right or fcntl.F_SEAL_WRITE in seals
    else:
        assert right
        memory.part(num_bytes - 1, 1).fill_(7)
        assert os.pread(descriptor, 2, num_bytes - 1) == b"\7"
    finally:
        os.close(descriptor)


@QUICK
@given(OFFSETS, OFFSETS)
def test_part_lies_inside_of_the_memory(offset: int, num_bytes: int) -> None:
    descriptor = memfd(PAGE, {*SEALS[:2]})
    memory = _native.SharedMemory(descriptor, PAGE)
    os.close(descriptor)
    if offset + num_bytes <= PAGE:
        assert memory.part(offset, num_bytes).numel() == num_bytes
    else:
        text = f"^the shared memory has {PAGE} bytes; there are no {num_bytes} at {offset}$"
        with pytest.raises(StateError, match=text):
            memory.part(offset, num_bytes)


def test_what_is_no_memfd_is_refused() -> None:
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        for descriptor in (-1, 10**6, reading, writing, file.fileno()):
            with pytest.raises(PeerError):
                _native.SharedMemory(descriptor, PAGE)
    os.close(reading)
    os.close(writing)
