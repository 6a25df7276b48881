"""Several chunks on a device with streams: the fake device of tests/engine/streams, under real DDP.
The numbers are those of the reference, whatever order streams run in.

Whatever else may meet in a training is in tests/hook/test_scenarios.py. test_stream_waits.py has
the waits and launches, test_streams_training.py saved states, and test_streams_safety.py errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from gradferry import _native
from mixed import groups_at_once, scenario_on
from reference import Layout, two_level_bytes_per_step
from scenario import Scenario, assert_bit_equal
from streaming import CHUNK_BYTES, DEVICES, MANY_CHUNKS, SCENARIO, case_train
from world import World

Worlds = Callable[[int], World]


def check(device_worlds: Worlds, scenario: Scenario, num_seeds: int = 1) -> list[dict[str, Any]]:
    seeds = list(range(num_seeds))
    answers = device_worlds(scenario.world_size).run(
        case_train, scenario=scenario, seeds=seeds, seconds=300
    )
    assert_bit_equal(answers, scenario)
    return answers


@pytest.mark.parametrize(
    ("nodes", "device", "chunk_bytes"),
    [
        (None, "streamed", CHUNK_BYTES),
        (None, "staged", _native.CHUNK_BYTES),  # as on hosts, unless told otherwise
        ("2x2", "streamed", CHUNK_BYTES),
        ("interleaved", "staged", CHUNK_BYTES),
        ("2+1", "staged", CHUNK_BYTES),
        ("1x4", "streamed", CHUNK_BYTES),
        pytest.param("2+1", "streamed", CHUNK_BYTES, marks=pytest.mark.slow),
        pytest.param("1x4", "staged", CHUNK_BYTES, marks=pytest.mark.slow),
        pytest.param("3x2", "streamed", CHUNK_BYTES, marks=pytest.mark.slow),
        pytest.param("3x2", "staged", CHUNK_BYTES, marks=pytest.mark.slow),
    ],
)
def test_numbers_equal_the_reference_and_bytes_the_formula(
    device_worlds: Worlds, nodes: str | None, device: str, chunk_bytes: int
) -> None:
    scenario = dataclasses.replace(SCENARIO, world_size=3, device=device)
    scenario = scenario_on(nodes, scenario) if nodes else scenario
    small = chunk_bytes == CHUNK_BYTES
    answers = device_worlds(scenario.world_size).run(case_train, scenario=scenario, small=small)
    assert_bit_equal(answers, scenario)
    layout = Layout(
        [w.describe() for w in SCENARIO.weights],
        scenario.codec,
        scenario.world_size,
        scenario.rules,
    )
    number = {weight.name: index for index, weight in enumerate(SCENARIO.weights)}
    for rank, answer in enumerate(answers):
        expected = two_level_bytes_per_step(
            layout,
            scenario.nodes or ((0,), (1,), (2,)),
            [[number[name] for name in b] for step in answer["buckets"] for b in step],
            rank,
            chunk_bytes=chunk_bytes,
            on_streams=device == "streamed",
            commits=scenario.steps - 1,  # of every step, at the beginning of the next
        )
        assert (answer["stats"]["wire_bytes"], answer["stats"]["local_bytes"]) == expected
        assert (expected[0] == 0) == (nodes == "1x4")


@pytest.mark.parametrize(
    ("scenario", "num_seeds"),
    [
        pytest.param(SCENARIO, 4, id="native"),
        pytest.param(dataclasses.replace(SCENARIO, native=False), 2, id="python"),
        pytest.param(scenario_on("2+1", MANY_CHUNKS), 3, id="nodes"),
        pytest.param(SCENARIO, 20, id="native, often", marks=pytest.mark.slow),
        pytest.param(scenario_on("2x2", MANY_CHUNKS), 6, id="2x2, often", marks=pytest.mark.slow),
    ],
)
def test_numbers_do_not_depend_on_the_order_of_streams(
    device_worlds: Worlds, scenario: Scenario, num_seeds: int
) -> None:
    stats = check(device_worlds, scenario, num_seeds)[0]["stats"]
    assert stats["chunks"] > (6 if scenario.nodes else 4) * scenario.steps


def case_in_line(scenario: Scenario) -> dict[str, Any] | None:
    import fake_device

    fake_device.group("streamed")
    fake_device.backends["streamed"].set_in_line(True)
    try:
        return case_train(scenario, seeds=[1, 2])
    finally:
        fake_device.backends["streamed"].set_in_line(False)


def test_a_backend_without_works_is_waited_for(device_worlds: Worlds) -> None:
    # DDP's own collectives need a Work, so only the hook's are in line.
    assert_bit_equal(device_worlds(2).run(case_in_line, scenario=SCENARIO), SCENARIO)


@pytest.mark.parametrize("device", DEVICES)
def test_nodes_are_those_of_the_ranks_in_a_group(device_worlds: Worlds, device: str) -> None:
    scenarios = groups_at_once(
        error_feedback="both", ddp={"bucket_cap_mb": 0.1}, options={"check_every": 2}, device=device
    )
    answers = device_worlds(6).run(case_train, scenario=scenarios[0], beside=scenarios[1:])
    for scenario in scenarios:
        assert_bit_equal([answers[rank] for rank in scenario.group_ranks], scenario)
