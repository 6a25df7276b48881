"""One cell of the matrix of faults: a training in which something happens to one rank.

`case_cell` runs on every rank. What a rank sees goes to a file of its own, because the world ends
with a rank that dies.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from outcomes import Outcome, attempt
from relays import Relays
from scenario import LEARNING_RATE, Run, Scenario, Weight, expected_gradients, hash_of

# Three buckets, of which the last holds a full tile for every rank.
WEIGHTS = (
    Weight("early", (192, 64)),
    Weight("bias", (50,)),
    Weight("middle", (70, 90)),
    Weight("late", (256, 64)),
)
CODECS: dict[str, dict[str, Any]] = {
    "q4": {"codec": "q4"},
    "sign1": {"codec": "sign1", "options": {"momentum": 0.9}},
    "topk": {"codec": "topk:ratio=0.05", "native": False},  # the hook of the standard signature
}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "flat": {"world_size": 3},
    "two levels": {"world_size": 4, "nodes": ((0, 1), (2, 3))},
}
# Further ones, for faults of a rank or its link in the backward pass.
UNEVEN_TOPOLOGIES: dict[str, dict[str, Any]] = {
    "2+1": {"world_size": 3, "nodes": ((0, 1), (2,))},
    "3+1": {"world_size": 4, "nodes": ((0, 1, 2), (3,))},
    "3x2": {"world_size": 6, "nodes": ((0, 1), (2, 3), (4, 5))},
    "3+1+2": {"world_size": 6, "nodes": ((0, 1, 2), (3,), (4, 5))},
}
# Never rank 0, which serves the store: without it nobody can say who is missing. In 2+1 it has
# nothing to do with other nodes; in 3+1 it is alone on its own; in 3+1+2 it exchanges for its node.
VICTIMS = {"flat": 1, "two levels": 3, "2+1": 1, "3+1": 3, "3x2": 3, "3+1+2": 4}
PHASES = ("attach", "backward", "between steps", "save")
SAVED_STEPS, FAULTY_STEP = 2, 3  # the checkpoint of two steps; the step with number 3


@dataclasses.dataclass(frozen=True)
class Cell:
    fault: str
    codec: str
    topology: str
    phase: str
    timeout: float  # seconds, of the process group

    def __str__(self) -> str:
        return f"{self.fault}, {self.phase}, {self.codec}, {self.topology}"

    @property
    def scenario(self) -> Scenario:
        return Scenario(
            WEIGHTS,
            ddp={"bucket_cap_mb": 0.03},
            **CODECS[self.codec],
            **{**TOPOLOGIES, **UNEVEN_TOPOLOGIES}[self.topology],
        )

    @property
    def victim(self) -> int:
        return VICTIMS[self.topology]


def hashes_of(scenario: Scenario, steps: int) -> list[str]:
    """Of the parameters after 0, 1, 2, ... steps, by the reference."""
    parameters = [weight.from_flat(_zeros(weight)) for weight in scenario.weights]
    hashes = [hash_of(scenario, parameters)]
    for by_rank in expected_gradients(dataclasses.replace(scenario, steps=steps)):
        for weight, parameter, gradient in zip(
            scenario.weights, parameters, by_rank[0], strict=True
        ):
            parameter -= LEARNING_RATE * weight.from_flat(gradient)
        hashes.append(hash_of(scenario, parameters))
    return hashes


def _zeros(weight: Weight) -> Any:
    return torch.zeros(weight.num_elements).numpy()


# --- what happens to the victim -------------------------------------------------------------------

SLOW_SECONDS, DOWN_SECONDS = 2.0, 3.0


class UsersError(Exception):
    """Of the victim's own code."""


def leave() -> None:
    """As sys.exit() does, without the end of the interpreter, which a forked process has not."""
    atexit._run_exitfuncs()
    os._exit(3)


def fail() -> None:
    raise UsersError("of the user's own code")


def fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


FAULTS: dict[str, Callable[[Relays], Any]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda _: leave(),
    "raise": lambda _: fail(),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "slow": lambda _: time.sleep(SLOW_SECONDS),
    "fork": lambda _: fork(),
    "corrupt byte": lambda relays: relays.damage("scatter"),
    "truncated": lambda relays: relays.cut("scatter"),
    "link down": lambda relays: relays.hold(),
    "link down 3 s": lambda relays: relays.hold(DOWN_SECONDS),
}
AT_A_LINK = ("corrupt byte", "truncated", "link down", "link down 3 s")


@contextlib.contextmanager
def before(owner: Any, name: str, fault: Callable[[], Any]) -> Iterator[None]:
    """The fault comes before the first call of a function."""
    function, calls = getattr(owner, name), [fault]

    def faulty(*arguments: Any, **options: Any) -> Any:
        while calls:
            calls.pop()()
        return function(*arguments, **options)

    with mock.patch.object(owner, name, faulty):
        yield


# --- what every rank does -------------------------------------------------------------------------


def save(folder: str, run: Run, group: dist.ProcessGroup, steps: int) -> None:
    from gradferry import checkpoint

    content = {"model": run.model.state_dict(), "hook": run.state.state_dict(), "steps": steps}
    checkpoint.save(Path(folder, "checkpoint"), content, group)


def loaded(folder: str, run: Run) -> tuple[int, str]:
    """Steps and parameters of the checkpoint."""
    from gradferry import checkpoint

    content = checkpoint.load(Path(folder, "checkpoint"), run.rank)
    return content["steps"], hash_of(run.scenario, list(content["model"].values()))


def case_cell(cell: Cell, folder: str) -> None:
    from gradferry.reduction import running

    group = dist.new_group(timeout=datetime.timedelta(seconds=cell.timeout))
    is_victim = dist.get_rank() == cell.victim
    if is_victim:
        Path(folder, "pid").write_text(str(os.getpid()))
    relays = Relays()
    with relays.between() if is_victim and cell.fault in AT_A_LINK else contextlib.nullcontext():
        run = Run(cell.scenario, group)
    for step in range(FAULTY_STEP):
        run.step(step)
        if step + 1 == SAVED_STEPS:
            save(folder, run, group, SAVED_STEPS)
    dist.barrier()

    def fault() -> None:
        FAULTS[cell.fault](relays)

    faulty: Any = contextlib.nullcontext()
    if cell.phase == "attach":
        act: Callable[[], Any] = lambda: Run(cell.scenario, group)  # noqa: E731
        faulty = before(running, "start_engine", fault)
    elif cell.phase == "save":
        act = lambda: save(folder, run, group, FAULTY_STEP)  # noqa: E731
        faulty = before(os, "fsync", fault)
    else:
        act = lambda: run.step(FAULTY_STEP)  # noqa: E731
        if cell.phase == "between steps":
            faulty = before(run, "step", fault)
            act = lambda: run.step(FAULTY_STEP)  # noqa: E731
        elif is_victim:  # its last bucket is not complete without this gradient
            last = run.model.get_parameter(run.buckets[-1][-1][-1])
            last.register_post_accumulate_grad_hook(lambda _: fault())
    with faulty if is_victim else contextlib.nullcontext():
        outcome = attempt(act)
    later = attempt(run.state.state_dict)
    steps, saved_hash = loaded(folder, run)
    seen = {
        "outcome": dataclasses.astuple(outcome),
        "later": dataclasses.astuple(later),
        "parameters": run.parameter_hash(),
        "checkpoint": [steps, saved_hash],
    }
    temporary = Path(folder, f"seen {run.rank}")
    temporary.write_text(json.dumps(seen))
    temporary.rename(Path(folder, f"rank {run.rank}"))
    relays.release()
    if cell.fault == "stop" and not is_victim:
        # The world waits for the victim. The last survivor ends it.
        if len(list(Path(folder).glob("rank *"))) == cell.scenario.world_size - 1:
            os.kill(int(Path(folder, "pid").read_text()), signal.SIGKILL)
        return
    if cell.fault not in ("kill", "exit", "stop"):
        dist.barrier()  # nobody is left alone before all have seen


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    outcome: Outcome
    later: Outcome
    parameters: str
    checkpoint: tuple[int, str]

    @classmethod
    def read(cls, folder: Path, rank: int) -> Seen:
        seen = json.loads(Path(folder, f"rank {rank}").read_text())
        return cls(
            Outcome(*seen["outcome"]),
            Outcome(*seen["later"]),
            seen["parameters"],
            tuple(seen["checkpoint"]),
        )
