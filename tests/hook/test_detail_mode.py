"""TORCH_DISTRIBUTED_DEBUG=DETAIL, in which torch wraps every process group: all is as without."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gradferry import _native
from outcomes import Outcome, attempt
from scenario import Run, Scenario, Weight, assert_bit_equal, train
from world import COLLECTIVE_SECONDS, World

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))


@pytest.fixture(scope="module")
def detail_world() -> Iterator[World]:
    world = World(2)
    world.run(case_enter_detail_mode)
    yield world
    world.stop()


def case_enter_detail_mode() -> None:
    """As if the variable had been set from the start: it is read when a group begins."""
    # torch takes the wrapper for a ProcessGroupGloo here and reads beyond its end: whether that
    # crashes is luck, with or without a hook.
    dist.Logger.set_construction_data_and_log = lambda *_: None
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    seconds = timedelta(seconds=COLLECTIVE_SECONDS)
    store = dist.PrefixStore("detail mode", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=seconds)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(backend).__name__ == "_ProcessGroupWrapper"


def case_train(scenarios: list[Scenario]) -> list[dict[str, Any]]:
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    return [train(scenario) for scenario in scenarios]


@pytest.mark.torch_core
def test_gradients_equal_reference(detail_world: World) -> None:
    scenarios = [
        Scenario(WEIGHTS, error_feedback="both", native=native, unused=unused, ddp=ddp)
        for native in (True, False)
        for unused, ddp in (
            ({}, {"bucket_cap_mb": 0.02}),
            ({}, {"static_graph": True}),
            ({0: ("bias",)}, {"find_unused_parameters": True, "bucket_cap_mb": 0.02}),
        )
    ]
    answers = detail_world.run(case_train, scenarios=scenarios)
    for index, scenario in enumerate(scenarios):
        assert_bit_equal([answer[index] for answer in answers], scenario)


def case_lanes_and_errors() -> tuple[float, list[Outcome]]:
    from gradferry.core.engine import lanes_between_all, make_lanes

    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    with mock.patch.object(_native, "connect_lanes", wraps=_native.connect_lanes) as connect:
        group = dist.group.WORLD
        make_lanes(group, "test of detail mode", lanes_between_all(group, 1))
    timeout = connect.call_args.kwargs["timeout_seconds"]
    seed = dist.get_rank()
    differ = attempt(lambda: Run(Scenario(WEIGHTS, options={"seed": seed})))
    poisoned = Run(
        Scenario(WEIGHTS, poison={(0, 1, "first"): float("nan")}, options={"nonfinite": "raise"})
    )
    return timeout, [differ, attempt(lambda: poisoned.step(0))]


def test_timeout_and_errors_are_as_without(detail_world: World) -> None:
    for timeout, (differ, poisoned) in detail_world.run(case_lanes_and_errors):
        assert timeout == COLLECTIVE_SECONDS
        assert differ.error == "RankMismatchError"
        assert "rank 1 differs from rank 0 in seed: 1 instead of 0" in differ.text
        assert poisoned.error == "StateError"
        assert "the averaged gradient of 'first' is not finite at step 0" in poisoned.text
