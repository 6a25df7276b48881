"""Memory stays where it is after warm-up: in the process, and in the engine's own count."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
from scenario import Run, Scenario, Weight
from world import World

WEIGHTS = (Weight("first", (300, 200)), Weight("bias", (200,)), Weight("last", (200, 150)))
WARM_UP, WINDOW, WINDOWS = 100, 50, 4


def anonymous_bytes() -> int:
    """Memory of this process that is not a file's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def case_grow(native: bool) -> tuple[list[int], list[int]]:
    """Bytes gained in each window of steps, and the engine's allocations after every step."""
    run = Run(Scenario(WEIGHTS, native=native, ddp={"bucket_cap_mb": 0.1}))
    allocations, sizes = [], []
    for step in range(WARM_UP + WINDOW * WINDOWS + 1):
        if step >= WARM_UP and (step - WARM_UP) % WINDOW == 0:
            gc.collect()
            sizes.append(anonymous_bytes())
        run.step(step)
        allocations.append(run.state.stats()["workspace_allocations"])
    return [after - before for before, after in itertools.pairwise(sizes)], allocations


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_no_growth_over_200_steps(world_of_2: World, native: bool) -> None:
    for growth, allocations in world_of_2.run(case_grow, native=native):
        assert len(set(allocations[3:])) == 1
        # What leaks does so in every window; the allocator, filling up one arena per thread, does
        # not. Least to leak with every step: the smaller weight's q4 payload of 16 kB, or half.
        assert min(growth) < WINDOW * 16_000 / 2, growth
