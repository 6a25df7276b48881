"""The native path never takes the GIL: counted by standing in front of Python's own functions."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scenario import Run, Scenario, Weight
from world import World, thread_names

SOURCE = Path(__file__).with_name("gil_interposer.c")
SCENARIO = Scenario(
    (Weight("first", (200, 100)), Weight("bias", (100,)), Weight("last", (100, 90))),
    ddp={"bucket_cap_mb": 0.05},
)


def python_is_a_shared_library() -> bool:
    return "/libpython" in Path("/proc/self/maps").read_text()


@pytest.fixture(scope="module")
def counting_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Without torch's flight recorder, which asks Python for a stack trace of each collective."""
    if not python_is_a_shared_library():
        pytest.skip("Python is no shared library here: nothing can stand in front of it")
    compiler = shutil.which("cc")
    assert compiler, "building gradferry needs a C compiler, and so does this test"
    library = tmp_path_factory.mktemp("gil") / "gil_interposer.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    world = World(2, environment={"LD_PRELOAD": str(library), "TORCH_FR_BUFFER_SIZE": "0"})
    # The fake device must be known before the first backward pass.
    world.run(case_know_the_fake_device)
    yield world
    world.stop()


def case_know_the_fake_device() -> None:
    import fake_device

    fake_device.group("streamed")


def counted(steps: int, step: Callable[[int], object]) -> dict[str, int]:
    """Acquisitions by name of thread during `steps` steps after the first three."""
    interposer = ctypes.CDLL(None)
    interposer.gil_reset()
    for number in range(3, 3 + steps):
        step(number)
    buffer = ctypes.create_string_buffer(4096)
    interposer.gil_counts(buffer, ctypes.c_size_t(len(buffer)))
    lines = [line.split("\t") for line in buffer.value.decode().splitlines()]
    return {name: int(count) for name, count in lines}


def run_of(**changes: Any) -> Run:
    run = Run(dataclasses.replace(SCENARIO, **changes))
    for step in range(3):
        run.step(step)
    return run


def case_count(native: bool, steps: int) -> tuple[dict[str, int], set[str]]:
    """Acquisitions by name of thread, and the names of all threads."""
    run = run_of(native=native)
    return counted(steps, run.step), set(thread_names())


@pytest.mark.torch_core
def test_native_path_takes_the_gil_on_no_thread_but_pythons_own(counting_world: World) -> None:
    for counts, names in counting_world.run(case_count, native=True, steps=20):
        assert "gf-finish" in names
        assert "gf-finish" not in counts, counts
        # Threads started by Python bear the name of the program; gloo's and pools' do not matter
        # as long as none but the program's own thread ever took the GIL.
        main = Path("/proc/self/comm").read_text().strip()
        assert set(counts) <= {main, threading.main_thread().name}, counts


def case_count_on_streams(steps: int) -> tuple[int, int, int]:
    """Acquisitions off the main thread in local passes and in synced ones; collectives of these."""
    run = run_of(device="streamed")
    before = run.state.stats()["chunks"]
    main = Path("/proc/self/comm").read_text().strip()
    counts = []
    for synced in (False, True):
        with contextlib.nullcontext() if synced else run.ddp.no_sync():
            by_name = counted(steps, lambda step: run.ddp(run.targets(step)).backward())
        counts.append(sum(count for name, count in by_name.items() if name != main))
    collectives = 2 * (run.state.stats()["chunks"] - before) + steps  # and a commit per step
    return counts[0], counts[1], collectives


# The thread of autograd takes the GIL for reasons of its own, a little more or less often. One per
# collective would be seen.
def test_native_path_on_streams_takes_the_gil_for_no_collective(counting_world: World) -> None:
    for local, synced, collectives in counting_world.run(case_count_on_streams, steps=20):
        assert collectives >= 60
        assert synced - local < collectives / 2, (local, synced, collectives)


def test_interposer_sees_the_gil_being_taken(counting_world: World) -> None:
    for counts, _ in counting_world.run(case_count, native=False, steps=20):
        assert sum(counts.values()) >= 20, counts
