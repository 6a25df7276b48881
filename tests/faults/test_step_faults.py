"""A fault in any bucket of a step is one error on all ranks before the optimizer steps."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from outcomes import Outcome, attempt
from scenario import Run, Scenario, Weight
from test_protocol import FORGER, WEIGHTS, WORLD_SIZE, Forger
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World


def a_bucket_per_parameter(tensors: Any, *_: Any) -> tuple[list[list[int]], list[int]]:
    return [[i] for i in range(len(tensors))], [2**20] * len(tensors)


def many_buckets() -> contextlib.AbstractContextManager[Any]:
    """DDP begins with a bucket per parameter, not with one for all."""
    return mock.patch.object(dist, "_compute_bucket_assignment_by_size", a_bucket_per_parameter)


def case_refused(phase: str, wrong: int) -> tuple[Outcome, Outcome, bool] | None:
    scenario = Scenario(WEIGHTS, WORLD_SIZE)
    with many_buckets():
        if dist.get_rank() == FORGER:
            forger = Forger(scenario, phase, {"checksum": 99}, wrong)
            forger.run()
            dist.barrier()  # what it has sent is not lost
            return None
        run = Run(scenario)
    before = run.parameter_hash()
    outcome = attempt(lambda: run.step(0))
    dist.barrier()
    assert [len(bucket) for bucket in run.buckets[0]] == [1, 1, 1]
    return outcome, attempt(run.state.state_dict), run.parameter_hash() == before


@pytest.mark.parametrize("phase", ["scatter", "gather"])
@pytest.mark.parametrize("wrong", [0, 1, 2], ids=["first", "middle", "last"])
def test_chunk_refused_in_any_bucket_is_one_error_on_all_ranks_before_the_optimizer(
    world_of_3: World, phase: str, wrong: int
) -> None:
    answers = world_of_3.run(case_refused, phase=phase, wrong=wrong)
    honest = [answer for answer in answers if answer is not None]
    assert len({outcome.headline for outcome, *_ in honest}) == 1, honest
    for outcome, saved, untouched in honest:
        assert outcome.error == "ProtocolError", outcome
        assert f"refused a message from rank {FORGER} (step 0, chunk {wrong}, {phase})" in (
            outcome.headline
        )
        assert saved.headline == outcome.headline
        assert untouched


SCENARIO = Scenario(
    (
        Weight("first", (90, 70)),
        Weight("bias", (50,)),
        Weight("second", (120, 60)),
        Weight("last", (80, 90)),
    ),
    ddp={"bucket_cap_mb": 0.02},
)
KINDS: dict[str, dict[str, Any]] = {
    "rebuilt": {},
    "one bucket": {"ddp": {"bucket_cap_mb": 25}},
    "static_graph": {"ddp": {"bucket_cap_mb": 0.02, "static_graph": True}},
    "no_sync": {"passes": 2},
    "unused": {
        "unused": {0: ("second",), 1: ("second",)},
        "ddp": {"bucket_cap_mb": 0.02, "find_unused_parameters": True},
    },
}


def case_verdict(scenario: Scenario) -> tuple[Outcome, bool]:
    run = Run(scenario)
    run.step(0)
    before = run.parameter_hash()
    outcome = attempt(lambda: run.step(1))
    return outcome, run.parameter_hash() == before


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_an_early_bucket_found_is_raised_by_the_backward_pass_of_the_step(
    world_of_2: World, kind: str
) -> None:
    # DDP hands over the last parameter's bucket first.
    scenario = dataclasses.replace(
        SCENARIO,
        options={"nonfinite": "raise"},
        poison={(1, 1, "last"): float("nan")},
        **KINDS[kind],
    )
    for outcome, untouched in world_of_2.run(case_verdict, scenario=scenario):
        assert outcome.error == "StateError", outcome
        assert "gradient of 'last' is not finite at step 1" in outcome.headline
        assert untouched


class Embedded(nn.Module):
    """Its sparse gradient comes last, in a bucket that the engine does not get."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8, sparse=True)
        self.layers = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 40))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(indices)).sum()


def case_sparse(poison: bool) -> tuple[list[Outcome], int]:
    import gradferry

    torch.manual_seed(0)
    ddp = DistributedDataParallel(Embedded(), bucket_cap_mb=0.01)
    state = gradferry.attach(ddp, "q4", nonfinite="raise")
    outcomes = []
    for step in range(3):
        if poison and step == 2:
            weight = ddp.module.layers[1].weight
            weight.register_hook(lambda gradient: gradient * float("nan"))
        loss = ddp(torch.arange(6))
        outcomes.append(attempt(loss.backward))
    return outcomes, state.stats()["in_flight"]


@pytest.mark.parametrize("poison", [False, True], ids=["well", "poisoned"])
def test_sparse_bucket_at_the_end_of_a_step_does_not_swallow_the_verdict(
    world_of_2: World, poison: bool
) -> None:
    for outcomes, in_flight in world_of_2.run(case_sparse, poison=poison):
        errors = [outcome.error for outcome in outcomes]
        assert errors == [None, None, "StateError" if poison else None], outcomes
        assert in_flight == 0
