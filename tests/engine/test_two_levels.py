"""The exchange between nodes of several ranks, against the reference, to the bit."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from gradferry.ddp.state import bound_to
from reference import Layout, two_level_bytes_per_step
from scenario import Run, Scenario, Weight, assert_bit_equal, train, train_at_once
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (
    Weight("first", (96, 130)),
    Weight("bias", (130,)),
    Weight("second", (130, 200)),
    Weight("last", (40000,)),
)
TYPES = ("float32", "bfloat16", "float16", "float64", "complex64")
OF_ALL_TYPES = tuple(
    dataclasses.replace(weight, name=f"{weight.name}_{name}", dtype=getattr(torch, name))
    for name in TYPES
    for weight in WEIGHTS[:2]
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


@pytest.mark.parametrize(
    "changes",
    [
        *({"codec": codec, "error_feedback": "both"} for codec in ("q8", "rht:bits=3", "bf16")),
        {"codec": "sign1", "options": {"momentum": 0.9, "exact_skip": True}},
        {
            "codec": "topk:ratio=0.05",
            "options": {"momentum": 0.9, "warmup_steps": 2, "warmup": "q8"},
        },
        {"codec": "exact"},
        {"weights": OF_ALL_TYPES, "error_feedback": "both"},
        {"weights": OF_ALL_TYPES, "codec": "exact", "ddp": {"bucket_cap_mb": 0.05}},
        {"weights": OF_ALL_TYPES, "codec": "sign1", "options": {"momentum": 0.9}},
        {"ddp": {"bucket_cap_mb": 0.05}, "error_feedback": "both"},
        {"ddp": {"bucket_cap_mb": 0.2, "gradient_as_bucket_view": True}, "error_feedback": "both"},
        {"poison": {(1, 2, "second"): float("nan"), (2, 0, "last"): float("inf")}},
        {"empty": ((1, 0), (1, 1), (2, 2))},
        {
            "unused": {0: ("second",), 1: ("second",), 2: ("bias",)},
            "ddp": {"find_unused_parameters": True},
            "error_feedback": "both",
        },
        {"options": {"check_every": 2}},
        {"passes": 2, "error_feedback": "both"},
    ],
    ids=lambda changes: " ".join(
        name if name == "weights" else str(value) for name, value in changes.items()
    )[:60],
)
def test_two_level_exchange_keeps_every_promise(worlds: Worlds, changes: dict[str, object]) -> None:
    scenario = scenario_on("2+1", **changes)
    assert_bit_equal(worlds(scenario.world_size).run(train, scenario=scenario), scenario)


def groups_at_once(**changes: object) -> list[Scenario]:
    """Two groups of ranks of a world of 6, in each of which nodes are other ranks than in it."""
    return [
        dataclasses.replace(scenario_on("2+1", **changes), group_ranks=(0, 3, 5)),
        dataclasses.replace(scenario_on("1+2", **changes), group_ranks=(1, 2, 4), seed=1),
    ]


def case_groups(scenarios: list[Scenario], through: str) -> dict[str, object] | None:
    """Trains in the groups, whose siblings exchange through memory, or through lanes of a kind."""
    from gradferry.core import engine, node_memory

    with contextlib.ExitStack() as patches:
        if through != "memory":
            failure = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            patches.enter_context(
                mock.patch.object(node_memory.os, "memfd_create", side_effect=failure)
            )
        if through == "gloo":
            patches.enter_context(
                mock.patch.object(engine, "_gloo_takes_plain_tcp", return_value=False)
            )
        return train_at_once(*scenarios)


@pytest.mark.parametrize("through", ["memory", "sockets", "gloo"])
def test_nodes_are_those_of_the_ranks_in_a_group(worlds: Worlds, through: str) -> None:
    scenarios = groups_at_once(error_feedback="both", options={"check_every": 2})
    answers = worlds(6).run(case_groups, scenarios=scenarios, through=through)
    for scenario in scenarios:
        assert_bit_equal([answers[rank] for rank in scenario.group_ranks], scenario)


def test_one_rank_per_node_is_the_flat_exchange(worlds: Worlds) -> None:
    plain = Scenario(WEIGHTS, world_size=3, error_feedback="both")
    alone = dataclasses.replace(plain, nodes=((0,), (1,), (2,)))
    for flat, nodes in zip(
        *(worlds(3).run(train, scenario=scenario) for scenario in (plain, alone)), strict=True
    ):
        assert flat["final_hash"] == nodes["final_hash"]
        assert flat["stats"]["wire_bytes"] == nodes["stats"]["wire_bytes"]


# A column of two has more than a chunk's most bytes of gradient in the first.
LARGE = (Weight("large", (1100, 1000)), *WEIGHTS)


@pytest.mark.parametrize("unused", [False, True], ids=["", "maps of used parameters"])
@pytest.mark.parametrize("nodes", ["2x2", "2+1", "1x4"])
def test_bytes_equal_the_formula(worlds: Worlds, nodes: str, unused: bool) -> None:
    ddp = {"bucket_cap_mb": 4, "find_unused_parameters": unused}
    scenario = scenario_on(nodes, weights=LARGE, steps=2, ddp=ddp)
    layout = Layout([w.describe() for w in LARGE], scenario.codec, scenario.world_size)
    number = {weight.name: index for index, weight in enumerate(LARGE)}
    answers = worlds(scenario.world_size).run(train, scenario=scenario)
    for rank, answer in enumerate(answers):
        buckets = [[number[name] for name in b] for step in answer["buckets"] for b in step]
        wire, local = two_level_bytes_per_step(layout, NODES[nodes], buckets, rank, unused)
        stats = answer["stats"]
        assert nodes == "1x4" or stats["chunks"] > stats["buckets"]
        assert (stats["wire_bytes"], stats["local_bytes"]) == (wire, local)
    assert (sum(a["stats"]["wire_bytes"] for a in answers) == 0) == (nodes == "1x4")


def case_compared(scenario: Scenario) -> list[dict[str, int]]:
    """Bytes of ranks that do not compare parameters, and of ranks that do."""
    counted = []
    for every in (0, 1):
        run = Run(dataclasses.replace(scenario, options={"check_every": every}))
        for step in range(3):
            run.step(step)
        counted.append(dict(run.state.stats()))
    return counted


def test_comparing_parameters_counts_where_bytes_go(worlds: Worlds) -> None:
    scenario = scenario_on("2+1")
    # In two of three steps: a header, and 8 bytes per parameter.
    message = 2 * (64 + 8 * len(WEIGHTS))
    for rank, (without, compared) in enumerate(worlds(3).run(case_compared, scenario=scenario)):
        more = [compared[key] - without[key] for key in ("wire_bytes", "local_bytes")]
        assert more == ([message, message] if rank < 2 else [2 * message, 0])


def case_events(scenario: Scenario) -> dict[str, object]:
    run = Run(scenario)
    for step in range(5):
        run.step(step)
    return {"events": run.state.events(), "stats": run.state.stats()}


def test_training_thread_is_held_up_only_while_it_is_in_the_hook(worlds: Worlds) -> None:
    scenario = scenario_on("2+1", ddp={"bucket_cap_mb": 0.05})
    for answer in worlds(3).run(case_events, scenario=scenario):
        for event, following in itertools.pairwise(answer["events"]):
            # DDP hands over a bucket after the hook has returned from the one before.
            assert event["begin_ms"] < event["encoded_ms"] <= following["begin_ms"]
            assert event["encoded_ms"] < event["complete_ms"]
        for key in ("encode_ms", "network_ms", "decode_ms"):
            total = sum(event[key] for event in answer["events"])
            assert answer["stats"][key] == pytest.approx(total, rel=1e-12)  # the same nanoseconds
            assert total > 0


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
