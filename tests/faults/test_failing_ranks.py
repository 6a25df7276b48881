"""A rank that fails, lags or finds a fault: all know it in the same step, before the optimizer.

The world's collectives time out long after a case must have ended: its errors are ones that were
told.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry.core import agreement, rendezvous
from gradferry.core.device import CPU
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from scenario import Run, Scenario, Weight
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

WEIGHTS = (Weight("first", (90, 100)), Weight("last", (50, 60)))
VICTIM = 1
SHORT_SECONDS = 2.0  # a timeout that is waited for


@on_ranks(3)
def test_a_lost_collective_is_one_text_on_all_ranks_that_know_it_otherwise() -> None:
    """A collective has failed, and every rank knows it from another source."""
    reasons = ("Timed out waiting", "Connection closed by peer", "Address in use")
    failed = RuntimeError(reasons[dist.get_rank()])
    with mock.patch.object(agreement, "_gather_records", side_effect=failed):
        outcome = attempt(lambda: agreement.gather_records({}, dist.group.WORLD, CPU))
    # After which it is forgotten.
    rendezvous.meet(dist.group.WORLD, timedelta(seconds=60), "come")
    assert outcome.error == "PeerError"
    assert "lost contact with another rank: " in outcome.text
    texts: list[Any] = [None] * 3
    dist.all_gather_object(texts, outcome.text)
    assert len(set(texts)) == 1, texts


# Around the 1016 bytes that the first all-gather holds, alone and beside shorter ones.
@pytest.mark.parametrize(
    "lengths", [(1016, 1015, 8), (1016, 1017, 8), (1018, 20_000, 1017), (8, 8, 20_000)], ids=str
)
@on_ranks(3)
def test_records_of_any_size_come_as_they_were_sent(lengths: tuple[int, ...]) -> None:
    record = {"": "x" * (lengths[dist.get_rank()] - len(json.dumps({"": ""})))}
    records = agreement.gather_records(record, dist.group.WORLD, CPU)
    assert [len(json.dumps(record)) for record in records] == list(lengths)
    assert all(set(record[""]) <= {"x"} for record in records)


@pytest.mark.parametrize("value", [0, 1, 255])
@on_ranks(3)
def test_what_is_no_record_is_said(value: int) -> None:
    """Rank 1 posts another collective of the same size."""
    group = dist.group.WORLD
    if dist.get_rank() == 1:
        theirs = torch.full((agreement._FIRST_BYTES,), value, dtype=torch.uint8)
        group.allgather([[torch.empty_like(theirs) for _ in range(3)]], [theirs]).wait()
        return
    outcome = attempt(lambda: agreement.gather_records({}, group, CPU))
    assert outcome.error == "ProtocolError", outcome
    assert "a rank announced a record of" in outcome.text


@on_ranks(2)
def test_steps_without_silence_leave_nothing_in_the_store() -> None:
    run = Run(Scenario(WEIGHTS))
    run.step(0)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    run.step(1)
    dist.barrier()
    assert store.num_keys() == before


def case_skips_a_backward() -> tuple[Outcome, str]:
    """The victim leaves out one backward pass, so that the others have one more than it."""
    group = dist.new_group(timeout=timedelta(seconds=SHORT_SECONDS))
    run = Run(Scenario(WEIGHTS), group)

    def train() -> None:
        for step in range(10):
            # Not earlier: DDP communicates by itself when it rebuilds its buckets.
            if step == 2 and dist.get_rank() == VICTIM:
                run.ddp(run.targets(step))
            else:
                run.step(step)

    outcome = attempt(train)
    dist.barrier()  # the victim is there
    return outcome, run.parameter_hash()


def test_rank_that_skips_a_backward_pass_is_missed_after_the_timeout(world_of_2: World) -> None:
    answers = world_of_2.run(case_skips_a_backward)
    waiting, ahead = answers[0][0], answers[VICTIM][0]
    assert waiting.error == "PeerError"
    assert f"rank 0 lost contact with rank {VICTIM} (step 9, chunk" in waiting.headline
    assert "nothing came within the timeout" in waiting.headline
    assert waiting.text.count("\n  step ") == 8  # the last buckets, for who looks for the cause
    assert ahead.error is None
    # The victim's passes are those of other steps, but ranks have applied the same averages.
    assert len({parameters for _, parameters in answers}) == 1


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
    "static_graph": {"ddp": {"bucket_cap_mb": 0.02, "static_graph": True}},
    "no_sync": {"passes": 2},
    "unused": {
        "unused": {0: ("second",), 1: ("second",)},
        "ddp": {"bucket_cap_mb": 0.02, "find_unused_parameters": True},
    },
}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_what_an_early_bucket_found_is_raised_by_the_backward_pass_of_the_step(kind: str) -> None:
    """DDP hands over the last parameter's bucket first."""
    poison = {(1, 1, "last"): float("nan")}
    options = {"nonfinite": "raise"}
    run = Run(dataclasses.replace(SCENARIO, options=options, poison=poison, **KINDS[kind]))
    run.step(0)
    before = run.parameter_hash()
    outcome = attempt(lambda: run.step(1))
    assert outcome.error == "StateError", outcome
    assert "gradient of 'last' is not finite at step 1" in outcome.headline
    assert run.parameter_hash() == before


class Embedded(nn.Module):
    """Its sparse gradient comes last, in a bucket that the engine does not get."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8, sparse=True)
        self.layers = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 40))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(indices)).sum()


@pytest.mark.parametrize("poison", [False, True], ids=["well", "poisoned"])
@on_ranks(2)
def test_sparse_bucket_at_the_end_of_a_step_does_not_swallow_the_verdict(poison: bool) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Embedded(), bucket_cap_mb=0.01)
    state = gradferry.attach(ddp, "q4", nonfinite="raise")
    errors = []
    for step in range(3):
        if poison and step == 2:
            weight = ddp.module.layers[1].weight
            weight.register_hook(lambda gradient: gradient * float("nan"))
        errors.append(attempt(ddp(torch.arange(6)).backward).error)
    assert errors == [None, None, "StateError" if poison else None]
    assert state.stats()["in_flight"] == 0
