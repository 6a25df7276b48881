"""kill -9 at any point, resume from the last checkpoint: the same bits as without."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from world import World, WorldError

STEPS = 12
SAVE_EVERY = 3
FREEZE = 4


@dataclasses.dataclass(frozen=True)
class Job:
    codec: str
    world_size: int
    optimizer: str
    hook: dict[str, Any] = dataclasses.field(default_factory=dict)
    float64: bool = False  # parameters of the second layer


@dataclasses.dataclass(frozen=True)
class Kill:
    """Where a rank kills itself: in backward at a parameter's gradient, in save at a call."""

    rank: int
    step: int
    place: str
    number: int


MOMENTUM = {"momentum": 0.9, "warmup_steps": FREEZE}
JOBS = {
    "q4-W2": Job("q4", 2, "AdamW", {"error_feedback": "both"}),
    "sign1_momentum-W2": Job("sign1", 2, "OneBitAdam", MOMENTUM),
    "sign1_momentum-W3": Job("sign1", 3, "OneBitAdam", MOMENTUM),
    "topk-W3": Job("topk:ratio=0.05", 3, "SGD"),
    "float64-W3": Job("q4", 3, "AdamW", {"error_feedback": "both"}, float64=True),
}
PLACES = ("before backward", "in backward", "after backward", "after step", "save")


def random_kill(seed: int, job: Job) -> Kill:
    rng = random.Random(seed)
    place = PLACES[seed % len(PLACES)]
    step = rng.choice(range(SAVE_EVERY - 1, STEPS, SAVE_EVERY)) if place == "save" else None
    rank = rng.randrange(job.world_size)
    # A rank forces its file to the disk, renames it, forces the folder; rank 0 the manifest, too.
    # From the second save on a rank then removes its old file.
    number = rng.randrange((6 if rank == 0 else 3) + (step is not None and step >= SAVE_EVERY))
    return Kill(rank, rng.randrange(STEPS) if step is None else step, place, number)


class TwoLayers(nn.Module):
    def __init__(self, float64: bool) -> None:
        super().__init__()
        self.first = nn.Linear(48, 70)
        self.second = nn.Linear(70, 50)
        if float64:
            self.second.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh().to(self.second.weight.dtype))


class Training:
    """One rank's training: model, hook, optimizer, schedule."""

    def __init__(self, job: Job) -> None:
        import gradferry
        from gradferry.optim import OneBitAdam

        torch.manual_seed(7)
        self.model = TwoLayers(job.float64)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.01)
        self.state = gradferry.attach(self.ddp, job.codec, **job.hook)
        parameters = self.ddp.parameters()
        if job.optimizer == "OneBitAdam":
            self.optimizer: Any = OneBitAdam(
                parameters, lr=1e-3, freeze_step=FREEZE, state=self.state
            )
        else:
            self.optimizer = getattr(torch.optim, job.optimizer)(parameters, lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.step = 0

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "hook": self.state,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }

    def saved(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self.parts().items()}
        return {**parts, "step": self.step}

    def load(self, saved: dict[str, Any]) -> None:
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])
        self.step = saved["step"]

    def loss(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.step + dist.get_rank())
        x = torch.randn(8, 48, generator=generator)
        return cross_entropy(self.ddp(x), x[:, :50].argmax(1))


def fingerprints(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, digest or text) of every leaf."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from fingerprints(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from fingerprints(item, f"{path}/{index}")
    elif isinstance(value, torch.Tensor):
        data = value.contiguous().numpy().tobytes()
        yield path, f"{value.dtype} {hashlib.blake2b(data, digest_size=8).hexdigest()}"
    else:
        yield path, repr(value)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Executioner:
    """Kills this process at the place that a Kill names, if it is this rank's."""

    def __init__(self, kill: Kill | None, training: Training) -> None:
        self.kill = kill if kill is not None and kill.rank == dist.get_rank() else None
        self.training = training
        if self.kill is not None:
            parameters = list(training.model.parameters())
            victim = parameters[self.kill.number % len(parameters)]
            victim.register_post_accumulate_grad_hook(lambda _: self.reach("in backward"))

    def reach(self, place: str) -> None:
        kill = self.kill
        if kill is not None and (kill.step, kill.place) == (self.training.step, place):
            die()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        calls = 0
        fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

        def counted(call: Callable[..., None]) -> Callable[..., None]:
            def count(*arguments: Any, **options: Any) -> None:
                nonlocal calls
                if self.kill is not None and calls == self.kill.number:
                    self.reach("save")
                calls += 1
                call(*arguments, **options)

            return count

        with (
            mock.patch("os.fsync", counted(fsync)),
            mock.patch("pathlib.Path.replace", counted(replace)),
            mock.patch("pathlib.Path.unlink", counted(unlink)),
        ):
            yield


def case_train(job: Job, folder: str, kill: Kill | None) -> list[tuple[str, str]]:
    """Trains on from the last checkpoint, if there is one; the whole state at the end."""
    from gradferry import checkpoint

    training = Training(job)
    if checkpoint.exists(folder):
        training.load(checkpoint.load(folder))
    executioner = Executioner(kill, training)
    while training.step < STEPS:
        executioner.reach("before backward")
        training.optimizer.zero_grad()
        training.loss().backward()
        executioner.reach("after backward")
        training.optimizer.step()
        training.schedule.step()
        executioner.reach("after step")
        if (training.step + 1) % SAVE_EVERY == 0:
            with executioner.saving():
                checkpoint.save(folder, {**training.saved(), "step": training.step + 1})
        training.step += 1
    return list(fingerprints(training.saved()))


@pytest.fixture(scope="module")
def mortal() -> Iterator[Callable[[int], World]]:
    """Worlds of their own: what is killed here is missed by no other test."""
    started: dict[int, World] = {}

    def get(size: int) -> World:
        return started.setdefault(size, World(size))

    yield get
    for world in started.values():
        world.stop()


@pytest.fixture(scope="module")
def uninterrupted(
    mortal: Callable[[int], World], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[list[tuple[str, str]]]]:
    results: dict[str, list[list[tuple[str, str]]]] = {}

    def get(name: str) -> list[list[tuple[str, str]]]:
        if name not in results:
            folder = str(tmp_path_factory.mktemp(name))
            job = JOBS[name]
            results[name] = mortal(job.world_size).run(
                case_train, job=job, folder=folder, kill=None
            )
        return results[name]

    return get


def check(
    mortal: Callable[[int], World],
    uninterrupted: Callable[[str], list[list[tuple[str, str]]]],
    folder: Path,
    name: str,
    seed: int,
) -> None:
    job = JOBS[name]
    expected = uninterrupted(name)
    kill = random_kill(seed, job)
    world = mortal(job.world_size)
    with pytest.raises(WorldError, match=f"rank {kill.rank}: process ended with code -9"):
        world.run(case_train, job=job, folder=str(folder), kill=kill)
    resumed = world.run(case_train, job=job, folder=str(folder), kill=None)
    for rank, (got, want) in enumerate(zip(resumed, expected, strict=True)):
        assert dict(got) == dict(want), (kill, rank)
        assert any("slot_" in path for path, _ in got)


# Two of the places of a kill, and two jobs.
@pytest.mark.parametrize(
    ("name", "seed"),
    [("sign1_momentum-W2", 1), ("topk-W3", 2)],
)
def test_killed_run_resumes_to_the_same_bits(
    mortal: Any, uninterrupted: Any, tmp_path: Path, name: str, seed: int
) -> None:
    check(mortal, uninterrupted, tmp_path, name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 35))
def test_killed_run_resumes_to_the_same_bits_wherever_it_was_killed(
    mortal: Any, uninterrupted: Any, tmp_path: Path, seed: int
) -> None:
    # Five places and five jobs: every sixth seed pairs them anew.
    name = list(JOBS)[(seed + seed // 5) % len(JOBS)]
    check(mortal, uninterrupted, tmp_path, name, seed)
