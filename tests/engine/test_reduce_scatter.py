"""Reduce-scatter: every rank gets the mean of what it owns, and nothing is gathered.

Simulated worlds (tests/faults/sim) play it too: what is applied and withheld adds up, and messages
that cannot be trusted are one error on all ranks.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_options import engine_options, parameter
from gradferry import _native
from outcomes import Outcome, attempt
from reduce_scattering import Case, Steps, assert_bit_equal, case_steps
from world import World, WorldError

Worlds = Callable[[int], World]

# A chunk has one tile of `exact` per owner, or two of q4.
SMALL = {"workspace_cap_mb": 0.15}


# --- means are those of the reference, to the bit -------------------------------------------------


@pytest.mark.torch_core
@pytest.mark.parametrize(
    "case",
    [
        Case(2, "exact"),
        Case(3, "exact", torch.bfloat16, options=SMALL),
        Case(3, "exact", torch.float64, options=SMALL),
        Case(3, "q4", torch.bfloat16, "worker"),
        Case(2, "q8", torch.float16, options=SMALL),
        Case(4, "sign1", error_feedback="worker", options={"seed": 7}),
        Case(3, "topk:ratio=0.05", error_feedback="worker"),
        Case(2, "rht:bits=3", error_feedback="worker", options={"seed": 7}),
        Case(2, "q4", error_feedback="worker", options={"warmup_steps": 2}),
        Case(2, "sign1", error_feedback="worker", options={"warmup_steps": 1, "warmup": "q8"}),
        Case(2, "q4", error_feedback="worker", scales=(4.0, 1024.0, 0.5), options=SMALL),
        Case(3, "q4", error_feedback="worker", poison=(1, 0, "block.weight", 2)),
        Case(2, "exact", torch.float16, poison=(1, 1, "head.weight", 0)),
    ],
    ids=lambda case: f"{case.world_size}-{case.codec}-{case.kind}-{len(case.options)}",
)
def test_means_residuals_and_bytes_are_as_written(worlds: Worlds, case: Case) -> None:
    answers = worlds(case.world_size).run(case_steps, case=case)
    assert_bit_equal(answers, case)
    assert [answer["stats"]["wire_bytes"] for answer in answers] == case.wire_bytes()
    cap_mb = case.options.get("workspace_cap_mb")
    for answer in answers:
        stats, events, workspace = answer["stats"], answer["events"], answer["workspace"]
        assert stats["steps"] == case.steps
        assert stats["buckets"] == 3 * case.steps  # of the four, one has no elements
        assert stats["chunks"] == sum(event["chunks"] for event in events)
        assert (stats["chunks"] > stats["buckets"]) == (cap_mb is not None)
        assert (stats["in_flight"], stats["local_bytes"]) == (0, 0)
        assert workspace["gathered_bytes"] == workspace["own_message_bytes"] == 0
        assert not workspace["shared_receive"]
        assert stats["workspace_bytes"] <= (cap_mb or 96) * 2**20


def test_exact_is_the_sum_in_rank_order_times_one_over_the_world_size(world_of_3: World) -> None:
    case = Case(3, "exact", steps=1)
    answers = world_of_3.run(case_steps, case=case)
    for index, (_, owner) in enumerate(case.pairs):
        gradients = [case.gradient(0, rank, index) for rank in range(3)]
        mean = (gradients[0] + gradients[1] + gradients[2]) * (np.float32(1) / np.float32(3))
        assert mean.dtype == np.float32
        assert answers[owner]["means"][0][index].tobytes() == mean.tobytes()


def test_a_world_of_one_sends_nothing_and_changes_nothing(worlds: Worlds) -> None:
    for codec in ("exact", "q4"):
        case = Case(1, codec, error_feedback="worker")
        (answer,) = worlds(1).run(case_steps, case=case)
        assert answer["stats"]["wire_bytes"] == 0
        for step, means in enumerate(answer["means"]):
            for index, mean in enumerate(means):
                assert mean.tobytes() == case.gradient(step, 0, index).tobytes()


# --- states ---------------------------------------------------------------------------------------


def case_go_on(case: Case, saved_after: int) -> bool:
    """Whether an engine goes on from a saved state as the one that it was saved from."""
    first, second = Steps(case), Steps(case)
    for step in range(saved_after):
        first.run(step)
    second.engine.load_state(*first.engine.state())
    for step in range(saved_after, case.steps):
        for one, other in zip(first.run(step), second.run(step), strict=True):
            if one is not None and one.tobytes() != other.tobytes():
                return False
    return all(
        one.tobytes() == other.tobytes()
        for one, other in zip(first.residuals(), second.residuals(), strict=True)
    )


def test_a_saved_state_goes_on_to_the_bit(world_of_2: World) -> None:
    # rht also needs the step's number; the scale changes at the first step after the load.
    case = Case(2, "rht:bits=2", error_feedback="worker", steps=4, scales=(1.0, 2.0, 8.0, 8.0))
    assert world_of_2.run(case_go_on, case=case, saved_after=2) == [True, True]


# --- errors ---------------------------------------------------------------------------------------


def case_nonfinite(case: Case) -> tuple[Outcome, Outcome]:
    steps = Steps(case)
    steps.run(0)
    return attempt(lambda: steps.run(1)), attempt(steps.engine.state)


def test_a_mean_that_is_not_finite_is_one_error_on_all_ranks(world_of_3: World) -> None:
    """Only rank 2 could see it."""
    case = Case(3, "q4", options={"nonfinite": "raise", **SMALL}, poison=(1, 0, "block.weight", 2))
    answers = world_of_3.run(case_nonfinite, case=case)
    outcomes = [outcome for answer in answers for outcome in answer]
    assert {outcome.error for outcome in outcomes} == {"StateError"}
    assert {outcome.headline for outcome in outcomes} == {
        "the averaged gradient of 'block.weight[2]' is not finite at step 1; lower the learning "
        "rate or the loss scale, or attach with nonfinite='propagate' to see it in .grad"
    }


VICTIM = 2


def case_death(folder: str, between_steps: bool) -> None:
    steps = Steps(Case(3, "q4"))
    steps.run(0)
    if dist.get_rank() == VICTIM:
        if not between_steps:
            bucket = steps.case.buckets[0]
            steps.reducer.start([(bucket, steps.bucket(1, bucket))], in_background=False)
        os.kill(os.getpid(), signal.SIGKILL)
    outcomes = [attempt(call) for call in (lambda: steps.run(1), steps.engine.state)]
    seen = [(o.error, o.headline) for o in outcomes]
    Path(folder, str(dist.get_rank())).write_text(json.dumps(seen))


@pytest.mark.parametrize("between_steps", [True, False])
def test_death_of_a_rank_is_named_at_once(
    world_of_3: World, tmp_path: Path, between_steps: bool
) -> None:
    with pytest.raises(WorldError, match=f"rank {VICTIM}: process ended with code -9"):
        world_of_3.run(case_death, folder=str(tmp_path), between_steps=between_steps)
    named = re.compile(
        rf"rank \d lost contact with rank {VICTIM} "
        r"\(step 1, (chunk|bucket) \d+, (scatter|commit)\): .*"
    )
    for rank in range(VICTIM):
        seen = json.loads((tmp_path / str(rank)).read_text())
        assert {error for error, _ in seen} == {"PeerError"}
        assert named.match(seen[0][1]), seen


def case_check(differ: bool) -> tuple[int, Outcome]:
    """Two steps with a check before the second, of a tensor for each of what the engine knows."""
    case = Case(2, "q4", steps=2, options={"check_every": 1})
    tensors = [torch.full((5,), float(index)) for index in range(len(case.pairs))]
    steps = Steps(case, tensors)
    steps.run(0)
    before = steps.engine.stats()["wire_bytes"]
    if differ and dist.get_rank() == 1:
        tensors[1][0] = 7
    outcome = attempt(lambda: steps.run(1))
    return steps.engine.stats()["wire_bytes"] - 2 * before, outcome


def test_ranks_compare_what_they_registered(world_of_2: World) -> None:
    for more, outcome in world_of_2.run(case_check, differ=False):
        assert outcome.error is None
        assert more == 64 + 8 * 10
    for _, outcome in world_of_2.run(case_check, differ=True):
        assert outcome.error == "DivergedError"
        assert "parameter 'block.weight[1]' of rank 1 differs from that of rank 0" in outcome.text


def spec(**changes: Any) -> _native.ParameterSpec:
    given = {"owner": 0, "worker_residual": False, "owner_residual": False, **changes}
    return _native.ParameterSpec(
        name="weight", num_elements=5, dtype=torch.float32, codec="q4", warmup="exact", **given
    )


def scattering_options(**changes: Any) -> _native.EngineOptions:
    given = {
        "parameters": [spec()],
        "nodes": [[0]],
        "chunk_bytes": _native.CHUNK_BYTES,
        "workspace_cap_bytes": 1 << 26,
        "collective": "reduce_scatter",
    }
    return engine_options(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parameters": [parameter("weight", 5, "q4")]}, "'weight' has no owner, which a reduce-"),
        ({"parameters": [spec(owner=1)]}, "has owner 1, which is none of 1 ranks that own tiles"),
        (
            {"parameters": [spec(owner_residual=True)]},
            "'weight' has an owner residual, but a reduce-scatter does not encode means; "
            "use error_feedback='worker' or 'none'",
        ),
        ({"momentum": 0.5}, "no momentum mode, which needs means on every rank; leave out "),
        ({"find_unused_parameters": True}, "no find_unused_parameters; hand over zeros"),
        ({"nodes": [[0, 1]]}, "no sums within nodes of several ranks; use nodes='flat'"),
        (
            {"collective": "all_reduce"},
            "'weight' has an owner, which only a reduce-scatter or an all-",
        ),
        (
            {"collective": "gather"},
            "collective is 'all_reduce', 'reduce_scatter' or 'all_gather', not 'g",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(gradferry.ConfigError, match=re.escape(text)):
        _native.HostEngine(
            scattering_options(**changes), tensors=[], lanes={}, memory=None, local_stage=""
        )
