"""A model that has trained uncompressed before, or that two DistributedDataParallels wrap."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scenario as scenarios
from residual_sums import reference_of
from scenario import Run, Scenario, Weight, assert_bit_equal
from torch.nn.parallel import DistributedDataParallel
from world import World

WEIGHTS = (
    Weight("first", (90, 70)),
    Weight("bias", (50,)),
    Weight("second", (120, 60)),
    Weight("third", (70, 64)),
)
DENSE_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Late(Scenario):
    """Steps below 0 go before the hook is there; step 0 is the first that it sees."""

    def gradient(self, step: int, turn: int, rank: int, index: int) -> np.ndarray:
        return super().gradient(step + DENSE_STEPS, turn, rank, index)


def case_late(variants: list[Late]) -> list[dict[str, Any]]:
    answers = []
    for variant in variants:
        with mock.patch.object(scenarios, "attach"):
            run = Run(variant)
        for step in range(-DENSE_STEPS, 0):
            run.step(step)
        run.hashes.clear()
        run.state = scenarios.attach(run.ddp, variant)
        gradients = [run.step(step) for step in range(variant.steps)]
        answers.append(
            {
                **run.answer(gradients),
                "buckets": run.buckets,
                "seen": (run.state.stats()["buckets"], run.state.stats()["steps"]),
            }
        )
    return answers


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_attach_after_buckets_were_rebuilt(world_of_2: World, native: bool) -> None:
    variants = [
        Late(WEIGHTS, error_feedback="both", native=native, ddp={"bucket_cap_mb": 0.02, **options})
        for options in (
            {},
            {"static_graph": True},
            {"find_unused_parameters": True},
            {"gradient_as_bucket_view": True},
        )
    ]
    answers = world_of_2.run(case_late, variants=variants)
    for index, variant in enumerate(variants):
        own = [answer[index] for answer in answers]
        assert_bit_equal(own, variant)
        for answer in own:
            # Rebuilt before, and never again; but never at all with find_unused_parameters.
            first, *later = answer["buckets"][:DENSE_STEPS], *answer["buckets"][DENSE_STEPS:]
            assert all(buckets == first[-1] for buckets in later)
            rebuilt = "find_unused_parameters" not in variant.ddp
            assert (first[0] != first[-1]) == rebuilt, variant.ddp
            assert answer["seen"] == (variant.steps * len(first[-1]), variant.steps)


def case_two_wrappers(scenario: Scenario) -> dict[str, Any]:
    """Steps in turn through one and the other; each hook has residuals and a count of its own."""
    run = Run(scenario)
    second = DistributedDataParallel(run.model, **scenario.ddp)
    wrappers = [(run.ddp, run.state), (second, scenarios.attach(second, scenario))]
    gradients = []
    for step in range(scenario.steps):
        run.ddp, run.state = wrappers[step % 2]
        gradients.append(run.step(step))
    return {
        "gradients": gradients,
        "hashes": run.hashes,
        "steps": [state.stats()["steps"] for _, state in wrappers],
    }


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_two_wrappers_of_one_module_keep_apart(world_of_2: World, native: bool) -> None:
    scenario = Scenario(
        WEIGHTS, steps=6, error_feedback="both", native=native, ddp={"bucket_cap_mb": 0.02}
    )
    answers = world_of_2.run(case_two_wrappers, scenario=scenario)
    assert answers[0]["hashes"] == answers[1]["hashes"]
    engines = [reference_of(scenario), reference_of(scenario)]
    for step in range(scenario.steps):
        count = range(len(WEIGHTS))
        given = [[scenario.accumulated(step, rank, i) for i in count] for rank in range(2)]
        expected = engines[step % 2].step(given)
        for rank, answer in enumerate(answers):
            assert answer["steps"] == [3, 3]
            got = answer["gradients"][step]
            assert [g.tobytes() for g in got] == [e.tobytes() for e in expected[rank]], step
