"""kill -9, resume from the last checkpoint: the same bits as without. The soak draws the rest."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
from killing import Executioner, die, random_place
from resumable import FREEZE, Job, case_train
from world import World, WorldError

SECONDS = 300.0  # for a training, on a machine that does much else
# Two of the places of a kill: the seed draws them.
JOBS = {
    1: Job("sign1", 2, "OneBitAdam", {"momentum": 0.9, "warmup_steps": FREEZE}),
    12: Job("topk:ratio=0.05", 3, "AdamW", {"momentum": 0.9}),
}


@pytest.mark.parametrize("seed", JOBS)
def test_killed_run_resumes_to_the_same_bits(tmp_path: Path, seed: int) -> None:
    job, rng = JOBS[seed], random.Random(seed)
    rank = rng.randrange(job.world_size)
    place = random_place(rng, seed, rank, job)
    world = World(job.world_size)  # what is killed here is missed by no other test
    how = {"seconds": SECONDS, "job": job}
    try:
        expected = world.run(case_train, folder=str(tmp_path / "whole"), **how)
        executioner = functools.partial(Executioner, rank=rank, place=place, act=die)
        folder = str(tmp_path / "killed")
        with pytest.raises(WorldError, match=f"rank {rank}: process ended with code -9"):
            world.run(case_train, folder=folder, onlooker=executioner, **how)
        resumed = world.run(case_train, folder=folder, **how)
    finally:
        world.stop()
    for got, want in zip(resumed, expected, strict=True):
        assert got["state"] == want["state"], place
        assert got["losses"].items() <= want["losses"].items(), place
        assert any("slot_" in path for path in want["state"])
