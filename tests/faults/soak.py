"""A random workload for hours: does anything grow, hang, or change a bit?

`python tests/faults/soak.py --hours 2`, or `--minutes 5`. Worlds of two, three and four processes
live as long as the run. One segment after another draws a training from the seed: way of
averaging, codec, options, sizes. It is trained as it is and then once more with something in
between, with which it must end in the same bits on every rank:

* reload: saved, dropped, attached again and resumed, in the same processes;
* kill: ranks of other processes are killed at any moment, once or twice, and all are started anew;
* resize: saved, and resumed by another number of ranks, twice;
* attach: dropped and made anew several times.

A step that takes longer than STEP_SECONDS ends the run with the stacks of its threads. After every
segment the processes that live long say how much memory they have, how many open files and how many
threads; after the warm-up none of these may grow. At the end every world repeats one training, in
which memory that grows cannot be that of a training not seen before. A failure prints the command
that draws the same segment again.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import faulthandler
import gc
import itertools
import math
import os
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before anything starts a thread pool, and inherited by every rank.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
# The ring of the last 2000 collectives that torch keeps fills for hundreds of trainings.
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import torch.distributed as dist
from killing import run_until_killed
from resumable import WAYS, Job, Onlooker, Training, case_train, drawn_job
from world import World, WorldError, open_files, thread_names

SIZES = (2, 3, 4)
SEGMENTS = ("reload", "kill", "kill", "resize", "attach")
# Only what hangs takes so long, also on a machine that does much else.
STEP_SECONDS = 240.0
SEGMENT_SECONDS = 480.0
# An engine's thread ends after its owner; what is still there after this long stays.
SETTLE_SECONDS = 60.0
LIMITS = {"seconds": SEGMENT_SECONDS, "step_seconds": STEP_SECONDS}
LOOK_SECONDS = 0.1
# Drawn trainings are of many kinds: it takes so many until the allocator's arenas are full
# (benchmarks/results/soak.json).
FILLING_SEGMENTS = 100
REPEATS = 40


class Watchdog(Onlooker):
    """Ends the process, with the stacks of its threads, if nothing is reached for so long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, _: Training) -> Watchdog:
        return self

    def reach(self, place: str) -> None:
        faulthandler.dump_traceback_later(self.seconds, exit=True)


def case_watched(step_seconds: float, **kwargs: Any) -> dict[str, Any]:
    watchdog = Watchdog(step_seconds)
    watchdog.reach("begin")
    try:
        return case_train(onlooker=watchdog, **kwargs)
    finally:
        faulthandler.cancel_dump_traceback_later()


def case_attach_again(job: Job, times: int, step_seconds: float) -> dict[str, Any]:
    """Attaches several times, sometimes for nothing; what the last training came to."""
    for number in range(times):
        until = job.save_every * (number % 2)
        case_watched(step_seconds, job=job, folder=None, until=until)
        gc.collect()
    return case_watched(step_seconds, job=job, folder=None)


@dataclasses.dataclass(frozen=True)
class Vitals:
    """The size of a process between two segments."""

    anonymous_bytes: int
    open_files: int
    threads: int


def _vitals() -> Vitals:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return Vitals(
        1024 * int(status.split("RssAnon:")[1].split()[0]),
        open_files(),
        sum(1 for _ in Path("/proc/self/task").iterdir()),
    )


def case_vitals(at_rest: list[Vitals] | None) -> Vitals:
    """Vitals of this process, once no engine's thread is left and files and threads are no more
    than they were `at_rest`, by rank; or after SETTLE_SECONDS.
    """
    most = None if at_rest is None else at_rest[dist.get_rank()]
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        now = _vitals()
        settled = not any(name.startswith("gf-") for name in thread_names()) and (
            most is None or (now.open_files <= most.open_files and now.threads <= most.threads)
        )
        if settled or time.monotonic() > deadline:
            return now
        time.sleep(LOOK_SECONDS)


class SoakError(Exception):
    """Something grew, or some bits are not what they must be."""


class Soak:
    """The worlds, and what they have done."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()
        # By size and rank: after the warm-up and every segment, and after every repeat.
        self.vitals: dict[tuple[int, int], list[Vitals]] = {}
        self.repeated: dict[tuple[int, int], list[Vitals]] = {}
        self._living = {size: World(size) for size in SIZES}
        self._mortal = {size: World(size) for size in SIZES}

    def stop(self) -> None:
        for world in (*self._living.values(), *self._mortal.values()):
            world.stop()

    def segment(self, number: int) -> str:
        """Runs a segment. Returns what it was."""
        rng = random.Random(f"{self.seed}/{number}")
        kind, job = rng.choice(SEGMENTS), drawn_job(rng)
        if kind == "resize" and (job.sharded or "nodes" in job.hook):
            kind = "reload"  # a mesh and a number of nodes are for one number of ranks
        described = f"{kind} {job}"
        try:
            with tempfile.TemporaryDirectory(prefix="gradferry_soak_") as folder:
                self._trainings[kind](self, job, folder, rng)
            self.counts[f"segments_{kind}"] += 1
            self._examine(job.world_size)
        except (WorldError, SoakError) as error:
            again = [sys.executable, __file__, "--seed", self.seed, "--first", number]
            raise SoakError(
                f"segment {number}, {described}:\n{error}\n"
                f"Again: {shlex.join(map(str, again))} --segments 1"
            ) from error
        return described

    def _train(self, world: World, job: Job, **kwargs: Any) -> list[dict[str, Any]]:
        answers = world.run(case_watched, job=job, **LIMITS, **kwargs)
        self._count(answers)
        return answers

    def _count(self, answers: list[dict[str, Any]]) -> None:
        self.counts["steps"] += len(answers[0]["losses"])
        self.counts["trainings"] += 1

    def _reload(self, job: Job, folder: str, rng: random.Random) -> None:
        world = self._living[job.world_size]
        expected = self._straight(job)
        self._train(world, job, folder=folder, until=rng.randrange(3, job.steps, 3))
        expect_same(self._train(world, job, folder=folder), expected)

    def _kill(self, job: Job, folder: str, rng: random.Random) -> None:
        begin = time.monotonic()
        expected = self._straight(job)
        seconds = time.monotonic() - begin
        world = self._mortal[job.world_size]
        for _ in range(rng.choice((1, 2))):
            ranks = rng.choice((range(job.world_size), [rng.randrange(job.world_size)]))
            # Twice as long, because it also saves.
            delay = rng.uniform(0, 2 * seconds)
            kwargs = {"job": job, "folder": folder, **LIMITS}
            if run_until_killed(world, delay, ranks, case_watched, **kwargs) is None:
                self.counts["kills"] += 1
                self.counts["killed_ranks"] += len(ranks)
        expect_same(self._train(world, job, folder=folder), expected)

    def _resize(self, job: Job, folder: str, rng: random.Random) -> None:
        others = [size for size in SIZES if size != job.world_size]
        self._train(self._living[job.world_size], job, folder=folder, until=6)
        resized = dataclasses.replace(job, world_size=rng.choice(others))
        world = self._living[resized.world_size]
        once = self._train(world, resized, folder=folder, resized=True, saves=False)
        again = self._train(world, resized, folder=folder, resized=True, saves=False)
        expect_replicas_alike(resized, once)
        expect_same(again, once)
        self.counts["resizes"] += 1
        self._examine(resized.world_size)

    def _attach(self, job: Job, folder: str, rng: random.Random) -> None:
        expected = self._straight(job)
        times = rng.randrange(3, 9)
        answers = self._living[job.world_size].run(
            case_attach_again, job=job, times=times, **LIMITS
        )
        self.counts["attaches"] += times
        self._count(answers)
        expect_same(answers, expected)

    def _straight(self, job: Job) -> list[dict[str, Any]]:
        answers = self._train(self._living[job.world_size], job, folder=None)
        expect_replicas_alike(job, answers)
        return answers

    _trainings: dict[str, Callable[[Any, Job, str, random.Random], None]] = {  # noqa: RUF012
        "reload": _reload,
        "kill": _kill,
        "resize": _resize,
        "attach": _attach,
    }

    def warm_up(self) -> None:
        """Every way in every process: what they need for the first time they keep."""
        for size, world in self._living.items():
            for way in WAYS:
                if size == 4 or not way.startswith("fsdp"):
                    hook = {"error_feedback": "both"}
                    if way == "fsdp scatter":
                        hook = {"scatter_feedback": "worker"}
                    job = Job("q4", size, hook=hook, way=way, width=400, steps=3)
                    with tempfile.TemporaryDirectory(prefix="gradferry_soak_") as folder:
                        self._train(world, job, folder=folder)
            for rank, vitals in enumerate(self._look(size, None)):
                self.vitals[size, rank] = [vitals]

    def _look(self, size: int, at_rest: list[Vitals] | None) -> list[Vitals]:
        return self._living[size].run(case_vitals, at_rest=at_rest, seconds=2 * SETTLE_SECONDS)

    def _examine(self, size: int) -> None:
        """Raises SoakError if processes of a living world keep files or threads."""
        at_rest = [self.vitals[size, rank][0] for rank in range(size)]
        for rank, now in enumerate(self._look(size, at_rest)):
            series = self.vitals[size, rank]
            series.append(now)
            for what in ("open_files", "threads"):
                before, after = getattr(series[0], what), getattr(now, what)
                if after > before:
                    raise SoakError(
                        f"rank {rank} of {size} has {after} {what}, and had {before} after the "
                        "warm-up"
                    )

    def repeat(self) -> None:
        """One and the same training, in every living world."""
        for size, world in self._living.items():
            job = Job("q4", size, hook={"error_feedback": "both"}, width=50, steps=3)
            for _ in range(REPEATS):
                world.run(case_attach_again, job=job, times=1, **LIMITS)
                for rank, vitals in enumerate(self._look(size, None)):
                    self.repeated.setdefault((size, rank), []).append(vitals)

    def check_memory(self) -> None:
        """Raises SoakError if a process grew in every part of the run.

        Not the first of a world: it serves the store, in which torch leaves keys of every group.
        """
        drawn = {each: series[FILLING_SEGMENTS:] for each, series in self.vitals.items()}
        for (size, rank), series in (*drawn.items(), *self.repeated.items()):
            if rank == 0:
                continue
            grown = growth([each.anonymous_bytes for each in series])
            if grown is not None and min(grown) > allowance(len(series)):
                raise SoakError(f"memory of rank {rank} of {size} grows: {grown} bytes per quarter")


# What a leak of one attach would leave in the smallest segment, the worker residual of the
# smallest drawn model's first layer.
LEAST_LEAK_BYTES = 4 * 48 * 50
# So that small models are among them, by which the least is judged.
LEAST_IN_QUARTER = 5


def growth(sizes: list[int]) -> list[int] | None:
    """What the least size of each later quarter of the second half is above that of the one before.

    The second half, since at first caches and the allocator's arenas fill up. The least, since what
    the allocator keeps of a large model is no leak: a later small one is given it. What leaks is in
    the least, too, and in every quarter. None: too few sizes to say.
    """
    later = sizes[len(sizes) // 2 :]
    count = len(later) // 4
    if count < LEAST_IN_QUARTER:
        return None
    floors = [min(later[count * quarter : count * (quarter + 1)]) for quarter in range(4)]
    return [after - before for before, after in itertools.pairwise(floors)]


def allowance(num_sizes: int) -> int:
    """Half of what a leak in every segment would add in a quarter."""
    return num_sizes // 8 * LEAST_LEAK_BYTES // 2


def expect_same(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Raises SoakError unless all state has the same bits, and every loss."""
    for rank, (got, want) in enumerate(zip(answers, expected, strict=True)):
        differing = [path for path in {**want["state"], **got["state"]}
                     if got["state"].get(path) != want["state"].get(path)]  # fmt: skip
        losses = [step for step, loss in got["losses"].items() if loss != want["losses"].get(step)]
        if differing or losses:
            raise SoakError(f"rank {rank} differs in {differing}, and in losses of steps {losses}")


def expect_replicas_alike(job: Job, answers: list[dict[str, Any]]) -> None:
    """Raises SoakError unless ranks that hold the same parameters have the same bits of them."""
    shards = {"fsdp": 2, "fsdp scatter": 4}.get(job.way, 1)
    for rank, answer in enumerate(answers):
        first = answers[rank % shards]["state"]
        differing = [
            path
            for path, value in answer["state"].items()
            if path.startswith(("/model/", "/optimizer/")) and value != first[path]
        ]
        if differing:
            raise SoakError(f"rank {rank} and rank {rank % shards} differ in {differing}")


def run(seed: int, seconds: float, first: int = 0, count: int | None = None) -> Counter[str]:
    """Returns what was done. Raises SoakError."""
    begin = time.monotonic()
    soak, number = Soak(seed), first
    try:
        soak.warm_up()
        while time.monotonic() - begin < seconds and (count is None or number < first + count):
            described = soak.segment(number)
            print(f"{time.monotonic() - begin:.0f} s, segment {number}: {described}", flush=True)
            number += 1
        soak.repeat()
        soak.check_memory()
    finally:
        soak.stop()
        print(f"{time.monotonic() - begin:.0f} s: {dict(soak.counts)}", flush=True)
    return soak.counts


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=None, help="(default: drawn)")
    parser.add_argument("--first", type=int, default=0, help="number of the first segment")
    parser.add_argument("--segments", type=int, default=None, help="how many (default: all)")
    options = parser.parse_args()
    seconds = 3600 * options.hours + 60 * options.minutes or math.inf
    seed = random.randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    try:
        run(seed, seconds, options.first, options.segments)
    except SoakError as failure:
        raise SystemExit(str(failure)) from failure


if __name__ == "__main__":
    main()
