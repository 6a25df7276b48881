"""What travels: exactly the bytes of the documented formula, in every exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from mixed import NODES
from scenario import ChosenGradients, Run, Scenario, Weight, bytes_sent, train
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


def row(name: str, *marks: Any, nodes: str | None = None, **changes: Any) -> Any:
    if nodes:
        changes |= {"nodes": NODES[nodes], "world_size": sum(map(len, NODES[nodes]))}
    return pytest.param(dataclasses.replace(SCENARIO, **changes), id=name, marks=marks)


def warming_up(warmup: str) -> dict[str, Any]:
    # Owners are those of the steps to come, and chunks are others.
    return {"options": {"warmup_steps": 2, "warmup": warmup}, "steps": 4}


MAPS = {"bucket_cap_mb": 0.5, "find_unused_parameters": True}
CORE = pytest.mark.torch_core


@pytest.mark.parametrize(
    "scenario",
    [
        # exact needs several chunks per bucket, q4 and bf16 several buckets per step.
        row("exact", CORE, codec="exact"),
        row("q4", CORE, world_size=2),
        row("bf16", CORE, codec="bf16", world_size=2),
        row("topk", CORE, codec="topk"),
        row("alone", CORE, world_size=1),
        row("sign1 after q8", codec="sign1", **warming_up("q8")),
        row("topk after exact", codec="topk", **warming_up("exact")),
        row("q4 after topk", **warming_up("topk:ratio=0.25")),
        row("rules, one bucket", rules=(("hid*", "exact"), ("one", "q4")), ddp={}),
        row("maps", weights=NINE, ddp=MAPS),
        row("map of one bucket", weights=NINE, ddp={**MAPS, "bucket_cap_mb": 100}),
        row("2x2", nodes="2x2", weights=LARGE, ddp={"bucket_cap_mb": 4}),
        row("2+1, maps", nodes="2+1", weights=LARGE, ddp={**MAPS, "bucket_cap_mb": 4}),
        row("1x4", nodes="1x4", weights=WEIGHTS),
    ],
)
def test_bytes_equal_the_formula(worlds: Worlds, scenario: Scenario) -> None:
    answers = worlds(scenario.world_size).run(train, scenario=scenario)
    for rank, answer in enumerate(answers):
        stats = answer["stats"]
        counted = stats["wire_bytes"], stats["local_bytes"]
        assert counted == bytes_sent(scenario, answer["buckets"], rank)
        assert (stats["wire_bytes"] > 0) == (len(scenario.nodes or answers) > 1)
        if scenario.codec == "exact" or scenario.weights == LARGE:
            assert stats["chunks"] > stats["buckets"]


def test_q4_sends_less_than_a_seventh_of_what_the_gradients_weigh(world_of_2: World) -> None:
    scenario = Scenario((Weight("hidden", (1024, 512)),), 2, steps=1)
    stats = world_of_2.run(train, scenario=scenario)[0]["stats"]
    # Two ranks: half of the tiles out, half of the results back. 32 / 4.28 = 7.47.
    assert stats["gradient_bytes"] > 7.4 * stats["wire_bytes"]


def case_compared(scenario: Scenario) -> list[dict[str, int]]:
    """Bytes of ranks that do not compare parameters, and of ranks that do."""
    counted = []
    for every in (0, 1):
        run = Run(dataclasses.replace(scenario, options={"check_every": every}))
        for step in range(3):
            run.step(step)
        counted.append(dict(run.state.stats()))
    return counted


def test_comparing_parameters_counts_where_bytes_go(world_of_3: World) -> None:
    scenario = Scenario((Weight("first", (96, 130)), Weight("bias", (130,))), 3, nodes=NODES["2+1"])
    # In two of three steps: a header, and 8 bytes per parameter.
    message = 2 * (64 + 8 * 2)
    for rank, (without, compared) in enumerate(world_of_3.run(case_compared, scenario=scenario)):
        more = [compared[key] - without[key] for key in ("wire_bytes", "local_bytes")]
        assert more == ([message, message] if rank < 2 else [2 * message, 0])


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
