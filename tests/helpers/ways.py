"""Trainings of a Scenario by every way in: `state` is what they save, `step` takes a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from reducing import given, make_reducer, place_of
from scenario import LEARNING_RATE, Run, Scenario, hash_of
from sharded_training import Training
from sharding import Sharding


class ReducerRun:
    """A `Run` with a Reducer in place of DDP and its hook."""

    def __init__(self, scenario: Scenario, group: dist.ProcessGroup | None = None) -> None:
        device = place_of(scenario)[1]
        self.scenario, self.rank = scenario, dist.get_rank(group)
        self.parameters = [torch.zeros_like(each, device=device) for each in given(scenario, 0)]
        buckets = {"bucket_cap_mb": scenario.ddp.get("bucket_cap_mb", 25)}
        self.state = make_reducer(scenario, group, **buckets)

    def step(self, step: int) -> list[np.ndarray]:
        """Returns the averages, flat."""
        averages = given(self.scenario, step)
        self.state.all_reduce(averages)
        for parameter, average in zip(self.parameters, averages, strict=True):
            parameter -= LEARNING_RATE * average
        return [w.to_flat(t) for w, t in zip(self.scenario.weights, averages, strict=True)]

    def parameter_hash(self) -> str:
        return hash_of(self.scenario, self.parameters)


class ShardedRun(Training):
    """Under FSDP2, of a model of its own with the scenario's codec."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(Sharding(dist.get_world_size(), 1), {"codec": scenario.codec})

    def step(self, step: int) -> bytes:
        return self.train(range(step, step + 1))


WAYS: dict[str, Any] = {"hook": Run, "reducer": ReducerRun, "shards": ShardedRun}
