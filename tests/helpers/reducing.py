"""Calls of a Reducer with what a Scenario says, for comparison with its reference."""

from __future__ import annotations

from typing import Any

import gradferry
import torch
import torch.distributed as dist
from scenario import Scenario, on_nodes


def place_of(scenario: Scenario) -> tuple[dist.ProcessGroup | None, torch.device]:
    if scenario.device == "cpu":
        return None, torch.device("cpu")
    import fake_device

    return fake_device.group(scenario.device), fake_device.DEVICE


def given(scenario: Scenario, step: int) -> list[torch.Tensor]:
    """This rank's tensors of a step."""
    group, device = place_of(scenario)
    rank = dist.get_rank(group)
    return [
        weight.from_flat(scenario.gradient(step, 0, rank, index)).to(device)
        for index, weight in enumerate(scenario.weights)
    ]


def make_reducer(scenario: Scenario, group: dist.ProcessGroup | None = None, **changes: Any) -> Any:
    group = group or place_of(scenario)[0]
    options = {
        "error_feedback": scenario.error_feedback,
        "rules": [{"name": name, "codec": codec} for name, codec in scenario.rules],
        "seed": scenario.seed,
        **({"nodes": 1} if scenario.nodes is not None else {}),
        **scenario.options,
        **changes,
    }
    names = [weight.name for weight in scenario.weights]
    with on_nodes(scenario.nodes):
        named = list(zip(names, given(scenario, 0), strict=True))
        return gradferry.Reducer(named, scenario.codec, group, **options)


def reduce(
    scenario: Scenario, reducer: Any, steps: range, async_op: bool = False
) -> list[list[Any]]:
    """[step][tensor]: the averages, flat."""
    averages = []
    for step in steps:
        tensors = given(scenario, step)
        work = reducer.all_reduce(tensors, async_op)
        if async_op:
            assert work.wait()
            assert work.is_completed()
        averages.append([w.to_flat(t) for w, t in zip(scenario.weights, tensors, strict=True)])
    return averages


def case_reduce(
    scenario: Scenario, async_op: bool = False, **changes: Any
) -> dict[str, Any] | None:
    """As `scenario.train`, without DDP."""
    reducer = make_reducer(scenario, **changes)
    averages = reduce(scenario, reducer, range(scenario.steps), async_op)
    return {
        "gradients": averages,
        "hashes": [],
        "final_hash": "",
        "stats": reducer.stats(),
        "state": reducer.state_dict(),
        "text": str(reducer),
    }
