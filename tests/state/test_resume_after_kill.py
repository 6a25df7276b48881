"""kill -9 at any point, resume from the last checkpoint: the same bits as without."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gradferry import checkpoint
from killing import Executioner, die, random_place, run_until_killed
from resumable import FREEZE, Job, case_train, drawn_job
from world import World, WorldError, worlds_by_size

SECONDS = 300.0  # for a training, on a machine that does much else
# Two of the places of a kill: the seed draws them.
JOBS = {
    1: Job("sign1", 2, "OneBitAdam", {"momentum": 0.9, "warmup_steps": FREEZE}),
    12: Job("topk:ratio=0.05", 3, "SGD"),
}


@pytest.fixture(scope="module")
def mortal() -> Iterator[Callable[[int], World]]:
    """Worlds of their own: what is killed here is missed by no other test."""
    yield from worlds_by_size()


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a training that nobody interrupted."""

    answers: list[dict[str, Any]]
    seconds: float


@pytest.fixture(scope="module")
def uninterrupted(
    mortal: Callable[[int], World], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Job], Result]:
    results: dict[str, Result] = {}

    def get(name: str, job: Job) -> Result:
        if name not in results:
            world, folder = mortal(job.world_size), str(tmp_path_factory.mktemp(name))
            world.start()
            begin = time.monotonic()
            answers = world.run(case_train, seconds=SECONDS, job=job, folder=folder)
            results[name] = Result(answers, time.monotonic() - begin)
        return results[name]

    return get


def expect_resumed(world: World, job: Job, folder: Path, expected: Result, how: Any) -> None:
    resumed = world.run(case_train, seconds=SECONDS, job=job, folder=str(folder))
    for rank, (got, want) in enumerate(zip(resumed, expected.answers, strict=True)):
        assert got["state"] == want["state"], (how, rank)
        assert got["losses"].items() <= want["losses"].items(), (how, rank)


@pytest.mark.parametrize("seed", JOBS)
def test_killed_run_resumes_to_the_same_bits(
    mortal: Any, uninterrupted: Any, tmp_path: Path, seed: int
) -> None:
    job, rng = JOBS[seed], random.Random(seed)
    expected = uninterrupted(str(seed), job)
    rank = rng.randrange(job.world_size)
    place = random_place(rng, seed, rank, job)
    world = mortal(job.world_size)
    executioner = functools.partial(Executioner, rank=rank, place=place, act=die)
    with pytest.raises(WorldError, match=f"rank {rank}: process ended with code -9"):
        world.run(case_train, job=job, folder=str(tmp_path), onlooker=executioner)
    expect_resumed(world, job, tmp_path, expected, (rank, place))
    assert all(any("slot_" in path for path in each["state"]) for each in expected.answers)


# Each is killed at four moments of its own.
NUM_DRAWN = 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_run_killed_at_any_moment_resumes_to_the_same_bits(
    mortal: Any, uninterrupted: Any, tmp_path: Path, seed: int
) -> None:
    job = drawn_job(random.Random(seed % NUM_DRAWN))
    expected = uninterrupted(f"drawn{seed % NUM_DRAWN}", job)
    rng, world = random.Random(f"kill {seed}"), mortal(job.world_size)
    ranks = rng.choice((range(job.world_size), [rng.randrange(job.world_size)]))
    moment = rng.random() * expected.seconds
    for attempt in itertools.count():
        folder = tmp_path / str(attempt)
        kwargs = {"job": job, "folder": str(folder), "seconds": SECONDS}
        if run_until_killed(world, moment, ranks, case_train, **kwargs) is None:
            break
        moment /= 2  # this time it was quicker
    if checkpoint.exists(folder):
        saved = {content["step"] for content in checkpoint.load_all(folder)}
        assert len(saved) == 1
        assert saved <= set(range(job.save_every, job.steps + 1, job.save_every))
    expect_resumed(world, job, folder, expected, (job, ranks, moment))
