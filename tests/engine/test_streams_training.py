"""What training asks of the hook, on the fake device of ./streams: OneBitAdam, loss scales, saved
states and the check of parameters. Everything must come out as on the CPU, to the bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from outcomes import attempt
from scenario import ChosenGradients, Run, Scenario, Weight
from test_streams import DEVICES, SCENARIO, small_chunks
from torch.nn.parallel import DistributedDataParallel
from watching import expect_no_race
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (
    Weight("embedding", (70, 64)),
    Weight("just_compressed", (32, 32)),
    Weight("wide", (3, 4099)),
    Weight("bias", (67,)),
)


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


class Models:
    """The same model on the CPU and on a device, with hooks of the same options."""

    def __init__(self, device: str, codec: str, scale: float | None = None, **options: Any) -> None:
        import fake_device
        import gradferry

        self.device = device
        self.places = {"cpu": torch.device("cpu"), device: fake_device.DEVICE}
        groups = {"cpu": None, device: fake_device.group(device)}
        self.models, self.ddps, self.states, self.scalers = {}, {}, {}, {}
        for name, place in self.places.items():
            if scale is not None:
                self.scalers[name] = torch.amp.GradScaler(
                    place.type, init_scale=scale, growth_interval=3
                )
            self.models[name] = ChosenGradients(Scenario(WEIGHTS)).to(place)
            self.ddps[name] = DistributedDataParallel(
                self.models[name], process_group=groups[name], bucket_cap_mb=0.05
            )
            self.states[name] = gradferry.attach(
                self.ddps[name], codec, grad_scaler=self.scalers.get(name), **options
            )

    def backward(self, name: str, seed: int, poison: str | None = None) -> None:
        self.ddps[name].zero_grad()
        scenario = Scenario(WEIGHTS, seed=seed)
        targets = {}
        for index, weight in enumerate(WEIGHTS):
            gradient = scenario.gradient(0, 0, dist.get_rank(), index)
            if weight.name == poison and dist.get_rank() == 0:
                gradient[3] = np.inf
            targets[weight.name] = weight.from_flat(gradient).to(self.places[name])
        loss = self.ddps[name](targets)
        scaler = self.scalers.get(name)
        (loss if scaler is None else scaler.scale(loss)).backward()

    def bits(self, name: str) -> list[bytes]:
        """Of gradients, residuals and, where an optimizer gives the CPU's, of parameters.

        A GPU multiplies one NaN into another: there all are the same one.
        """
        import fake_device

        slot = self.states[name].state_dict()[f"slot_{dist.get_rank()}"]
        parameters = list(self.models[name].parameters())
        tensors = [*(p.grad for p in parameters), slot["worker"], slot["owner"]]
        if fake_device.COMPUTES_AS_THE_CPU:
            tensors = [*parameters, *tensors]
        else:
            tensors = [tensor.masked_fill(tensor.isnan(), math.nan) for tensor in tensors]
        return [tensor.detach().cpu().numpy().tobytes() for tensor in tensors]

    def are_equal(self) -> bool:

        expect_no_race()
        return self.bits("cpu") == self.bits(self.device)


def case_one_bit_adam(
    device: str, codec: str, skipped: tuple[int, ...], warmup: str
) -> dict[str, Any]:
    """OneBitAdam under a GradScaler, with infinite gradients in the steps of `skipped`."""
    from gradferry.optim import OneBitAdam

    freeze = 3
    with small_chunks():
        options = {"momentum": 0.9, "warmup_steps": freeze, "warmup": warmup}
        models = Models(device, codec, scale=2.0**10, **options)
    optimizers = {
        name: OneBitAdam(ddp.parameters(), lr=0.01, freeze_step=freeze, state=models.states[name])
        for name, ddp in models.ddps.items()
    }
    equal = []
    for step in range(7):
        for name, optimizer in optimizers.items():
            models.backward(name, step, poison="wide" if step in skipped else None)
            models.scalers[name].step(optimizer)
            models.scalers[name].update()
        equal.append(models.are_equal())
    return {
        "equal": equal,
        "scales": len({scaler.get_scale() for scaler in models.scalers.values()}),
        "moved": any(p.abs().max() > 0 for p in models.models["cpu"].parameters()),
    }


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("device", "codec", "warmup", "skipped"),
    [
        ("streamed", "sign1", "exact", (2, 5)),
        ("staged", "topk:ratio=0.05", "exact", ()),
        ("staged", "sign1", "q8", (2, 5)),
    ],
)
def test_one_bit_adam_trains_as_on_the_cpu(
    worlds: Worlds, device: str, codec: str, warmup: str, skipped: tuple[int, ...]
) -> None:
    arguments = {"device": device, "codec": codec, "warmup": warmup, "skipped": skipped}
    for answer in worlds(2).run(case_one_bit_adam, **arguments):
        assert answer == {"equal": [True] * 7, "scales": 1, "moved": True}


# --- loss scales and states -----------------------------------------------------------------------


def case_loss_scale(device: str) -> dict[str, Any]:
    models = Models(device, "q8", error_feedback="both", scale=1024.0)
    equal = []
    for step, scale in enumerate((1024.0, 512.0, 512.0, 3.0)):
        for name in models.ddps:
            models.scalers[name].update(new_scale=scale)
            models.backward(name, step)
        equal.append(models.are_equal())
    scales = {state.state_dict()["loss_scale"] for state in models.states.values()}
    return {"equal": equal, "scales": scales}


@pytest.mark.parametrize("device", DEVICES)
def test_residuals_follow_the_loss_scale_as_on_the_cpu(worlds: Worlds, device: str) -> None:
    for answer in worlds(2).run(case_loss_scale, device=device):
        assert answer == {"equal": [True] * 4, "scales": {3.0}}


def case_move_state(scenario: Scenario) -> dict[str, Any]:
    """Three steps on the CPU, then two on the device, and the other way round."""
    on = {
        device: dataclasses.replace(scenario, device=device) for device in ("cpu", scenario.device)
    }
    runs = {device: Run(on[device]) for device in on}
    for run in runs.values():
        for step in range(3):
            run.step(step)
    states = {device: run.state.state_dict() for device, run in runs.items()}
    slot = f"slot_{dist.get_rank()}"
    residuals = [state.pop(slot) for state in states.values()]
    assert states["cpu"] == states[scenario.device]
    for name, residual in residuals[0].items():
        assert torch.equal(residual, residuals[1][name])
    states = {device: {**state, slot: residuals[0]} for device, state in states.items()}
    straight = [runs["cpu"].step(step) for step in range(3, 5)]
    gradients = []
    for device, other in zip(on, reversed(on), strict=True):
        run = Run(on[device])
        run.state.load_state_dict(states[other])
        gradients.append([run.step(step) for step in range(3, 5)])
    return {
        "equal": all(
            a.tobytes() == b.tobytes()
            for moved in gradients
            for one, other in zip(straight, moved, strict=True)
            for a, b in zip(one, other, strict=True)
        ),
        "residual": float(residuals[0]["worker"].abs().sum()),
    }


@pytest.mark.parametrize("device", DEVICES)
def test_a_saved_state_moves_between_devices(worlds: Worlds, device: str) -> None:
    scenario = dataclasses.replace(SCENARIO, device=device)
    for answer in worlds(2).run(case_move_state, scenario=scenario):
        assert answer["residual"] > 0
        assert answer["equal"]


# --- check of parameters --------------------------------------------------------------------------

# The fake device has no views of complex numbers as real ones.
KINDS = (
    Weight("first", (90, 70)),
    Weight("bias", (51,), torch.bfloat16),
    Weight("channels", (32, 20, 3, 3), channels_last=True),
    Weight("fp64", (5, 7), torch.float64),
    Weight("empty", (0, 3)),
    Weight("one", (1,)),
)


def check_scenario(device: str, every: int, **changes: Any) -> Scenario:
    plain = Scenario(KINDS, 3, options={"check_every": every}, ddp={"bucket_cap_mb": 0.02})
    return dataclasses.replace(plain, device=device, **changes)


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
                flat = host.as_strided((host.numel(),), (1,)).view(torch.uint8)
                flat[-host.element_size()] ^= 1
                parameter.copy_(host)
        outcomes.append(attempt(lambda step=step: run.step(step)))
    # A pass that raised has read parameters on autograd's thread and waited for it there. This one,
    # which frees them, came after it; the machine does not see that.
    fake_device.machine.synchronize()
    expect_no_race()
    return {
        "outcomes": outcomes,
        "wire_bytes": run.state.stats()["wire_bytes"] if change is None else 0,
    }


@pytest.mark.torch_core
@pytest.mark.parametrize("device", ["streamed", "staged"])
def test_equal_parameters_raise_no_alarm(worlds: Worlds, device: str) -> None:
    bytes_by_every = []
    for every in (0, 2):
        answers = worlds(3).run(case_check, scenario=check_scenario(device, every), change=None)
        for answer in answers:
            assert [o.error for o in answer["outcomes"]] == [None] * 5
        bytes_by_every.append([answer["wire_bytes"] for answer in answers])
    for plain, checked in zip(*bytes_by_every, strict=True):
        assert checked - plain == 2 * 2 * (64 + 8 * len(KINDS))  # steps 2 and 4


@pytest.mark.parametrize(
    ("device", "name"), [("streamed", "first"), ("staged", "channels"), ("streamed", "bias")]
)
def test_one_bit_on_one_rank_is_named_on_all(worlds: Worlds, device: str, name: str) -> None:
    scenario = check_scenario(device, 4)
    # In the step that looks: adding a gradient may round the bit away.
    answers = worlds(3).run(case_check, scenario=scenario, change=(4, 2, name))
    for answer in answers:
        outcomes = answer["outcomes"]
        assert [o.error for o in outcomes] == [None] * 4 + ["DivergedError"]
        assert f"parameter '{name}' of rank 2 differs from that of rank 0 at step 4" in (
            outcomes[4].text
        )
    assert len({answer["outcomes"][4].headline for answer in answers}) == 1
