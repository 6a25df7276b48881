"""join() with what gradferry cannot do: refused by all ranks at once, never ignored."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from outcomes import Outcome, attempt
from scenario import ChosenGradients, Scenario, Weight, attach
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
