"""What travels where buckets have several chunks or maps: the bytes of the documented formula. Of
small models tests/hook/test_scenarios.py compares them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from mixed import scenario_on
from scenario import ChosenGradients, Scenario, Weight, bytes_sent, train
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (
    Weight("embedding", (300, 200)),
    Weight("bias", (70,)),
    Weight("hidden", (500, 613)),
    Weight("one", (1,)),
    Weight("empty", (0, 3)),
    Weight("output", (129, 401)),
)
# Maps of 9 parameters have 8 bytes per bucket, and 16 where all share one.
NINE = (*WEIGHTS, *(Weight(f"small{i}", (9,)) for i in range(3)))
# A rail of two has more than a chunk's most bytes of gradient in the first.
LARGE = (Weight("large", (1100, 1000)), *WEIGHTS)
SCENARIO = Scenario(WEIGHTS, 3, steps=2, ddp={"bucket_cap_mb": 0.5})


MAPS = {"bucket_cap_mb": 0.5, "find_unused_parameters": True}
TWO_LEVELS = dataclasses.replace(SCENARIO, weights=LARGE, ddp={"bucket_cap_mb": 4})


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            dataclasses.replace(SCENARIO, codec="exact"), id="exact", marks=pytest.mark.torch_core
        ),
        pytest.param(dataclasses.replace(SCENARIO, weights=NINE, ddp=MAPS), id="maps"),
        pytest.param(
            dataclasses.replace(SCENARIO, weights=NINE, ddp={**MAPS, "bucket_cap_mb": 100}),
            id="map of one bucket",
        ),
        pytest.param(scenario_on("2x2", TWO_LEVELS), id="2x2"),
        pytest.param(
            scenario_on("2+1", TWO_LEVELS, ddp={**MAPS, "bucket_cap_mb": 4}), id="2+1, maps"
        ),
    ],
)
def test_bytes_equal_the_formula(worlds: Worlds, scenario: Scenario) -> None:
    answers = worlds(scenario.world_size).run(train, scenario=scenario)
    for rank, answer in enumerate(answers):
        stats = answer["stats"]
        counted = stats["wire_bytes"], stats["local_bytes"]
        assert counted == bytes_sent(scenario, answer["buckets"], rank)
        if scenario.codec == "exact" or scenario.weights == LARGE:
            assert stats["chunks"] > stats["buckets"]


def case_predicted(hook: str) -> list[tuple[int, int]]:
    """Bytes sent in every step after DDP has arranged its buckets, and what the tools predict."""
    from gradferry_lab.workloads.hooks import apply_hook

    ddp = DistributedDataParallel(ChosenGradients(SCENARIO), bucket_cap_mb=0.5)
    handle = apply_hook(ddp, hook)
    sent, predicted = [0], []
    for step in range(5):
        gradients = [SCENARIO.gradient(step, 0, 0, index) for index in range(len(WEIGHTS))]
        flat = zip(WEIGHTS, gradients, strict=True)
        ddp({weight.name: weight.from_flat(gradient) for weight, gradient in flat}).backward()
        sent.append(handle.wire_bytes(step + 1))
        predicted.append((sent[-1] - sent[-2], handle.formula_bytes()))
        assert handle.bytes_to_other_hosts([0, 0]) == [0, 0]
    return predicted[2:]


@pytest.mark.parametrize("warmup", ["exact", "q8"])
def test_tools_predict_the_bytes_of_warmup_steps(world_of_2: World, warmup: str) -> None:
    hook = f"topk+warmup_steps=3+warmup={warmup}"
    for predictions in world_of_2.run(case_predicted, hook=hook):
        assert [sent for sent, _ in predictions] == [formula for _, formula in predictions]
        assert predictions[0][0] > 4 * predictions[1][0]
