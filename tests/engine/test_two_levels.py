"""The exchange between nodes of several ranks, against the reference, to the bit."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from gradferry.ddp.state import bound_to
from mixed import groups_at_once, local_stage, mapped_bytes, scenario_on
from scenario import Run, Scenario, Weight, assert_bit_equal, group_of, trained
from world import Worlds


def case_groups(scenarios: list[Scenario], through: str) -> dict[str, Any]:
    """Trains in the groups, whose siblings exchange through memory, or through lanes of a kind."""
    from gradferry.core import engine, node_memory

    groups = [group_of(scenario) for scenario in scenarios]
    failure = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    refused = mock.patch.object(node_memory.os, "memfd_create", side_effect=failure)
    no_tcp = mock.patch.object(engine, "_gloo_takes_plain_tcp", return_value=False)
    with (
        refused if through != "memory" else contextlib.nullcontext(),
        no_tcp if through == "gloo" else contextlib.nullcontext(),
    ):
        (run,) = (
            Run(scenario, group)
            for scenario, group in zip(scenarios, groups, strict=True)
            if dist.get_rank() in scenario.group_ranks
        )
        return {**trained(run), "stage": (local_stage(run), mapped_bytes())}


@pytest.mark.parametrize("through", ["memory", "sockets", "gloo"])
def test_nodes_are_those_of_the_ranks_in_a_group(worlds: Worlds, through: str) -> None:
    scenarios = groups_at_once(error_feedback="both", options={"check_every": 2})
    answers = worlds(6).run(case_groups, scenarios=scenarios, through=through)
    for scenario in scenarios:
        own = [answers[rank] for rank in scenario.group_ranks]
        assert_bit_equal(own, scenario)
        for members in scenario.nodes:
            alone = len(members) == 1
            first = scenario.group_ranks[members[0]]
            stage = f"sockets (rank {first}: memfd_create: Function not implemented)"
            stage = "shared memory" if through == "memory" else stage
            for rank in members:
                told, mapped = own[rank]["stage"]
                assert told == ("" if alone else stage)
                assert (mapped > 0) == (not alone and through == "memory")


def case_ratios(scenario: Scenario) -> dict[str, object]:
    run = Run(scenario)
    for step in range(3):
        average = run.step(step)[0]
    _, worker, owner, _ = bound_to(run.state).running.engine.state()
    return {
        "stats": run.state.stats(),
        "average": average.astype(np.float64).reshape(4, -1),
        "worker": float(worker.double().norm()),
        "owner": float(owner.double().norm()),
    }


def test_ratios_are_those_of_what_a_rank_sums_owns_and_sends(worlds: Worlds) -> None:
    """Four tiles of equal size: rank 0 owns the first, and so on; ranks 0 and 2 are the leaders
    of the first and the third, ranks 1 and 3 of the others.
    """
    scenario = scenario_on("2x2", weights=(Weight("matrix", (4, 4096)),), codec="sign1")
    gradients = [scenario.gradient(2, 0, rank, 0).reshape(4, -1) for rank in range(4)]
    for rank, answer in enumerate(worlds(4).run(case_ratios, scenario=scenario)):
        first = rank // 2 * 2
        summed = (gradients[first] + gradients[first + 1]) * np.float32(0.5)
        given = np.linalg.norm(summed[rank % 2 :: 2].astype(np.float64))
        applied = np.linalg.norm(answer["average"][rank])
        stats = answer["stats"]
        # Through the two ranks of a node a ring passes three quarters of everything, twice.
        ring = 2 * 3 / 4 * stats["gradient_bytes"] / 2
        assert stats["ratio"] == pytest.approx(ring / stats["wire_bytes"], rel=1e-12)
        # Sums of 8192 squares in double precision, in another order: 8192 * 2^-53.
        assert stats["worker_residual_ratio"] == pytest.approx(answer["worker"] / given, rel=1e-12)
        assert stats["owner_residual_ratio"] == pytest.approx(answer["owner"] / applied, rel=1e-12)
        assert answer["worker"] > 0
        assert answer["owner"] > 0
