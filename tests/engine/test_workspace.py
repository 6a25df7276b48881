"""The memory for messages keeps within workspace_cap_mb; less of it changes no result."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
from engine_options import engine_options, parameter
from gradferry.ddp.state import bound_to
from mixed import mapped_bytes, scenario_on
from scenario import Run, Scenario, Weight, assert_bit_equal, trained
from streaming import small_chunks
from watching import expect_no_race
from world import Worlds, WorldsOn

CAP_MB = 96
WEIGHTS = (Weight("first", (150, 200)), Weight("bias", (77,)), Weight("second", (120, 100)))
FLAT = Scenario(
    WEIGHTS, 2, steps=3, codec="q8", error_feedback="both", rules=(("second", "exact"),)
)
# So many chunks between nodes that each slot is used again and again while siblings are in others.
LONG = dataclasses.replace(
    FLAT,
    weights=(Weight("first", (11, 4096)), Weight("bias", (77,)), Weight("second", (3, 4096))),
    codec="exact",
    rules=(),
    ddp={"bucket_cap_mb": 0.01},
)


def case_train(scenario: Scenario, caps: tuple[float, ...]) -> list[dict[str, Any]]:
    """Trains within each limit; `workspace` is what the engine planned."""
    answers = []
    small = scenario.nodes and scenario.device != "cpu"
    for cap in caps:
        with small_chunks() if small else contextlib.nullcontext():
            run = Run(dataclasses.replace(scenario, options={"workspace_cap_mb": cap}))
        answer = trained(run)
        answer["workspace"] = bound_to(run.state).running.engine.workspace()
        answer["mapped"], answer["shown"] = mapped_bytes(), str(run.state)
        answers.append(answer)
        if scenario.device != "cpu":
            from fake_device import machine

            machine.synchronize()
            expect_no_race()
    return answers


def flat(device: str, error_feedback: str, wanted: dict[float, int]) -> Any:
    scenario = dataclasses.replace(FLAT, device=device, error_feedback=error_feedback)
    return pytest.param(scenario, wanted, id=device)


# Of what takes how many slots. Two chunks on streams may take what four take elsewhere, up to what
# the model has.
CAPS = {
    ("2x2", "cpu"): {2: 0.35},
    ("2+1", "cpu"): {1: 0.2, 4: 96},
    ("1x4", "cpu"): {2: 0.4},
    ("2+1", "streamed"): {1: 0.4, 2: 1.4, 3: 4.6, 4: 6, 5: 96},
    ("2+1", "staged"): {1: 0.4, 3: 1.4},
    ("2x2", "streamed"): {1: 0.4, 3: 2.9},
}


def nodes(name: str, device: str, marks: Any = ()) -> Any:
    wanted = {cap: slots for slots, cap in CAPS[name, device].items()}
    scenario = scenario_on(name, LONG, device=device)
    return pytest.param(scenario, wanted, id=f"{name}, {device}", marks=marks)


# Of two ranks and a tile of fp32 as it is: a slot has 17,490 bytes to owners and as many gathered
# (a message of 16,448, 8 headers, and 1/32 of both), 32,896 received, and on a device 16,448 that
# are sent to all: 67,876 bytes on a host, 84,324 on a device.
@pytest.mark.parametrize(
    ("scenario", "wanted"),
    [
        flat("cpu", "both", {0.067: 1, 0.14: 2}),
        flat("cpu", "owner", {0.067: 1}),
        flat("streamed", "owner", {0.083: 1, 0.17: 2}),
        flat("streamed", "both", {0.083: 1}),
        flat("staged", "both", {0.083: 1, 0.17: 2}),
        nodes("2x2", "cpu"),
        nodes("2+1", "cpu"),
        nodes("1x4", "cpu"),
        nodes("2+1", "streamed"),
        nodes("2+1", "staged"),
        nodes("2x2", "streamed", marks=pytest.mark.slow),
    ],
)
def test_less_memory_changes_no_result(
    worlds_on: WorldsOn,
    scenario: Scenario,
    wanted: dict[float, int],
) -> None:
    """By limit: the slots, also on a node of one rank, which needs less, since the order of
    collectives depends on them.
    """
    world = worlds_on(scenario.device)(scenario.world_size)
    by_rank = world.run(case_train, scenario=scenario, caps=tuple(wanted), seconds=300)
    for answers, (cap_mb, slots) in zip(zip(*by_rank, strict=True), wanted.items(), strict=True):
        assert_bit_equal(list(answers), scenario)
        for rank, answer in enumerate(answers):
            workspace, cap = answer["workspace"], cap_mb * 2**20
            assert workspace["slots"] == slots
            assert answer["stats"]["workspace_bytes"] <= cap
            assert f"{slots} chunks in flight" in answer["shown"]
            siblings = next((m for m in scenario.nodes or () if rank in m), ())
            if len(siblings) > 1 and scenario.device == "cpu":
                assert 0 < answer["mapped"] <= len(siblings) * cap


def case_large_world(world_size: int) -> dict[str, Any]:
    """The engine of one rank of a large world, which exchanges nothing."""
    import fake_device
    from fake_device import machine
    from gradferry import _native
    from gradferry.core import device

    device.load_kernels("fake")
    cap = CAP_MB << 20
    options = engine_options(
        parameters=[parameter("matrix", 1 << 26, "q4"), parameter("bias", 8192, "exact")],
        rank=5,
        nodes=[[rank] for rank in range(world_size)],
        check_every=10,
        chunk_bytes=_native.chunk_bytes_within(cap, world_size, _native.STREAM_CHUNK_BYTES),
        workspace_cap_bytes=cap,
    )
    machine.synchronize()
    before = machine.counters()["held_bytes"]
    engine = _native.DeviceEngine(
        options,
        device=fake_device.DEVICE,
        tensors=[],
        lanes={},
        group_name="of no one",
        chained=False,
    )
    machine.synchronize()
    held = machine.counters()["held_bytes"] - before
    expect_no_race()
    return {**engine.workspace(), "held": held, "counted": engine.stats()["workspace_bytes"]}


def test_an_engine_of_a_large_world_holds_no_more_than_it_says(device_worlds: Worlds) -> None:
    world_size = 64
    (answer,) = device_worlds(1).run(case_large_world, world_size=world_size)
    assert answer["slots"] == 3
    assert answer["counted"] <= CAP_MB << 20
    # Counted are messages, commits and hashes; not the sums and verdicts of a world, findings, and
    # the three numbers that are kept of a loss scale.
    assert 0 <= answer["held"] - answer["counted"] <= 12 * world_size + 1024
    # Four chunks of such messages take seven eighths of the limit, so three of them at least half.
    assert answer["counted"] > CAP_MB << 19
