"""Ends of ranks: at a place of a training, or at a moment of the clock, whatever they do then."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from resumable import Job, Onlooker, Training
from world import World, WorldError

PLACES = ("before backward", "in backward", "after backward", "after step", "save")


@dataclasses.dataclass(frozen=True)
class Place:
    """A step, and within it where: in backward at a parameter's gradient, in save at a call."""

    step: int
    name: str
    number: int


def random_place(rng: random.Random, kind: int, rank: int, job: Job) -> Place:
    """kind: whose remainder says which of PLACES."""
    name = PLACES[kind % len(PLACES)]
    saves = range(job.save_every - 1, job.steps, job.save_every)
    step = rng.choice(saves) if name == "save" else rng.randrange(job.steps)
    # A rank forces its file and its folder to the disk; then rank 0 the pointer and its folder,
    # renames it, and forces the folder. It removes drafts: its own, which is gone, and from the
    # second save on that of the save before, too.
    calls = 2 if rank != 0 else 7 + (name == "save" and step >= job.save_every)
    return Place(step, name, rng.randrange(calls))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Executioner(Onlooker):
    """Calls `act` at a place, if this process is that rank."""

    def __init__(
        self, training: Training, rank: int, place: Place, act: Callable[[], None]
    ) -> None:
        self.place = place if rank == dist.get_rank() else None
        self.training = training
        self.act = act
        if self.place is not None:
            parameters = list(training.model.parameters())
            victim = parameters[self.place.number % len(parameters)]
            if training.job.way == "async reducer":
                training.in_flight = lambda: self.reach("in backward")
            else:
                victim.register_post_accumulate_grad_hook(lambda _: self.reach("in backward"))

    def reach(self, place: str) -> None:
        mine = self.place
        if mine is not None and (mine.step, mine.name) == (self.training.step, place):
            self.act()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        calls = 0
        fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

        def counted(call: Callable[..., None]) -> Callable[..., None]:
            def count(*arguments: Any, **options: Any) -> None:
                nonlocal calls
                if self.place is not None and calls == self.place.number:
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


# A launcher that sees a rank end then ends the others, which may wait for it in torch's own calls.
LAUNCHER_SECONDS = 0.5


def run_until_killed(
    world: World, after: float, ranks: Sequence[int], function: Callable[..., Any], **kwargs: Any
) -> list[Any] | None:
    """As `World.run`, with SIGKILL for some ranks `after` so many seconds, and then for the others.

    Returns:
        The results by rank, or None if the kill came first.

    Raises:
        WorldError: a rank fell to something else.
    """
    world.start()
    killed = threading.Event()

    def kill(victims: Sequence[int]) -> None:
        killed.set()
        world.kill(victims)

    timers = [
        threading.Timer(after, kill, (ranks,)),
        threading.Timer(after + LAUNCHER_SECONDS, kill, (range(world.size),)),
    ]
    for timer in timers:
        timer.start()
    try:
        return world.run(function, **kwargs)
    except WorldError as error:
        if not killed.is_set() or "process ended with code -9" not in str(error):
            raise
        return None
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
        if killed.is_set():  # it may have come after the last result
            world.stop()
