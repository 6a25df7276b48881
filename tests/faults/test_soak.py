"""The soak: five minutes of it, and that it sees what it looks for."""

from __future__ import annotations

import pytest
import soak
from soak import SoakError, Vitals

MIB = 2**20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_minutes_of_random_trainings_leave_nothing_behind() -> None:
    assert soak.run(seed=1, seconds=300)["trainings"] > 0


def soak_of(sizes: list[int]) -> soak.Soak:
    """One whose only process had these sizes, when arenas were full."""
    one = soak.Soak(seed=0)
    filling = [200 * MIB + number * MIB for number in range(soak.FILLING_SEGMENTS)]
    one.vitals = {(2, 1): [Vitals(size, 10, 10) for size in (*filling, *sizes)]}
    return one


def test_leak_in_every_segment_is_told_from_an_allocator_that_fills_up() -> None:
    noise = [(7 * number) % 5 * MIB for number in range(80)]
    soak_of([200 * MIB + size for size in noise]).check_memory()
    settles = [200 * MIB - 50 * MIB // 2**number for number in range(80)]
    soak_of([size + more for size, more in zip(settles, noise, strict=True)]).check_memory()
    leaks = [soak.LEAST_LEAK_BYTES * number + more for number, more in enumerate(noise)]
    with pytest.raises(SoakError, match="memory of rank 1 of 2 grows"):
        soak_of(leaks).check_memory()
    repeats = soak_of(noise)
    repeats.repeated = {(2, 1): [Vitals(size, 10, 10) for size in leaks]}
    with pytest.raises(SoakError, match="memory of rank 1 of 2 grows"):
        repeats.check_memory()
