"""join(): what gradferry cannot do is refused by all ranks at once, and the rest works."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from outcomes import Outcome, attempt
from scenario import ChosenGradients, Run, Scenario, Weight, assert_bit_equal, attach, train
from torch.nn.parallel import DistributedDataParallel
from world import World

SCENARIO = Scenario((Weight("first", (40, 40)),))


def case_effective_world_size(native: bool) -> Outcome:
    scenario = Scenario(SCENARIO.weights, native=native)
    ddp = DistributedDataParallel(ChosenGradients(scenario))
    attach(ddp, scenario)

    def train() -> None:
        with ddp.join(divide_by_initial_world_size=False):
            raise AssertionError("join() was entered")

    return attempt(train)


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_join_over_the_effective_world_size_is_refused(world_of_2: World, native: bool) -> None:
    for outcome in world_of_2.run(case_effective_world_size, native=native):
        assert outcome.error == "ConfigError", outcome
        assert "divide_by_initial_world_size" in outcome.text


UNEVEN = Scenario(
    (Weight("first", (40, 40)), Weight("second", (50, 30))),
    error_feedback="both",
    passes=2,
    steps_by_rank=(5, 3),
    ddp={"bucket_cap_mb": 0.005},
)


def case_uneven(scenarios: list[Scenario]) -> list[dict[str, Any]]:
    return [train(scenario) for scenario in scenarios]


def test_uneven_inputs_accumulated_under_no_sync_equal_the_reference(world_of_2: World) -> None:
    scenarios = [UNEVEN, dataclasses.replace(UNEVEN, native=False)]
    answers = world_of_2.run(case_uneven, scenarios=scenarios)
    for index, scenario in enumerate(scenarios):
        assert_bit_equal([answer[index] for answer in answers], scenario)


def case_thrown(scenarios: list[Scenario]) -> list[tuple[Outcome, dict[str, Any]]]:
    return [thrown(scenario) for scenario in scenarios]


def thrown(scenario: Scenario) -> tuple[Outcome, dict[str, Any]]:
    """All ranks leave join() when the first has no more input, and go on together."""
    run, gradients = Run(scenario), []

    def until_the_end() -> None:
        with run.ddp.join(throw_on_early_termination=True):
            for step in range(3 + run.rank):
                gradients.append(run.step(step))

    outcome = attempt(until_the_end)
    gradients += [run.step(step) for step in range(3, scenario.steps)]
    answer = {"hashes": run.hashes, "final_hash": run.parameter_hash()}
    return outcome, {**answer, "gradients": gradients}


def test_training_goes_on_after_an_early_termination(world_of_2: World) -> None:
    scenarios = [
        dataclasses.replace(UNEVEN, passes=passes, steps_by_rank=None, steps=5) for passes in (1, 2)
    ]
    first, second = world_of_2.run(case_thrown, scenarios=scenarios)
    for scenario, (ended, one), (told, other) in zip(scenarios, first, second, strict=True):
        assert ended.error == told.error == "RuntimeError"
        assert ended.text.startswith("Rank 0 exhausted all inputs")
        assert told.text.startswith("Detected at least one rank that exhausted inputs")
        assert_bit_equal([one, other], scenario)


def case_copies() -> bool:
    ddp = DistributedDataParallel(ChosenGradients(SCENARIO))
    attach(ddp, SCENARIO)
    ones = {"first": torch.ones(40, 40)}
    for other in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp)), ddp):
        with other.join():
            other(ones).backward()
        assert other.join_hook().ddp is other
    return True


def test_copies_of_a_model_join_by_themselves(world_of_2: World) -> None:
    assert world_of_2.run(case_copies) == [True, True]
