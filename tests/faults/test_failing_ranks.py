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
from on_ranks import of_all, on_ranks
from outcomes import attempt
from scenario import Lookup, Run, Scenario, Weight
from torch.nn.parallel import DistributedDataParallel


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
    texts = of_all(outcome.text)
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


@pytest.mark.parametrize("poison", [False, True], ids=["well", "poisoned"])
@on_ranks(2)
def test_sparse_bucket_at_the_end_of_a_step_does_not_swallow_the_verdict(poison: bool) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Lookup(), bucket_cap_mb=0.01)
    state = gradferry.attach(ddp, "q4", nonfinite="raise")
    errors = []
    for step in range(3):
        if poison and step == 2:
            weight = ddp.module.out.weight
            weight.register_hook(lambda gradient: gradient * float("nan"))
        errors.append(attempt(ddp(torch.arange(6)).backward).error)
    assert errors == [None, None, "StateError" if poison else None]
    assert state.stats()["in_flight"] == 0
