"""The exchange between nodes of several ranks, against the reference, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from scenario import Scenario, Weight, assert_bit_equal, train
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (
    Weight("first", (96, 130)),
    Weight("bias", (130,)),
    Weight("second", (130, 200)),
    Weight("last", (40000,)),
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
