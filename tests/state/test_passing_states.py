"""States of trainings whose gradients pass through, such as under GRADFERRY_DISABLE=1: they hold
nothing withheld. And states that are loaded there."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from reducing import make_reducer, reduce
from scenario import Run, Scenario, Weight
from sharded_training import Training
from sharding import Sharding
from world import World

WEIGHTS = (Weight("wide", (70, 64)), Weight("bias", (67,)))
OPTIONS: dict[str, dict[str, Any]] = {
    "q4": {},
    "q8": {"codec": "q8"},
    "exact": {"codec": "exact"},
    "auto": {"codec": "auto"},
    "momentum": {"codec": "sign1", "options": {"momentum": 0.9}},
    "warm-up": {
        "codec": "sign1",
        "options": {"momentum": 0.9, "warmup_steps": 5, "warmup": "q4"},
    },
    "two levels": {"nodes": ((0,), (1, 2))},
}
STEPS = 3


class Trained:
    """What a training of one kind saves and loads."""

    def __init__(self, kind: str, scenario: Scenario, *, disabled: bool) -> None:
        disable = {"GRADFERRY_DISABLE": str(int(disabled))}
        with mock.patch.dict(os.environ, disable), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of momentum, which will not come
            if kind == "hook":
                self.run = Run(scenario)
                self.state, self.step = self.run.state, self.run.step
            elif kind == "reducer":
                self.state = make_reducer(scenario)
                self.step = lambda step: reduce(scenario, self.state, range(step, step + 1))
            else:
                sharding = Sharding(dist.get_world_size(), 1)
                training = Training(sharding, {"codec": scenario.codec})
                self.state = training.state
                self.step = lambda step: training.train(range(step, step + 1))

    def saved(self) -> dict[str, Any]:
        state = self.state.state_dict()
        return next(iter(state.values())) if "steps" not in state else state


def case_disabled_first(kind: str, scenario: Scenario) -> list[Any]:
    """Loads a state of a disabled training, in every way, and one of a compressed one into it."""
    disabled = Trained(kind, scenario, disabled=True)
    for step in range(STEPS):
        disabled.step(step)
    steps = [disabled.state.stats()["steps"], disabled.saved()["steps"]]
    nothing = disabled.state.state_dict()
    caught = []
    for on_resize in ("strict", "mean", "drop"):
        compressed = Trained(kind, scenario, disabled=False)
        compressed.step(0)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            compressed.state.load_state_dict(nothing, on_resize=on_resize)
        caught += [str(warning.message) for warning in seen]
        state = compressed.saved()
        slot = state[f"slot_{dist.get_rank()}"]
        assert not slot["worker"].any()
        assert not slot["owner"].any()
        steps += [state["steps"], compressed.state.stats()["total_steps"]]
        compressed.step(STEPS)
        steps.append(compressed.saved()["steps"])
    again = Trained(kind, scenario, disabled=True)
    for state in (nothing, compressed.state.state_dict()):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            again.state.load_state_dict(state)
        caught += [str(warning.message) for warning in seen]
        steps.append(again.saved()["steps"])
    again.step(4)
    return [steps, again.saved()["steps"], caught]


CASES = [("hook", name) for name in OPTIONS] + [("reducer", "q4"), ("shards", "q4")]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_disabled_trainings_save_their_steps_and_nothing_withheld(
    worlds: Any, kind: str, name: str
) -> None:
    size = 3 if name == "two levels" else 2
    scenario = Scenario(WEIGHTS, size, **OPTIONS[name])
    world: World = worlds(size)
    warned = set()
    for steps, after, caught in world.run(case_disabled_first, kind=kind, scenario=scenario):
        assert steps == [3, 3] + [3, 3, 4] * 3 + [3, 4]
        assert after == 5
        assert all("the saved residuals are not used" in text for text in caught)
        warned.add(len(caught))
    # On nodes of other sizes the third rank has no residual.
    assert warned == ({0, 1} if name == "two levels" else {int(name != "exact")})
