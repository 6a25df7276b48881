"""Nodes of several ranks on a device with streams: the fake device of tests/engine/streams.

The numbers are those of the reference, as on hosts; what a device finds wrong comes up on every
rank. The waits of this exchange are in test_stream_waits.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import Layout, two_level_bytes_per_step
from scenario import Run, Scenario, Weight, assert_bit_equal, train_at_once, trained
from test_stream_waits import case_launches
from test_streams import CHUNK_BYTES, SCENARIO, case_train, nan_elements, small_chunks
from test_two_levels import NODES, groups_at_once
from world import World

Worlds = Callable[[int], World]


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


def scenario_on(nodes: str, device: str, **changes: Any) -> Scenario:
    members = NODES[nodes]
    return dataclasses.replace(
        SCENARIO, world_size=sum(map(len, members)), nodes=members, device=device, **changes
    )


def case_slots(scenarios: list[Scenario]) -> list[dict[str, Any]]:
    """Trains in each; with how many slots."""
    from fake_device import machine
    from gradferry.ddp.state import bound_to

    answers = []
    with small_chunks():
        for scenario in scenarios:
            run = Run(scenario)
            slots = bound_to(run.state).running.engine.workspace()["slots"]
            answers.append({**trained(run), "slots": slots})
    assert machine.races() == []
    return answers


def case_groups(scenarios: list[Scenario]) -> dict[str, Any] | None:
    with small_chunks():
        answer = train_at_once(*scenarios)
    from fake_device import machine

    assert machine.races() == []
    return answer


@pytest.mark.torch_core
@pytest.mark.parametrize("device", ["streamed", "staged"])
@pytest.mark.parametrize("nodes", ["2x2", "interleaved", "2+1", "1x4", "3x2"])
def test_two_levels_on_a_device_equal_the_reference(
    worlds: Worlds, nodes: str, device: str
) -> None:
    scenario = scenario_on(nodes, device)
    answers = worlds(scenario.world_size).run(case_train, scenario=scenario, seeds=[1])
    assert_bit_equal(answers, scenario)


# A bucket of more chunks than are in flight, which have tiles of both columns, of one, or of none.
MANY_CHUNKS = (Weight("first", (59, 4096)), Weight("bias", (4095,)), Weight("second", (3, 4096)))


@pytest.mark.parametrize("nodes", ["2x2", "2+1"])
def test_numbers_do_not_depend_on_the_order_of_streams(worlds: Worlds, nodes: str) -> None:
    scenario = scenario_on(
        nodes, "streamed", weights=MANY_CHUNKS, rules=(("second", "q8"),), codec="exact", ddp={}
    )
    scenario = dataclasses.replace(scenario, steps=3, options={"momentum": 0.9})
    answers = worlds(scenario.world_size).run(case_train, scenario=scenario, seeds=[*range(4)])
    assert_bit_equal(answers, scenario)
    assert answers[0]["stats"]["chunks"] > 6 * scenario.steps


# By slots: of 0.3 MiB in a node of two, and larger ones where there is room.
CAPS_MB = {1: 0.4, 2: 0.75, 3: 1.4, 4: 2, 5: 96}


@pytest.mark.parametrize(
    ("nodes", "device", "error_feedback"),
    [("2x2", "streamed", "both"), ("2+1", "streamed", "owner"), ("2+1", "staged", "both")],
)
def test_fewer_slots_than_stages_change_no_result(
    worlds: Worlds, nodes: str, device: str, error_feedback: str
) -> None:
    weights = (Weight("first", (11, 4096)), Weight("bias", (77,)), Weight("second", (3, 4096)))
    scenario = scenario_on(nodes, device, weights=weights, error_feedback=error_feedback)
    scenario = dataclasses.replace(scenario, steps=2, rules=(), codec="exact")
    asked = [
        dataclasses.replace(scenario, options={"workspace_cap_mb": cap}) for cap in CAPS_MB.values()
    ]
    by_rank = worlds(scenario.world_size).run(case_slots, scenarios=asked)
    for index, slots in enumerate(CAPS_MB):
        answers = [answer[index] for answer in by_rank]
        assert_bit_equal(answers, scenario)
        # Also on a node of one rank, which needs less: the order of collectives depends on it.
        assert {answer["slots"] for answer in answers} == {slots}


@pytest.mark.parametrize("device", ["streamed", "staged"])
def test_nodes_are_those_of_the_ranks_in_a_group(worlds: Worlds, device: str) -> None:
    scenarios = groups_at_once(
        device=device, error_feedback="both", ddp={"bucket_cap_mb": 0.1}, options={"check_every": 2}
    )
    answers = worlds(6).run(case_groups, scenarios=scenarios)
    for scenario in scenarios:
        assert_bit_equal([answers[rank] for rank in scenario.group_ranks], scenario)


def weights_of(dtype: torch.dtype) -> tuple[Weight, ...]:
    return tuple(dataclasses.replace(weight, dtype=dtype) for weight in SCENARIO.weights)


@pytest.mark.parametrize("device", ["streamed", "staged"])
@pytest.mark.parametrize(
    "changes",
    [
        {"codec": "sign1", "rules": (), "options": {"momentum": 0.9, "exact_skip": True}},
        {
            "codec": "topk:ratio=0.05",
            "options": {"momentum": 0.9, "warmup_steps": 2, "warmup": "q8"},
        },
        {"poison": {(1, 2, "second"): float("nan"), (2, 0, "third"): float("inf")}},
        {"empty": ((1, 0), (1, 1), (2, 2))},
        {"options": {"check_every": 2}, "passes": 2},
        {"weights": weights_of(torch.float64), "codec": "exact", "rules": ()},
        {"weights": weights_of(torch.bfloat16)},
        {
            "weights": weights_of(torch.float16),
            "options": {"momentum": 0.9},
            "poison": {(1, 2, "second"): float("inf")},
        },
    ],
    ids=["momentum", "warm-up", "not finite", "empty", "check_every", "fp64", "bf16", "fp16"],
)
def test_two_levels_on_a_device_keep_every_promise(
    worlds: Worlds, changes: dict[str, Any], device: str
) -> None:
    scenario = scenario_on("2+1", device, **{"error_feedback": "auto", **changes})
    answers = worlds(3).run(case_train, scenario=scenario, seeds=[1])
    assert_bit_equal(answers, scenario)


def test_an_overflow_of_fp64_momentum_is_undone_with_the_sum(worlds: Worlds) -> None:
    scenario = scenario_on(
        "2x2",
        "streamed",
        weights=weights_of(torch.float64),
        codec="exact",
        rules=(),
        error_feedback="auto",
        options={"momentum": 0.9},
        poison={(1, 2, "second"): float("nan"), (2, 1, "first"): float("inf")},
    )
    answers = worlds(4).run(case_train, scenario=scenario, seeds=[1])
    assert_bit_equal(answers, scenario)


# --- errors ---------------------------------------------------------------------------------------


def case_damage(
    scenario: Scenario, among: str, collective: int, offset: int, value: int
) -> dict[str, Any]:
    """What rank 1 receives in one collective of step 0 is damaged."""
    import fake_device
    from outcomes import attempt

    run = Run(scenario)
    if dist.get_rank() == 1:
        siblings, peers = fake_device.last_made
        {"siblings": siblings, "peers": peers}[among].damage(collective, offset, value)
    gradients = [run.step(0), run.step(1)]
    errors = [attempt(lambda: run.step(2)), attempt(run.state.state_dict)]
    assert fake_device.machine.races() == []
    return {"gradients": gradients, "errors": errors}


@pytest.mark.parametrize(
    ("among", "collective", "offset", "message", "nan_on"),
    [
        # Nodes (0, 1) and (2, 3). What comes first is of rank 0, or rank 1's own of the peers'.
        pytest.param("siblings", 0, 32, "1 from 0, local scatter", 4, id="local"),
        pytest.param("peers", 0, 32, "1 from 1, scatter", 4, id="scatter"),
        # Rank 0 gets it as it came, and is the first that reports it.
        pytest.param("peers", 1, 32, "0 from 1, gather", 2, id="gather"),
        # Rank 0's header, behind which nothing is lost; then the first message behind it.
        pytest.param("siblings", 1, 32, "1 from 0, forward", 0, id="forward"),
        pytest.param("siblings", 1, 64 + 32, "1 from 0, gather", 1, id="forwarded"),
    ],
)
def test_damage_is_nan_at_once_and_an_error_two_steps_later(
    worlds: Worlds, among: str, collective: int, offset: int, message: str, nan_on: int
) -> None:
    who, sender, phase = re.fullmatch("(.) from (.), (.*)", message).groups()
    scenario = scenario_on("2x2", "streamed", ddp={})  # one bucket, of one chunk
    answers = worlds(4).run(
        case_damage, scenario=scenario, among=among, collective=collective, offset=offset, value=9
    )
    assert sum(sum(nan_elements(answer["gradients"][0])) > 0 for answer in answers) == nan_on
    for answer in answers:
        # From then on rank 1's tiles are nobody's.
        assert sum(nan_elements(answer["gradients"][1])) > 0
        for error in answer["errors"]:
            assert error.error == "ProtocolError"
            assert f"rank {who} refused a message from rank {sender} (" in error.text
            assert f"step 0, chunk 0, {phase}): step is 9, expected 0" in error.text
    lines = {error.text.splitlines()[0] for answer in answers for error in answer["errors"]}
    assert len(lines) == 1


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["streamed", "staged"])
@pytest.mark.parametrize("nodes", ["2x2", "2+1", "1x4"])
def test_bytes_equal_the_formula_with_one_commit_per_step(
    worlds: Worlds, nodes: str, device: str
) -> None:
    scenario = scenario_on(nodes, device)
    layout = Layout(
        [w.describe() for w in scenario.weights],
        scenario.codec,
        scenario.world_size,
        scenario.rules,
    )
    number = {weight.name: index for index, weight in enumerate(scenario.weights)}
    answers = worlds(scenario.world_size).run(case_train, scenario=scenario, seeds=[1])
    for rank, answer in enumerate(answers):
        wire, local = two_level_bytes_per_step(
            layout,
            NODES[nodes],
            [[number[name] for name in b] for step in answer["buckets"] for b in step],
            rank,
            chunk_bytes=CHUNK_BYTES,
            equal_scatter=device == "streamed",
            commits=scenario.steps - 1,  # of every step, at the beginning of the next
        )
        assert (answer["stats"]["wire_bytes"], answer["stats"]["local_bytes"]) == (wire, local)
        assert (wire == 0) == (nodes == "1x4")


def test_a_chunk_takes_five_launches_and_three_without_peers(worlds: Worlds) -> None:
    steps = 3
    scenario = scenario_on("2+1", "streamed", codec="q4", rules=())
    answers = worlds(3).run(case_launches, scenario=scenario, steps=steps)
    for rank, counts in enumerate(answers):
        launches = counts["launches"] - steps * 2  # the gain, and the commit of the step before
        assert counts["chunks"] > 0
        if rank == 1:
            assert launches == 3 * counts["chunks"]
        else:  # a chunk may have no tiles of a column: then nothing is summed
            assert launches == 5 * counts["chunks"]
