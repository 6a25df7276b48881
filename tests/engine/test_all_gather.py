"""All-gather: every rank gets what each rank has encoded, its own included; nothing is averaged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gathering import round_trip
from gradferry import _native
from outcomes import Outcome, attempt
from reduce_scattering import Case, Steps
from reference import gathered_bytes_per_step, widen
from test_reduce_scatter import SMALL, scattering_options, spec
from world import World

Worlds = Callable[[int], World]


def case_gathers(case: Case, keep: bool) -> dict[str, Any]:
    """Which parameters are not as their owners' messages say, after each step."""
    steps = Steps(case, collective="all_gather", keep_gathered=keep)
    wrong: list[Any] = []

    def compare(step: int, bucket: list[int], flat: torch.Tensor) -> None:
        for index, got in zip(bucket, flat.split([case.sizes[i] for i in bucket]), strict=True):
            own = widen(case.gradient(step, case.pairs[index][1], index), case.kind)
            expected = round_trip(own, case.codecs[index], case.kind)
            if not np.array_equal(got.float().numpy(), expected, equal_nan=True):
                wrong.append((step, case.pairs[index]))

    kept = []
    for step in range(case.steps):
        flats = [own_alone(steps, step, bucket) for bucket in case.buckets]
        calls = [
            steps.reducer.start([(bucket, flat)], in_background=False)
            for bucket, flat in zip(case.buckets, flats, strict=True)
        ]
        for bucket, flat, call in zip(case.buckets, flats, calls, strict=True):
            call.wait()
            compare(step, bucket, flat)
        steps.engine.settle()
        again = [torch.full_like(flat, float("nan")) for flat in flats]
        sent = steps.engine.stats()["wire_bytes"]
        for bucket, flat in zip(case.buckets, again, strict=True):
            if not flat.numel():
                continue
            kept.append(steps.engine.decode_kept(bucket, flat))
            if kept[-1]:
                compare(step, bucket, flat)
        assert steps.engine.stats()["wire_bytes"] == sent
    return {
        "wrong": wrong,
        "kept": set(kept),
        "stats": steps.engine.stats(),
        "workspace": steps.engine.workspace(),
    }


def own_alone(steps: Steps, step: int, bucket: list[int]) -> torch.Tensor:
    """What this rank owns, and NaN for the rest."""
    case, flat = steps.case, steps.bucket(step, bucket)
    for index, part in zip(bucket, flat.split([case.sizes[i] for i in bucket]), strict=True):
        if case.pairs[index][1] != steps.rank:
            part.fill_(float("nan"))
    return flat


@pytest.mark.torch_core
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
@pytest.mark.parametrize(
    "case",
    [
        Case(2, "exact"),
        Case(3, "exact", torch.bfloat16, options=SMALL),
        Case(3, "q4", torch.bfloat16, options=SMALL),
        Case(4, "q8", torch.float16, options=SMALL),
        Case(2, "bf16", options=SMALL),
        Case(3, "q4", poison=(1, 0, "block.weight", 0)),
    ],
    ids=lambda case: f"{case.world_size}-{case.codec}-{case.kind}-{len(case.options)}",
)
def test_parameters_and_bytes_are_as_written(worlds: Worlds, case: Case, keep: bool) -> None:
    answers = worlds(case.world_size).run(case_gathers, case=case, keep=keep)
    config = case.config()
    sent = gathered_bytes_per_step(
        case.sizes,
        case.codecs,
        [owner for _, owner in case.pairs],
        case.buckets,
        case.world_size,
        config.chunk_bytes_at(case.world_size),
        case.kind,
    )
    for answer in answers:
        stats, workspace = answer["stats"], answer["workspace"]
        assert answer["wrong"] == []
        assert answer["kept"] == {keep}
        assert stats["wire_bytes"] == case.steps * sent
        assert stats["steps"] == case.steps
        assert (stats["in_flight"], stats["local_bytes"], stats["residual_bytes"]) == (0, 0, 0)
        assert (stats["chunks"] > stats["buckets"]) == bool(case.options)
        assert workspace["send_bytes"] == workspace["receive_bytes"] == 0
        assert (workspace["gathered_bytes"] == 0) == keep


def case_ends_in_flight() -> Outcome:
    """What rank 0 hears when it settles a gather to which rank 1 does not come."""
    case = Case(2, "q8")
    steps = Steps(case, collective="all_gather")
    if steps.rank == 0:
        bucket = case.buckets[0]
        call = steps.reducer.start([(bucket, own_alone(steps, 0, bucket))], in_background=False)
    dist.barrier()
    if steps.rank == 1:
        steps.engine.fail("rank 1: no more")
    outcome = attempt(steps.engine.settle)
    if steps.rank == 0:
        assert attempt(call.wait).headline == outcome.headline
    return outcome


def test_settling_waits_for_what_is_in_flight(worlds: Worlds) -> None:
    for outcome in worlds(2).run(case_ends_in_flight):
        assert outcome.error in ("StateError", "PeerError")  # its own, or another rank's
        assert "rank 1: no more" in outcome.text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parameters": [spec(owner=None)]}, "has no owner, which an all-gather needs"),
        ({"parameters": [spec(worker_residual=True)]}, "an all-gather keeps none"),
        ({"momentum": 0.5}, "an all-gather has no momentum mode"),
        ({"find_unused_parameters": True}, "an all-gather has no find_unused_parameters"),
        ({"nodes": [[0, 1]]}, "an all-gather has no sums within nodes"),
        (
            {"collective": "reduce_scatter", "keep_gathered": True},
            "keep_gathered is for an all-gather, not for a reduce-scatter",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], text: str) -> None:
    options = scattering_options(**{"collective": "all_gather", **changes})
    with pytest.raises(gradferry.ConfigError, match=re.escape(text)):
        _native.HostEngine(options, tensors=[], lanes={}, memory=None, local_stage="")
