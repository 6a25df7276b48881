"""The n-th allocation fails on one rank, for every n: an error on all ranks, and nobody hangs or
aborts; parameters stay those of a step that all ranks took.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import fault_rows
import pytest
import torch.distributed as dist
from fault_play import hashes_of
from on_ranks import of_all
from outcomes import attempt
from scenario import ChosenGradients, Run, Scenario, attach
from torch.nn.parallel import DistributedDataParallel
from world import World

SOURCE = Path(__file__).with_name("allocation_interposer.cpp")
VICTIM = 1
PATIENCE = datetime.timedelta(seconds=2)
NEVER = 2**40  # counts, and fails none


@pytest.fixture(scope="module")
def failing_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    compiler = shutil.which("c++")
    assert compiler, "building gradferry needs a C++ compiler, and so does this test"
    library = tmp_path_factory.mktemp("allocations") / "allocation_interposer.so"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-O1", "-o", library, SOURCE]
    subprocess.run(command, check=True)
    world = World(2, environment={"LD_PRELOAD": str(library)})
    yield world
    world.stop()


def fail_allocation(n: int) -> int:
    """On the victim. Returns how many there were since the last call."""
    if dist.get_rank() != VICTIM:
        return 0
    call = ctypes.CDLL(None).fail_allocation
    call.argtypes, call.restype = [ctypes.c_long], ctypes.c_long
    return call(n)


def chosen(number: int, turns: int) -> range:
    """About so many allocations of `number`; 0: all of them."""
    return range(1, number + 1, max(1, number // turns) if turns else 1)


def scenario_of(codec: str) -> Scenario:
    return dataclasses.replace(fault_rows.scenario_of(codec), world_size=2)


def case_attach(codec: str, turns: int, first: int) -> int | None:
    """Has chosen allocations of an attach fail, one in each attempt, from number `first` on.

    Returns where to go on in other processes, if the victim's store found no memory in the middle
    of a reply: torch's client of it reads all later replies wrongly.
    """
    from gradferry.core import rendezvous

    scenario = scenario_of(codec)
    attach(DistributedDataParallel(ChosenGradients(scenario)), scenario)  # what is made once
    ddp = DistributedDataParallel(ChosenGradients(scenario))
    fail_allocation(NEVER)
    attach(DistributedDataParallel(ChosenGradients(scenario)), scenario)
    number = max(of_all(fail_allocation(0)))
    assert number > 50
    for n in chosen(number, turns):
        if n < first:
            continue
        fail_allocation(n)
        with mock.patch.object(rendezvous, "MOST_PATIENCE", PATIENCE):
            outcome = attempt(functools.partial(attach, ddp, scenario))
        reached = max(of_all(fail_allocation(0))) >= n
        outcomes = of_all(outcome)
        errors = {o.error for o in outcomes}
        if errors == {None}:  # it could be done without, or was not allocated again
            ddp = DistributedDataParallel(ChosenGradients(scenario))
            continue
        assert reached
        if outcomes[1 - VICTIM].error is None:
            # It failed when all ranks had agreed and connected: they hear of it in the first step.
            assert outcomes[VICTIM].error is not None, (n, outcomes)
            ddp = DistributedDataParallel(ChosenGradients(scenario))
            continue
        assert None not in errors, (n, outcomes)
        assert f"rank {VICTIM}" in outcomes[1 - VICTIM].headline, (n, outcomes)
        if "the store does not answer" in outcomes[VICTIM].text:
            return n + 1
    return None


def case_step(codec: str, turns: int, hashes: list[str]) -> None:
    """The same in a step."""
    scenario = scenario_of(codec)
    run = Run(scenario)
    for step in range(2):
        run.step(step)
    fail_allocation(NEVER)
    run.step(2)
    number = max(of_all(fail_allocation(0)))
    assert number > 20
    for n in chosen(number, turns):
        run = Run(scenario)
        for step in range(2):
            run.step(step)
        fail_allocation(n)
        outcomes = [attempt(functools.partial(run.step, 2))]
        fail_allocation(0)
        taken = 2 + (outcomes[0].error is None)
        assert run.parameter_hash() == hashes[taken], (n, outcomes)
        # Ranks may learn of it in the next step, where the first that lacks a message waits for it.
        if any(each.error is not None for each in of_all(outcomes[0])):
            if outcomes[0].error is None:
                outcomes.append(attempt(functools.partial(run.step, 3)))
            if dist.get_rank() != VICTIM:
                assert outcomes[-1].error == "PeerError", (n, outcomes)
                assert f"rank {VICTIM}" in outcomes[-1].headline, (n, outcomes)


SOME = pytest.param(2, id="some")
ALL = pytest.param(0, id="all", marks=pytest.mark.slow)
CODECS = [
    "q4",
    pytest.param("sign1", marks=pytest.mark.slow),
    pytest.param("topk", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("turns", [SOME, ALL])
@pytest.mark.parametrize("codec", CODECS)
def test_allocation_that_fails_at_attach_is_one_error_on_all(
    failing_world: World, codec: str, turns: int
) -> None:
    first: int | None = 1
    while first is not None:
        first, _ = failing_world.run(
            case_attach, seconds=500, codec=codec, turns=turns, first=first
        )
        if first is not None:
            failing_world.stop()


@pytest.mark.parametrize("turns", [SOME, ALL])
@pytest.mark.parametrize("codec", CODECS)
def test_allocation_that_fails_in_a_step_ends_all_before_the_optimizer(
    failing_world: World, codec: str, turns: int
) -> None:
    hashes = hashes_of(scenario_of(codec), 3)
    failing_world.run(case_step, seconds=500, codec=codec, turns=turns, hashes=hashes)
