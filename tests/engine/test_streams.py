"""Numbers and bytes on a device with streams: the fake device of tests/engine/streams, under real
DDP. The numbers are those of the reference, whatever order streams run in.

test_stream_waits.py has the waits and launches, test_streams_training.py what equals the CPU, and
test_streams_safety.py errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from gradferry import _native
from mixed import MOMENTUM, groups_at_once, mixed, poisons, scenario_on
from reference import Layout, two_level_bytes_per_step
from scenario import Run, Scenario, Weight, assert_bit_equal, train_at_once, trained
from watching import expect_no_race
from world import World

Worlds = Callable[[int], World]

# The least there can be: several chunks per bucket, and more than the four slots per step.
CHUNK_BYTES = 32768
WEIGHTS = (
    Weight("first", (200, 300)),
    Weight("bias", (77,)),
    Weight("second", (310, 211)),
    Weight("third", (100, 120)),
)
SCENARIO = Scenario(
    WEIGHTS,
    2,
    steps=4,
    codec="q8",
    error_feedback="both",
    rules=(("second", "exact"), ("third", "bf16")),
    device="streamed",
    ddp={"bucket_cap_mb": 0.2},
)
# For what does not depend on the transport.
DEVICES = ["streamed", pytest.param("staged", marks=pytest.mark.slow)]


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


def small_chunks() -> Any:
    """Over either transport."""
    from gradferry.core import device

    def adapted(transport: Any, config: Any) -> Any:
        return dataclasses.replace(config, chunk_bytes=CHUNK_BYTES, equal_scatter=transport.streams)

    return mock.patch.object(device.Transport, "adapted", adapted)


def case_train(
    scenario: Scenario,
    seeds: Sequence[int] = (1,),
    beside: Sequence[Scenario] = (),
    small: bool = True,
) -> dict[str, Any] | None:
    """Trains once per seed of the streams' order; what they gave must be the same.

    beside: scenarios of other groups of ranks; small: with the smallest chunks.
    """
    from fake_device import machine

    answers = []
    with small_chunks() if small else contextlib.nullcontext():
        for seed in seeds:
            machine.set_seed(seed * 100 + dist.get_rank())
            answers.append(train_at_once(scenario, *beside))
    first = answers[0]
    for answer in answers[1:]:
        assert answer["hashes"] == first["hashes"]
        for one, other in zip(answer["gradients"], first["gradients"], strict=True):
            for a, b in zip(one, other, strict=True):
                assert a.tobytes() == b.tobytes()
    expect_no_race()
    return first


def check(worlds: Worlds, scenario: Scenario, num_seeds: int = 1) -> list[dict[str, Any]]:
    seeds = list(range(num_seeds))
    answers = worlds(scenario.world_size).run(
        case_train, scenario=scenario, seeds=seeds, seconds=300
    )
    assert_bit_equal(answers, scenario)
    return answers


def warming_up(codec: str, warmup: str, world_size: int, device: str) -> Scenario:
    options = {"momentum": 0.9, "warmup_steps": 2, "warmup": warmup}
    plain = dataclasses.replace(SCENARIO, error_feedback="auto", world_size=world_size)
    return dataclasses.replace(plain, codec=codec, options=options, device=device)


# Later steps show what became of the residuals of every rank.
POISONED = {"poison": poisons(3), "steps": 4}


@pytest.mark.torch_core
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(mixed(2, device="streamed"), id="streamed"),
        pytest.param(mixed(3, device="staged", **POISONED), id="staged, not finite"),
        pytest.param(
            mixed(3, device="streamed", **MOMENTUM, **POISONED), id="momentum, not finite"
        ),
        pytest.param(mixed(2, device="staged", **MOMENTUM), id="staged, momentum"),
        pytest.param(mixed(1, device="streamed", **MOMENTUM), id="momentum alone"),
        pytest.param(mixed(1, device="staged", **MOMENTUM), id="staged, momentum alone"),
        pytest.param(warming_up("sign1", "q8", 2, "streamed"), id="warm-up"),
        pytest.param(warming_up("topk:ratio=0.05", "q4", 3, "staged"), id="staged, warm-up"),
        pytest.param(warming_up("q4", "q8", 1, "streamed"), id="warm-up alone"),
        pytest.param(
            scenario_on("2+1", mixed(3, device="streamed", **MOMENTUM, **POISONED)),
            id="nodes, momentum, not finite",
        ),
        pytest.param(
            scenario_on("2+1", mixed(3, device="staged", empty=((1, 0), (1, 1), (2, 2)))),
            id="nodes, staged, zeros",
        ),
        pytest.param(
            scenario_on("2+1", SCENARIO, options={"check_every": 2}, passes=2, steps=3),
            id="nodes, check_every, passes",
        ),
        pytest.param(
            scenario_on("2+1", warming_up("topk:ratio=0.05", "q8", 3, "staged")),
            id="nodes, staged, warm-up",
        ),
    ],
)
def test_gradients_on_a_device_equal_the_reference(worlds: Worlds, scenario: Scenario) -> None:
    check(worlds, scenario)


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
    worlds: Worlds, nodes: str | None, device: str, chunk_bytes: int
) -> None:
    scenario = dataclasses.replace(SCENARIO, world_size=3, device=device)
    scenario = scenario_on(nodes, scenario) if nodes else scenario
    small = chunk_bytes == CHUNK_BYTES
    answers = worlds(scenario.world_size).run(case_train, scenario=scenario, small=small)
    assert_bit_equal(answers, scenario)
    layout = Layout(
        [w.describe() for w in WEIGHTS], scenario.codec, scenario.world_size, scenario.rules
    )
    number = {weight.name: index for index, weight in enumerate(WEIGHTS)}
    for rank, answer in enumerate(answers):
        expected = two_level_bytes_per_step(
            layout,
            scenario.nodes or ((0,), (1,), (2,)),
            [[number[name] for name in b] for step in answer["buckets"] for b in step],
            rank,
            chunk_bytes=chunk_bytes,
            equal_scatter=device == "streamed",
            commits=scenario.steps - 1,  # of every step, at the beginning of the next
        )
        assert (answer["stats"]["wire_bytes"], answer["stats"]["local_bytes"]) == expected
        assert (expected[0] == 0) == (nodes == "1x4")


# A bucket of more chunks than are in flight, which have tiles of both rails, of one, or of none.
MANY_CHUNKS = dataclasses.replace(
    SCENARIO,
    weights=(Weight("first", (59, 4096)), Weight("bias", (4095,)), Weight("second", (3, 4096))),
    rules=(("second", "q8"),),
    codec="exact",
    ddp={},
    steps=3,
    options={"momentum": 0.9},
)


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
    worlds: Worlds, scenario: Scenario, num_seeds: int
) -> None:
    stats = check(worlds, scenario, num_seeds)[0]["stats"]
    assert stats["chunks"] > (6 if scenario.nodes else 4) * scenario.steps


def case_in_line(scenario: Scenario) -> dict[str, Any] | None:
    import fake_device

    fake_device.group("streamed")
    fake_device.backends["streamed"].set_in_line(True)
    try:
        return case_train(scenario, seeds=[1, 2])
    finally:
        fake_device.backends["streamed"].set_in_line(False)


def test_a_backend_without_works_is_waited_for(worlds: Worlds) -> None:
    # DDP's own collectives need a Work, so only the hook's are in line.
    assert_bit_equal(worlds(2).run(case_in_line, scenario=SCENARIO), SCENARIO)


def case_slots(scenarios: list[Scenario]) -> list[dict[str, Any]]:
    """Trains in each; with how many slots."""
    from gradferry.ddp.state import bound_to

    answers = []
    with small_chunks():
        for scenario in scenarios:
            run = Run(scenario)
            slots = bound_to(run.state).running.engine.workspace()["slots"]
            answers.append({**trained(run), "slots": slots})
    expect_no_race()
    return answers


# By slots: of 0.3 MiB in a node of two, and larger ones where there is room.
CAPS_MB = {1: 0.4, 2: 0.75, 3: 1.4, 4: 2, 5: 96}


@pytest.mark.parametrize(
    ("nodes", "device", "error_feedback"),
    [
        ("2+1", "streamed", "owner"),
        ("2+1", "staged", "both"),
        pytest.param("2x2", "streamed", "both", marks=pytest.mark.slow),
    ],
)
def test_fewer_slots_than_stages_change_no_result(
    worlds: Worlds, nodes: str, device: str, error_feedback: str
) -> None:
    weights = (Weight("first", (11, 4096)), Weight("bias", (77,)), Weight("second", (3, 4096)))
    changes = {"weights": weights, "device": device, "error_feedback": error_feedback}
    scenario = scenario_on(nodes, SCENARIO, steps=2, rules=(), codec="exact", **changes)
    asked = [
        dataclasses.replace(scenario, options={"workspace_cap_mb": cap}) for cap in CAPS_MB.values()
    ]
    by_rank = worlds(scenario.world_size).run(case_slots, scenarios=asked)
    for index, slots in enumerate(CAPS_MB):
        answers = [answer[index] for answer in by_rank]
        assert_bit_equal(answers, scenario)
        # Also on a node of one rank, which needs less: the order of collectives depends on it.
        assert {answer["slots"] for answer in answers} == {slots}


@pytest.mark.parametrize("device", DEVICES)
def test_nodes_are_those_of_the_ranks_in_a_group(worlds: Worlds, device: str) -> None:
    scenarios = groups_at_once(
        error_feedback="both", ddp={"bucket_cap_mb": 0.1}, options={"check_every": 2}, device=device
    )
    answers = worlds(6).run(case_train, scenario=scenarios[0], beside=scenarios[1:])
    for scenario in scenarios:
        assert_bit_equal([answers[rank] for rank in scenario.group_ranks], scenario)


def case_alone(scenario: Scenario) -> dict[str, Any]:
    from gradferry.core import device

    plain = Run(scenario)
    untouched = plain.step(0)
    with mock.patch.object(device, "EXCHANGE_WHEN_ALONE", True):
        answer = case_train(scenario)
    return {"untouched": untouched, "chunks": plain.state.stats()["chunks"], "alone": answer}


def test_a_world_of_one_passes_gradients_on_unless_told_to_exchange(worlds: Worlds) -> None:
    scenario = dataclasses.replace(SCENARIO, world_size=1)
    (answer,) = worlds(1).run(case_alone, scenario=scenario)
    assert answer["chunks"] == 0
    assert answer["alone"]["stats"]["chunks"] > 0
    for index, weight in enumerate(scenario.weights):
        given = scenario.gradient(0, 0, 0, index)
        assert answer["untouched"][index].tobytes() == given.tobytes()
        # Exact parameters survive the exchange; of the others something is withheld.
        exchanged = answer["alone"]["gradients"][0][index]
        assert np.allclose(exchanged, given, rtol=2**-8, atol=np.abs(given).max() / 100)
        lossless = weight.name in ("bias", "second")
        assert (exchanged.tobytes() == given.tobytes()) == lossless


def test_momentum_alone_is_compressed_where_it_exchanges(worlds: Worlds) -> None:
    scenario = dataclasses.replace(SCENARIO, world_size=1, codec="sign1", rules=(), **MOMENTUM)
    (answer,) = worlds(1).run(case_alone, scenario=scenario)
    assert answer["alone"]["stats"]["chunks"] > 0
    lossy = answer["alone"]["gradients"][0][0]
    # sign1 gives one magnitude per block; the momentum would give thousands.
    assert len(np.unique(np.abs(lossy[:4096]))) <= 64


def case_equal_messages(scenario: Scenario) -> dict[str, Any]:
    import fake_device

    before = fake_device.backends["streamed"].num_equal
    answer = case_train(scenario)
    answer["equal"] = fake_device.backends["streamed"].num_equal - before
    return answer


# 3 * 4096 + 272 elements on two ranks: tiles of 2 x 16384 bytes for one and 16384 + 1088 for the
# other. In chunks of 32768 bytes, the whole is one chunk with 15296 bytes of padding, too many; in
# a bucket of 4096 + 4000 elements, 384 bytes of padding are less than 1/32 of 32512.
@pytest.mark.parametrize(("num_elements", "padded"), [(3 * 4096 + 272, False), (8096, True)])
def test_messages_to_owners_are_padded_where_that_costs_little(
    worlds: Worlds, num_elements: int, padded: bool
) -> None:
    weights = (Weight("weight", (num_elements // 8, 8)),)
    scenario = dataclasses.replace(SCENARIO, weights=weights, codec="exact", rules=())
    answers = worlds(2).run(case_equal_messages, scenario=scenario)
    assert_bit_equal(answers, scenario)
    for answer in answers:
        assert answer["equal"] == (scenario.steps if padded else 0)
