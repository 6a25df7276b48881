"""Collectives of several communicators on one device, which proceed one at a time: NCCL promises no
more. Two levels, with three communicators, must not hang then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from mixed import mixed, scenario_on
from scenario import Scenario, assert_bit_equal
from test_streams import MANY_CHUNKS, case_train
from world import World

Worlds = Callable[[int], World]

# Only collectives that wait for each other take so long.
PATIENCE = 60.0
NOT_LONG = 1.0


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


@contextlib.contextmanager
def one_at_a_time(patience: float) -> Iterator[Any]:
    from fake_device import machine

    machine.set_one_at_a_time(patience)
    try:
        yield machine
    finally:
        machine.synchronize()
        machine.set_one_at_a_time(0)


def case_ordered(scenario: Scenario, seeds: list[int]) -> dict[str, Any] | None:
    """Trains in as many orders of streams; nothing may be unordered, or wait in a circle."""
    with one_at_a_time(PATIENCE):
        return case_train(scenario, seeds)


@pytest.mark.parametrize(
    ("scenario", "num_seeds"),
    [
        pytest.param(scenario_on("2x2", MANY_CHUNKS), 2, id="2x2"),
        pytest.param(
            scenario_on("2+1", mixed(3, device="streamed"), options={"check_every": 2}),
            2,
            id="2+1, check_every",
        ),
        pytest.param(scenario_on("3x2", MANY_CHUNKS), 6, id="3x2", marks=pytest.mark.slow),
    ],
)
def test_two_levels_need_no_collectives_side_by_side(
    worlds: Worlds, scenario: Scenario, num_seeds: int
) -> None:
    answers = worlds(scenario.world_size).run(
        case_ordered, scenario=scenario, seeds=list(range(num_seeds)), seconds=300
    )
    assert_bit_equal(answers, scenario)


def case_unchained(scenario: Scenario, seed: int) -> list[str]:
    """What the device finds where the engine believes that it keeps the order of the host."""
    import torch.distributed as dist
    from gradferry.core import engine
    from scenario import Run
    from test_streams import small_chunks

    with (
        one_at_a_time(NOT_LONG) as machine,
        mock.patch.object(engine, "starts_in_order", return_value=True),
        small_chunks(),
    ):
        machine.set_seed(100 * seed + dist.get_rank())
        run = Run(scenario)
        for step in range(scenario.steps):
            run.step(step)
        machine.synchronize()
        return machine.races()


def test_the_device_sees_two_levels_that_may_hang(worlds: Worlds) -> None:
    """Without a chain devices begin collectives in other orders than the host posts them."""
    scenario = scenario_on("2x2", MANY_CHUNKS)
    found = [
        each
        for seed in range(3)
        for each in worlds(4).run(case_unchained, scenario=scenario, seed=seed, seconds=300)
    ]
    assert all(any("is not ordered with" in race for race in races) for races in found)
    assert any(race.startswith("deadlock") for races in found for race in races)
