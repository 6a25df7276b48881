"""Saved states, and the check of parameters, on the fake device of ./streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from outcomes import Outcome, attempt
from saved import same
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


def case_check(scenario: Scenario, rank: int, name: str) -> list[Outcome]:
    """The last bit of a parameter of a rank changes before step 4."""
    import fake_device

    run = Run(scenario)
    outcomes = []
    for step in range(5):
        if (step, run.rank) == (4, rank):
            parameter = run.model.get_parameter(name)
            with torch.no_grad():
                host = parameter.detach().cpu()
                flip_last_bit(host)
                parameter.copy_(host)
        outcomes.append(attempt(lambda step=step: run.step(step)))
    # A pass that raised has read parameters on autograd's thread and waited for it there. This one,
    # which frees them, came after it; the machine does not see that.
    fake_device.machine.synchronize()
    expect_no_race()
    return outcomes


@pytest.mark.parametrize(("device", "name"), [("staged", "channels"), ("streamed", "bias")])
def test_one_bit_on_one_rank_is_named_on_all(device_worlds: Worlds, device: str, name: str) -> None:
    options, ddp = {"check_every": 4}, {"bucket_cap_mb": 0.02}
    scenario = Scenario(KINDS, 3, options=options, ddp=ddp, device=device)
    # In the step that looks: adding a gradient may round the bit away.
    answers = device_worlds(3).run(case_check, scenario=scenario, rank=2, name=name)
    for outcomes in answers:
        assert [o.error for o in outcomes] == [None] * 4 + ["DivergedError"]
        assert f"parameter '{name}' of rank 2 differs from that of rank 0 at step 4" in (
            outcomes[4].text
        )
    assert len({outcomes[4].headline for outcomes in answers}) == 1
