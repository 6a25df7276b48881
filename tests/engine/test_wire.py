"""What travels: exactly the bytes of the documented formula, and nothing damaged is accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from reference import Layout, wire_bytes_per_step
from scenario import ChosenGradients, Scenario, Weight, train
from torch.nn.parallel import DistributedDataParallel
from world import World

WEIGHTS = (
    Weight("embedding", (300, 200)),
    Weight("bias", (70,)),
    Weight("hidden", (500, 613)),
    Weight("one", (1,)),
    Weight("empty", (0, 3)),
    Weight("output", (129, 401)),
)


def formula(scenario: Scenario, buckets: list[list[list[str]]], rank: int) -> int:
    layout = Layout(
        [w.describe() for w in scenario.weights],
        scenario.codec,
        scenario.world_size,
        scenario.rules,
        scenario.options.get("warmup", "exact"),
    )
    warmup_steps = scenario.options.get("warmup_steps", 0)
    unused = scenario.ddp.get("find_unused_parameters", False)
    number = {weight.name: index for index, weight in enumerate(scenario.weights)}
    return sum(
        wire_bytes_per_step(
            layout.in_warmup() if index < warmup_steps else layout,
            [[number[name] for name in b] for b in step],
            rank,
            find_unused_parameters=unused,
        )
        for index, step in enumerate(buckets)
    )


@pytest.mark.torch_core
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("codec", ["exact", "bf16", "q4", "topk"])
def test_wire_bytes_equal_the_formula(
    worlds: Callable[[int], World], world_size: int, codec: str
) -> None:
    scenario = Scenario(WEIGHTS, world_size, steps=3, codec=codec, ddp={"bucket_cap_mb": 0.5})
    answers = worlds(world_size).run(train, scenario=scenario)
    for rank, answer in enumerate(answers):
        # exact needs several chunks per bucket, q4 and bf16 several buckets per step.
        assert len(answer["buckets"][-1]) > 1
        assert answer["stats"]["wire_bytes"] == formula(scenario, answer["buckets"], rank)


@pytest.mark.parametrize(
    ("codec", "warmup"),
    [("sign1", "q8"), ("topk", "exact"), ("q4", "topk:ratio=0.25")],
)
def test_wire_bytes_equal_the_formula_in_warmup_steps(
    world_of_3: World, codec: str, warmup: str
) -> None:
    options = {"warmup_steps": 2, "warmup": warmup}
    ddp = {"bucket_cap_mb": 0.5}
    sent = []
    for steps in (2, 4):  # owners are those of the steps to come, and chunks are others
        scenario = Scenario(WEIGHTS, 3, steps=steps, codec=codec, options=options, ddp=ddp)
        answers = world_of_3.run(train, scenario=scenario)
        for rank, answer in enumerate(answers):
            expected = formula(scenario, answer["buckets"], rank)
            assert answer["stats"]["wire_bytes"] == expected
        sent.append(expected)
    assert sent[1] - sent[0] < sent[0]


def case_predicted(hook: str) -> list[tuple[int, int]]:
    """Bytes sent in every step after DDP has arranged its buckets, and what the tools predict."""
    from gradferry_lab.workloads.hooks import apply_hook

    scenario = Scenario(WEIGHTS)
    ddp = DistributedDataParallel(ChosenGradients(scenario), bucket_cap_mb=0.5)
    handle = apply_hook(ddp, hook)
    sent, predicted = [0], []
    for step in range(6):
        gradients = [scenario.gradient(step, 0, 0, index) for index in range(len(WEIGHTS))]
        flat = zip(WEIGHTS, gradients, strict=True)
        ddp({weight.name: weight.from_flat(gradient) for weight, gradient in flat}).backward()
        sent.append(handle.wire_bytes(step + 1))
        predicted.append((sent[-1] - sent[-2], handle.formula_bytes()))
        assert handle.bytes_to_other_hosts([0, 0]) == [0, 0]
    return predicted[3:]


@pytest.mark.parametrize("warmup", ["exact", "q8"])
def test_tools_predict_the_bytes_of_warmup_steps(world_of_2: World, warmup: str) -> None:
    hook = f"topk+warmup_steps=4+warmup={warmup}"
    for predictions in world_of_2.run(case_predicted, hook=hook):
        assert [sent for sent, _ in predictions] == [formula for _, formula in predictions]
        assert predictions[0][0] > 4 * predictions[1][0]


def test_wire_bytes_equal_the_formula_with_rules_and_one_bucket(world_of_3: World) -> None:
    scenario = Scenario(WEIGHTS, 3, rules=(("hid*", "exact"), ("one", "q4")))
    answers = world_of_3.run(train, scenario=scenario)
    for rank, answer in enumerate(answers):
        assert answer["stats"]["wire_bytes"] == formula(scenario, answer["buckets"], rank)


@pytest.mark.parametrize("cap", [0.5, 100])
def test_wire_bytes_equal_the_formula_with_maps_of_used_parameters(
    world_of_3: World, cap: float
) -> None:
    # 9 parameters: maps of 8 bytes, and one of 16 where they share a bucket.
    weights = (*WEIGHTS, *(Weight(f"small{i}", (9,)) for i in range(3)))
    ddp = {"bucket_cap_mb": cap, "find_unused_parameters": True}
    scenario = Scenario(weights, 3, steps=2, ddp=ddp)
    for rank, answer in enumerate(world_of_3.run(train, scenario=scenario)):
        assert answer["stats"]["wire_bytes"] == formula(scenario, answer["buckets"], rank)


def test_q4_sends_less_than_a_seventh_of_what_the_gradients_weigh(world_of_2: World) -> None:
    scenario = Scenario((Weight("hidden", (1024, 512)),), 2)
    stats = world_of_2.run(train, scenario=scenario)[0]["stats"]
    # Two ranks: half of the tiles out, half of the results back. 32 / 4.28 = 7.47.
    assert stats["gradient_bytes"] > 7.4 * stats["wire_bytes"]
