"""A row of the table of faults, played: a training in which something happens to one rank.

`case_row` runs on every rank. What a rank sees goes to a file of its own, because the world ends
with a rank that dies. When all have seen it, no rank keeps memory that siblings share.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import gc
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
from fault_rows import FAULTY_STEP, REDUCER, Row
from gradferry.averaging import running
from outcomes import Outcome, attempt
from scenario import LEARNING_RATE, Run, Scenario, expected_gradients, hash_of
from ways import ReducerRun
from world import open_files

SLOW_SECONDS = 2.0
CHILD_SECONDS = 4
SHARED = "memfd:gradferry"
SETTLE_SECONDS = 60.0


def hashes_of(scenario: Scenario, steps: int) -> list[str]:
    """Hashes of the parameters after 0, 1, 2, ... steps, by the reference."""
    parameters = [w.from_flat(torch.zeros(w.num_elements).numpy()) for w in scenario.weights]
    hashes = [hash_of(scenario, parameters)]
    for by_rank in expected_gradients(dataclasses.replace(scenario, steps=steps)):
        for weight, parameter, gradient in zip(
            scenario.weights, parameters, by_rank[0], strict=True
        ):
            parameter -= LEARNING_RATE * weight.from_flat(gradient)
        hashes.append(hash_of(scenario, parameters))
    return hashes


# --- what happens to the victim -------------------------------------------------------------------


class UsersError(Exception):
    """An error of the victim's own code."""


def leave() -> None:
    """Ends as sys.exit() does, but for the interpreter's end, which a forked process has not."""
    atexit._run_exitfuncs()
    os._exit(3)


def fail() -> None:
    raise UsersError("of the user's own code")


def fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_beside_child() -> None:
    """The child, as a DataLoader's worker would, keeps connections open that its parent had."""
    if os.fork() == 0:
        signal.alarm(CHILD_SECONDS)
        signal.pause()
    kill()


# With the GradScaler of the victim.
ACTIONS: dict[str, Callable[[Any], Any]] = {
    "kill": lambda _: kill(),
    "kill beside its child": lambda _: kill_beside_child(),
    "exit": lambda _: leave(),
    "raise": lambda _: fail(),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "slow": lambda _: time.sleep(SLOW_SECONDS),
    "fork": lambda _: fork(),
    # A scale that cannot be: the engine fails before it sends.
    "no scale": lambda scaler: scaler._scale.fill_(0.0),
}


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


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one rank saw.

    Attributes:
        later: what its state says afterwards.
        files: open ones that are more than before; 0 of the victim.
    """

    outcome: Outcome
    later: Outcome
    parameters: str
    files: int

    def write(self, folder: str, rank: int) -> None:
        temporary = Path(folder, f"seen {rank}")
        temporary.write_text(json.dumps(dataclasses.astuple(self)))
        temporary.rename(Path(folder, f"rank {rank}"))

    @classmethod
    def read(cls, folder: Path, rank: int) -> Seen:
        outcome, later, *rest = json.loads(Path(folder, f"rank {rank}").read_text())
        return cls(Outcome(*outcome), Outcome(*later), *rest)


def num_kept(before: int) -> int:
    """How many more files are open than `before`, once engines that end have closed theirs."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: gc.collect() >= 0 and open_files() <= before)
    return max(0, open_files() - before)


def num_shared() -> int:
    """Pieces of memory that ranks of a node share."""
    return Path("/proc/self/maps").read_text().count(SHARED)


def play(row: Row) -> tuple[Seen, Any]:
    """And the run, whose end the others would see."""
    timeout = datetime.timedelta(seconds=row.expected.timeout)
    group = dist.new_group(timeout=timeout)
    is_victim = dist.get_rank() == row.victim
    scenario, scaler = row.scenario, torch.amp.GradScaler("cpu")
    if row.fault == "no scale":
        options = {**scenario.options, "grad_scaler": scaler}
        scenario = dataclasses.replace(scenario, options=options)
    run: Any = (ReducerRun if row.way == REDUCER else Run)(scenario, group)
    for step in range(FAULTY_STEP):
        run.step(step)
    assert (num_shared() > 0) == (scenario.nodes is not None)
    dist.barrier()

    def fault() -> None:
        ACTIONS[row.fault](scaler)

    faulty: Any = contextlib.nullcontext()
    act: Callable[[], Any] = lambda: run.step(FAULTY_STEP)  # noqa: E731
    if row.phase == "attach":
        act = lambda: Run(scenario, group)  # noqa: E731
        faulty = before(running, "start_engine", fault)
    elif row.phase == "between steps":
        faulty = before(run, "step", fault)
        act = lambda: run.step(FAULTY_STEP)  # noqa: E731
    elif is_victim:  # its last bucket is not complete without this gradient
        last = run.model.get_parameter(run.buckets[-1][-1][-1])
        last.register_post_accumulate_grad_hook(lambda _: fault())
    files = open_files()
    with faulty if is_victim else contextlib.nullcontext():
        outcome = attempt(act)
    kept = 0 if is_victim else num_kept(files)
    return Seen(outcome, attempt(run.state.state_dict), run.parameter_hash(), kept), run


def case_row(row: Row, folder: str) -> None:
    rank = dist.get_rank()
    is_victim = rank == row.victim
    if is_victim:
        Path(folder, "pid").write_text(str(os.getpid()))
    seen, run = play(row)
    seen.write(folder, rank)
    survivors = [each for each in range(row.scenario.world_size) if each != row.victim]
    wait_for(lambda: all(Path(folder, f"rank {each}").exists() for each in survivors))
    del run
    wait_for(lambda: gc.collect() >= 0 and not num_shared())
    if row.fault == "stop" and rank == survivors[0]:
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGKILL)  # the world waits for it
    if not row.ends_victim:
        dist.barrier()  # nobody is left alone before all have seen


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
