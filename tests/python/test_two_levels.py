"""The exchange between nodes of several ranks, against the reference, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from scenario import Scenario, Weight, assert_bit_equal, train
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (
    Weight("first", (96, 130)),
    Weight("bias", (130,)),
    Weight("second", (130, 200)),
    Weight("last", (40000,)),
)
TYPES = ("float32", "bfloat16", "float16", "float64", "complex64")
OF_ALL_TYPES = tuple(
    dataclasses.replace(weight, name=f"{weight.name}_{name}", dtype=getattr(torch, name))
    for name in TYPES
    for weight in WEIGHTS[:2]
)
NODES = {
    "2x2": ((0, 1), (2, 3)),
    "interleaved": ((0, 3), (1, 2)),
    "1x4": ((0, 1, 2, 3),),
    "2+1": ((0, 1), (2,)),
    "1+2": ((0,), (1, 2)),
    "3x2": ((0, 1), (2, 3), (4, 5)),
}


def scenario_on(nodes: str, **changes: object) -> Scenario:
    members = NODES[nodes]
    return dataclasses.replace(
        Scenario(WEIGHTS, world_size=sum(map(len, members)), nodes=members), **changes
    )


@pytest.mark.parametrize("nodes", NODES)
def test_two_level_exchange_equals_the_reference(worlds: Worlds, nodes: str) -> None:
    scenario = scenario_on(nodes, error_feedback="both")
    assert_bit_equal(worlds(scenario.world_size).run(train, scenario=scenario), scenario)


@pytest.mark.parametrize(
    "changes",
    [
        *({"codec": codec, "error_feedback": "both"} for codec in ("q8", "rht:bits=3", "bf16")),
        {"codec": "sign1", "options": {"momentum": 0.9, "exact_skip": True}},
        {
            "codec": "topk:ratio=0.05",
            "options": {"momentum": 0.9, "warmup_steps": 2, "warmup": "q8"},
        },
        {"codec": "exact"},
        {"weights": OF_ALL_TYPES, "error_feedback": "both"},
        {"weights": OF_ALL_TYPES, "codec": "exact", "ddp": {"bucket_cap_mb": 0.05}},
        {"weights": OF_ALL_TYPES, "codec": "sign1", "options": {"momentum": 0.9}},
        {"ddp": {"bucket_cap_mb": 0.05}, "error_feedback": "both"},
        {"ddp": {"bucket_cap_mb": 0.2, "gradient_as_bucket_view": True}, "error_feedback": "both"},
        {"poison": {(1, 2, "second"): float("nan"), (2, 0, "last"): float("inf")}},
        {"empty": ((1, 0), (1, 1), (2, 2))},
        {
            "unused": {0: ("second",), 1: ("second",), 2: ("bias",)},
            "ddp": {"find_unused_parameters": True},
            "error_feedback": "both",
        },
        {"options": {"check_every": 2}},
        {"passes": 2, "error_feedback": "both"},
    ],
    ids=lambda changes: " ".join(
        name if name == "weights" else str(value) for name, value in changes.items()
    )[:60],
)
def test_two_level_exchange_keeps_every_promise(worlds: Worlds, changes: dict[str, object]) -> None:
    scenario = scenario_on("2+1", **changes)
    assert_bit_equal(worlds(scenario.world_size).run(train, scenario=scenario), scenario)


def test_one_rank_per_node_is_the_flat_exchange(worlds: Worlds) -> None:
    plain = Scenario(WEIGHTS, world_size=3, error_feedback="both")
    alone = dataclasses.replace(plain, nodes=((0,), (1,), (2,)))
    for flat, nodes in zip(
        *(worlds(3).run(train, scenario=scenario) for scenario in (plain, alone)), strict=True
    ):
        assert flat["final_hash"] == nodes["final_hash"]
        assert flat["stats"]["wire_bytes"] == nodes["stats"]["wire_bytes"]
