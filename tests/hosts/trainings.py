"""What the trainings of all trainers have in common: jobs, data, and what their ends are."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from resumable import fingerprints
from torch import nn
from world import World, WorldError

STEPS, SAVE_AT, DIE_AT = 8, 4, 6
SECONDS = 240.0  # transformers takes long to import on a machine that does much else


@dataclasses.dataclass(frozen=True)
class Job:
    """Arguments of a training.

    Attributes:
        folder: for checkpoints and logs.
        codec: and the options of `gradferry.attach`.
        resume: from the checkpoint in the folder.
        die_at: all ranks kill themselves before this step.
    """

    folder: str
    codec: str
    options: dict[str, Any]
    resume: bool = False
    die_at: int | None = None

    def expect_alive(self, step: int) -> None:
        if step == self.die_at:
            dist.barrier()  # so that every rank has done the steps before
            os.kill(os.getpid(), signal.SIGKILL)


CODECS = {"q4": ("q4", {}), "sign1": ("sign1", {"momentum": 0.8})}


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """The variables that a launcher would have set, for the ranks of a world."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update(names, NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    try:
        yield
    finally:
        for name in (*names, "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a step, and of this rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(8, 64, generator=generator), torch.randn(8, 16, generator=generator)


def end(model: nn.Module, optimizer: Any, state: Any, losses: dict[int, float]) -> dict[str, Any]:
    """What two trainings that are the same have in common."""
    assert not state.passes_through
    return {
        "parameters": dict(fingerprints(model.state_dict())),
        "optimizer": dict(fingerprints(optimizer.state_dict())),
        "withheld": dict(fingerprints(state.state_dict())),
        "losses": {step: float(loss).hex() for step, loss in losses.items()},
    }


def expect_same_end(
    world: World, train: Callable[..., dict[str, Any]], folder: Path, codec: str
) -> None:
    """Kills a training, resumes it, and compares it with one that nobody interrupted."""
    name, options = CODECS[codec]
    job = Job(str(folder / "whole"), name, options)
    whole = world.run(train, seconds=SECONDS, job=job)
    killed = dataclasses.replace(job, folder=str(folder / "killed"), die_at=DIE_AT)
    with pytest.raises(WorldError, match=r"rank 0: process ended with code -9"):
        world.run(train, seconds=SECONDS, job=killed)
    resumed = dataclasses.replace(killed, die_at=None, resume=True)
    for rank, got in enumerate(world.run(train, seconds=SECONDS, job=resumed)):
        losses = got.pop("losses")
        assert list(losses) == list(range(SAVE_AT, STEPS))
        assert losses.items() <= whole[rank].pop("losses").items(), rank
        assert got == whole[rank], rank


def logged(folder: Path, name: str) -> dict[int, float]:
    """What TensorBoard's files below the folder hold, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in folder.rglob("events.out.tfevents*"):
        events = EventAccumulator(str(file))
        events.Reload()
        if name in events.Tags()["scalars"]:
            found.update({point.step: point.value for point in events.Scalars(name)})
    return found
