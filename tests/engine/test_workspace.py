"""The memory for messages keeps within workspace_cap_mb; less of it changes no result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from engine_options import engine_options, parameter
from mixed import NODES, scenario_on
from outcomes import attempt
from scenario import Run, Scenario, Weight, assert_bit_equal, trained
from watching import expect_no_race
from world import World

Worlds = Callable[[int], World]

CAP_MB = 96
WEIGHTS = (Weight("first", (150, 200)), Weight("bias", (77,)), Weight("second", (120, 100)))
SCENARIO = Scenario(
    WEIGHTS, 2, steps=3, codec="q8", error_feedback="both", rules=(("second", "exact"),)
)


def case_train(scenario: Scenario) -> dict[str, Any]:
    """Trains; `workspace` is what the engine planned."""
    run = Run(scenario)
    answer = trained(run)
    answer["workspace"] = run.state._bound().running.engine.workspace()
    answer["shown"] = str(run.state)
    if scenario.device != "cpu":
        from fake_device import machine

        machine.synchronize()
        expect_no_race()
    return answer


# Of two ranks and a tile of fp32 as it is: a slot has 4,288 + 16,448 bytes to owners, 2 x 32,896
# received, 16,448 sent to all (on a host in the place where it would be received). That is 102,976
# bytes (86,528), or 70,080 where one buffer receives.
@pytest.mark.parametrize(
    ("device", "error_feedback", "cap_mb"),
    [
        ("cpu", "both", 0.08),
        ("cpu", "owner", 0.101),
        ("cpu", "both", 0.21),
        ("streamed", "owner", 0.08),
        ("streamed", "both", 0.101),
        ("streamed", "owner", 0.21),
        ("staged", "both", 0.08),
        ("staged", "owner", 0.21),
    ],
)
def test_less_memory_changes_no_result(
    worlds_on: Callable[[str], Worlds], device: str, error_feedback: str, cap_mb: float
) -> None:
    slots, shared = {0.08: (1, True), 0.101: (1, False), 0.21: (2, False)}[cap_mb]
    scenario = dataclasses.replace(
        SCENARIO,
        device=device,
        error_feedback=error_feedback,
        options={"workspace_cap_mb": cap_mb},
    )
    answers = worlds_on(device)(2).run(case_train, scenario=scenario)
    assert_bit_equal(answers, scenario)
    for answer in answers:
        assert answer["workspace"]["slots"] == slots
        assert bool(answer["workspace"]["shared_receive"]) == shared
        assert answer["stats"]["workspace_bytes"] <= cap_mb * 2**20
        assert f"{slots} chunks in flight" in answer["shown"]


@pytest.mark.parametrize(
    ("of_nodes", "cap_mb", "slots"),
    [("2x2", 0.4, None), ("2+1", 96, 4), ("2+1", 0.4, None), ("1x4", 0.4, None)],
)
def test_less_memory_between_nodes_changes_no_result(
    worlds: Worlds, of_nodes: str, cap_mb: float, slots: int | None
) -> None:
    scenario = scenario_on(of_nodes, SCENARIO, options={"workspace_cap_mb": cap_mb})
    nodes, world_size = NODES[of_nodes], scenario.world_size
    answers = worlds(world_size).run(case_train, scenario=scenario)
    assert_bit_equal(answers, scenario)
    rails = min(map(len, nodes))
    assert (min(answer["workspace"]["slots"] for answer in answers) < 4) == (slots is None)
    for rank, answer in enumerate(answers):
        siblings = next(members for members in nodes if rank in members)
        is_leader = siblings.index(rank) < rails
        planned, counted = answer["workspace"], answer["stats"]["workspace_bytes"]
        assert planned["slots"] == slots or slots is None
        shares = len(siblings) > 1
        assert planned["siblings_share"] == shares
        slot = sum(planned[f"{part}_bytes"] for part in ("dense", "send", "receive", "gathered"))
        # Beside chunks only commits, of which 8 buckets are in flight.
        assert counted == planned["slots"] * slot + 8 * 64 * world_size
        assert counted <= cap_mb * 2**20
        copies = 1 + is_leader
        received = planned["receive_bytes"] + planned["gathered_bytes"]
        # With a header for every sibling, and up to a page.
        expected = copies * len(nodes) * planned["message_bytes"]
        assert expected < received <= expected + 64 + 4096
        assert (planned["send_bytes"] > 0) == is_leader
        assert f"{planned['slots']} chunks in flight" in answer["shown"]


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


def case_other_cap(scenario: Scenario) -> Any:
    import torch.distributed as dist

    options = {"workspace_cap_mb": 96 - dist.get_rank()}
    return attempt(lambda: Run(dataclasses.replace(scenario, options=options)))


def test_ranks_must_agree_on_the_limit(world_of_2: World) -> None:
    for outcome in world_of_2.run(case_other_cap, scenario=SCENARIO):
        assert outcome.error == "RankMismatchError"
        assert "workspace_cap_mb" in outcome.text
