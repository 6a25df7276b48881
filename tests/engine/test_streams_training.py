"""Saved states, and the check of parameters, on the fake device of ./streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outcomes import attempt
from reducing import same
from scenario import Run, Scenario, Weight
from stepping import flip_last_bit
from streaming import DEVICES, SCENARIO
from watching import expect_no_race
from world import World

Worlds = Callable[[int], World]


@pytest.mark.parametrize("device", DEVICES)
def test_a_saved_state_moves_between_devices(device_worlds: Worlds, device: str) -> None:
    scenario = dataclasses.replace(SCENARIO, device=device)
    device_worlds(2).run(case_move_state, scenario=scenario)


def case_move_state(scenario: Scenario) -> None:
    """Three steps on the CPU, then two on the device, and the other way round."""
    on = {
        device: dataclasses.replace(scenario, device=device) for device in ("cpu", scenario.device)
    }
    runs = {device: Run(on[device]) for device in on}
    for run in runs.values():
        for step in range(3):
            run.step(step)
    states = {device: run.state.state_dict() for device, run in runs.items()}
    assert same(*states.values())
    assert states["cpu"][f"slot_{dist.get_rank()}"]["worker"].abs().sum() > 0
    straight = [runs["cpu"].step(step) for step in range(3, 5)]
    for device, other in zip(on, reversed(on), strict=True):
        run = Run(on[device])
        run.state.load_state_dict(states[other])
        for step, expected in zip(range(3, 5), straight, strict=True):
            assert all(a.tobytes() == b.tobytes()
                       for a, b in zip(run.step(step), expected, strict=True))  # fmt: skip


# The fake device has no views of complex numbers as real ones.
KINDS = (
    Weight("first", (90, 70)),
    Weight("bias", (51,), torch.bfloat16),
    Weight("channels", (32, 20, 3, 3), channels_last=True),
    Weight("fp64", (5, 7), torch.float64),
    Weight("empty", (0, 3)),
    Weight("one", (1,)),
)


def case_check(scenario: Scenario, change: tuple[int, int, str] | None) -> dict[str, Any]:
    """`change` (step, rank, name) moves the last bit of a parameter before a step."""
    import fake_device

    run = Run(scenario)
    outcomes = []
    for step in range(5):
        if change is not None and change[:2] == (step, run.rank):
            parameter = run.model.get_parameter(change[2])
            with torch.no_grad():
                host = parameter.detach().cpu()
                flip_last_bit(host)
                parameter.copy_(host)
        outcomes.append(attempt(lambda step=step: run.step(step)))
    # A pass that raised has read parameters on autograd's thread and waited for it there. This one,
    # which frees them, came after it; the machine does not see that.
    fake_device.machine.synchronize()
    expect_no_race()
    sent = run.state.stats()["wire_bytes"] if change is None else 0
    return {"outcomes": outcomes, "wire_bytes": sent}


def check_scenario(device: str, every: int) -> Scenario:
    return Scenario(
        KINDS, 3, options={"check_every": every}, ddp={"bucket_cap_mb": 0.02}, device=device
    )


@pytest.mark.torch_core
@pytest.mark.parametrize("device", ["streamed", "staged"])
def test_equal_parameters_raise_no_alarm(device_worlds: Worlds, device: str) -> None:
    bytes_by_every = []
    for every in (0, 2):
        scenario = check_scenario(device, every)
        answers = device_worlds(3).run(case_check, scenario=scenario, change=None)
        for answer in answers:
            assert [o.error for o in answer["outcomes"]] == [None] * 5
        bytes_by_every.append([answer["wire_bytes"] for answer in answers])
    for plain, checked in zip(*bytes_by_every, strict=True):
        assert checked - plain == 2 * 2 * (64 + 8 * len(KINDS))  # steps 2 and 4


@pytest.mark.parametrize(("device", "name"), [("staged", "channels"), ("streamed", "bias")])
def test_one_bit_on_one_rank_is_named_on_all(device_worlds: Worlds, device: str, name: str) -> None:
    scenario = check_scenario(device, 4)
    # In the step that looks: adding a gradient may round the bit away.
    answers = device_worlds(3).run(case_check, scenario=scenario, change=(4, 2, name))
    for answer in answers:
        outcomes = answer["outcomes"]
        assert [o.error for o in outcomes] == [None] * 4 + ["DivergedError"]
        assert f"parameter '{name}' of rank 2 differs from that of rank 0 at step 4" in (
            outcomes[4].text
        )
    assert len({answer["outcomes"][4].headline for answer in answers}) == 1
