"""What training asks of the hook, on the fake device of ./streams: momentum, steps that are
taken back, and the check of parameters. Everything must come out as on the CPU, to the bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from outcomes import Outcome, attempt
from scenario import ChosenGradients, Run, Scenario, Weight, assert_bit_equal
from test_amp import case_skipped_passes
from test_check_every import KINDS, flip_last_bit
from test_momentum import DTYPES, WEIGHTS, scenario_of
from test_streams import case_train, small_chunks
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]
DEVICES = ("streamed", "staged")
# The fake device has no views of complex numbers as real ones.
REAL_DTYPES = tuple(weight for weight in DTYPES if not weight.dtype.is_complex)
REAL_KINDS = tuple(weight for weight in KINDS if not weight.dtype.is_complex)


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


def check(worlds: Worlds, scenario: Scenario, seeds: int = 2) -> None:
    answers = worlds(scenario.world_size).run(
        case_train, scenario=scenario, seeds=list(range(1, 1 + seeds)), seconds=300
    )
    assert_bit_equal(answers, scenario)


# --- momentum -------------------------------------------------------------------------------------


@pytest.mark.torch_core
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("codec", ["sign1", "topk:ratio=0.05", "exact"])
@pytest.mark.parametrize("device", DEVICES)
def test_momentum_equals_reference(
    worlds: Worlds, device: str, codec: str, world_size: int
) -> None:
    check(worlds, scenario_of(codec, world_size, device=device))


@pytest.mark.parametrize("codec", ["q4", "q8", "bf16", "rht:bits=2"])
def test_momentum_of_other_codecs_equals_reference(worlds: Worlds, codec: str) -> None:
    check(worlds, scenario_of(codec, 2, device="streamed"))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("codec", ["sign1", "exact"])
def test_momentum_equals_reference_with_every_dtype(
    worlds: Worlds, world_size: int, codec: str
) -> None:
    check(worlds, scenario_of(codec, world_size, weights=REAL_DTYPES, device="streamed"))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", ["sign1", "topk:ratio=0.05"])
def test_what_another_rank_made_non_finite_is_undone(
    worlds: Worlds, codec: str, poison: float
) -> None:
    # Later steps show what became of the residuals of every rank.
    places = {(1, 1, "wide"): poison, (2, 0, "bias"): poison, (2, 2, "embedding"): poison}
    check(worlds, scenario_of(codec, 3, poison=places, device="streamed"))
    places = {(1, 0, "fp16"): poison, (2, 1, "fp64"): poison, (3, 2, "bf16_bias"): poison}
    check(worlds, scenario_of(codec, 3, poison=places, weights=REAL_DTYPES, device="streamed"))
    feedback = {"error_feedback": "both", "options": {}}
    places = {(1, 1, "wide"): poison, (2, 0, "bias"): poison}
    check(worlds, scenario_of(codec, 3, poison=places, device="staged", **feedback))


@pytest.mark.parametrize(
    ("codec", "world_size", "warmup"),
    [("sign1", 2, "q8"), ("topk:ratio=0.05", 3, "q4"), ("q4", 1, "q8")],
)
@pytest.mark.parametrize("device", DEVICES)
def test_compressed_warmup_equals_reference(
    worlds: Worlds, device: str, codec: str, world_size: int, warmup: str
) -> None:
    options = {"momentum": 0.9, "warmup_steps": 3, "warmup": warmup}
    check(worlds, scenario_of(codec, world_size, device=device, options=options))


class Models:
    """The same model on the CPU and on a device, with hooks of the same options."""

    def __init__(
        self,
        device: str,
        codec: str,
        weights: tuple[Weight, ...] = WEIGHTS,
        scale: float | None = None,
        **options: Any,
    ) -> None:
        import fake_device
        import gradferry

        self.weights = weights
        self.groups = {"cpu": None, device: fake_device.group(device)}
        self.places = {"cpu": torch.device("cpu"), device: fake_device.DEVICE}
        self.models, self.ddps, self.states, self.scalers = {}, {}, {}, {}
        for name, group in self.groups.items():
            if scale is not None:
                self.scalers[name] = torch.amp.GradScaler(
                    self.places[name].type, init_scale=scale, growth_interval=3
                )
            self.models[name] = ChosenGradients(Scenario(weights)).to(self.places[name])
            self.ddps[name] = DistributedDataParallel(
                self.models[name], process_group=group, bucket_cap_mb=0.05
            )
            self.states[name] = gradferry.attach(
                self.ddps[name], codec, grad_scaler=self.scalers.get(name), **options
            )

    def backward(self, name: str, step: int, poison: str | None = None) -> None:
        self.ddps[name].zero_grad()
        scenario = Scenario(self.weights, seed=step)
        targets = {}
        for index, weight in enumerate(self.weights):
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


def case_one_bit_adam(
    device: str, codec: str, skipped: tuple[int, ...], warmup: str = "exact"
) -> dict[str, Any]:
    """OneBitAdam under a GradScaler, with infinite gradients in the steps of `skipped`."""
    import fake_device
    from gradferry.optim import OneBitAdam

    freeze = 3
    with small_chunks():
        options = {"momentum": 0.9, "warmup_steps": freeze, "warmup": warmup, "exact_skip": True}
        models = Models(device, codec, scale=2.0**10, **options)
    optimizers = {
        name: OneBitAdam(ddp.parameters(), lr=0.01, freeze_step=freeze, state=models.states[name])
        for name, ddp in models.ddps.items()
    }
    equal = []
    for step in range(8):
        for name, optimizer in optimizers.items():
            models.backward(name, step, poison="wide" if step in skipped else None)
            models.scalers[name].step(optimizer)
            models.scalers[name].update()
        equal.append(models.bits("cpu") == models.bits(device))
    return {
        "equal": equal,
        "scales": [scaler.get_scale() for scaler in models.scalers.values()],
        "races": fake_device.machine.races(),
        "moved": any(p.abs().max() > 0 for p in models.models["cpu"].parameters()),
    }


@pytest.mark.torch_core
@pytest.mark.parametrize("skipped", [(), (2, 5)], ids=["no_skips", "skips"])
@pytest.mark.parametrize(
    ("codec", "warmup"), [("sign1", "exact"), ("topk:ratio=0.05", "exact"), ("sign1", "q8")]
)
@pytest.mark.parametrize("device", DEVICES)
def test_one_bit_adam_trains_as_on_the_cpu(
    worlds: Worlds, device: str, codec: str, warmup: str, skipped: tuple[int, ...]
) -> None:
    arguments = {"device": device, "codec": codec, "warmup": warmup, "skipped": skipped}
    for answer in worlds(2).run(case_one_bit_adam, **arguments):
        assert answer["equal"] == [True] * 8
        assert answer["races"] == []
        assert answer["moved"]
        assert answer["scales"][0] == answer["scales"][1]


# --- steps that are taken back --------------------------------------------------------------------


def case_skips(device: str, codec: str, options: dict[str, Any]) -> dict[str, Any]:
    import fake_device

    models = Models(device, codec, exact_skip=True, scale=64.0, **options)
    names = ("cpu", device)
    equal, kept = [], []
    for step in range(7):
        before = models.bits(device)[-2:] if step else None
        for name in names:
            models.backward(name, step, poison="bias" if step in (2, 3) else None)
            models.scalers[name].update(new_scale=64.0 * (1 + step % 3))
            if step == 5:
                models.states[name].skip_step()
        after = models.bits(device)
        equal.append(models.bits("cpu") == after)
        kept.append(before == after[-2:])
    return {"equal": equal, "kept": kept, "races": fake_device.machine.races()}


@pytest.mark.parametrize(
    "options", [{"error_feedback": "both"}, {"momentum": 0.9}], ids=["plain", "momentum"]
)
@pytest.mark.parametrize("codec", ["sign1", "topk:ratio=0.05"])
@pytest.mark.parametrize("device", DEVICES)
def test_exact_skip_takes_steps_back_as_on_the_cpu(
    worlds: Worlds, device: str, codec: str, options: dict[str, Any]
) -> None:
    for answer in worlds(2).run(case_skips, device=device, codec=codec, options=options):
        assert answer["equal"] == [True] * 7
        assert answer["kept"] == [step in (2, 3, 5) for step in range(7)]
        assert answer["races"] == []


@pytest.mark.parametrize("poisoned", [0, 1, 2, None], ids=["first", "second", "last", "by_hand"])
@pytest.mark.parametrize("device", DEVICES)
def test_exact_skip_takes_all_passes_of_a_step_back(
    worlds: Worlds, device: str, poisoned: int | None
) -> None:
    arguments = {"options": {}, "poisoned": poisoned, "looked_at": poisoned == 1, "device": device}
    for kept in worlds(2).run(case_skipped_passes, **arguments):
        assert kept == [False, True, False, False]


def case_lazy_skip(device: str) -> list[bool]:
    """As case_skips, but nobody looks at the residuals in between."""
    with small_chunks():
        models = Models(device, "sign1", exact_skip=True, momentum=0.9)
    for step in range(6):
        for name in models.ddps:
            models.backward(name, step, poison="wide" if step in (1, 2, 4) else None)
    return [models.bits("cpu") == models.bits(device)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_exact_skip_decides_when_the_next_step_begins(worlds: Worlds, world_size: int) -> None:
    assert worlds(world_size).run(case_lazy_skip, device="streamed") == [[True]] * world_size


def case_no_skip(device: str) -> Outcome:
    models = Models(device, "sign1")
    models.backward(device, 0)
    return attempt(models.states[device].skip_step)


def test_a_step_is_not_taken_back_without_exact_skip(worlds: Worlds) -> None:
    for outcome in worlds(2).run(case_no_skip, device="streamed"):
        assert outcome.error == "StateError"
        assert "only with exact_skip=True" in outcome.text


# --- check of parameters --------------------------------------------------------------------------


def check_scenario(device: str, every: int) -> Scenario:
    options = {"check_every": every}
    ddp = {"bucket_cap_mb": 0.02}
    return Scenario(REAL_KINDS, 3, options=options, ddp=ddp, device=device)


def case_check(scenario: Scenario, change: tuple[int, int, str] | None) -> dict[str, Any]:
    """`change` (step, rank, name) moves one bit of a parameter before a step."""
    import fake_device

    run = Run(scenario)
    outcomes = []
    for step in range(7):
        if change is not None and change[:2] == (step, run.rank):
            parameter = run.model.get_parameter(change[2])
            with torch.no_grad():
                host = parameter.detach().cpu()
                flip_last_bit(host)
                parameter.copy_(host)
        outcomes.append(attempt(lambda step=step: run.step(step)))
    return {
        "outcomes": outcomes,
        "races": fake_device.machine.races(),
        "wire_bytes": run.state.stats()["wire_bytes"] if change is None else 0,
    }


@pytest.mark.torch_core
@pytest.mark.parametrize("device", DEVICES)
def test_equal_parameters_raise_no_alarm(worlds: Worlds, device: str) -> None:
    bytes_by_every = []
    for every in (0, 2):
        answers = worlds(3).run(case_check, scenario=check_scenario(device, every), change=None)
        for answer in answers:
            assert [o.error for o in answer["outcomes"]] == [None] * 7
            assert answer["races"] == []
        bytes_by_every.append([answer["wire_bytes"] for answer in answers])
    for plain, checked in zip(*bytes_by_every, strict=True):
        assert checked - plain == 3 * 2 * (64 + 8 * len(REAL_KINDS))  # steps 2, 4 and 6


@pytest.mark.parametrize("name", ["first", "channels", "bias"])
@pytest.mark.parametrize("device", DEVICES)
def test_one_bit_on_one_rank_is_named_on_all(worlds: Worlds, device: str, name: str) -> None:
    scenario = check_scenario(device, 4)
    # In the step that looks: adding a gradient may round the bit away.
    answers = worlds(3).run(case_check, scenario=scenario, change=(4, 2, name))
    for answer in answers:
        outcomes = answer["outcomes"]
        assert [o.error for o in outcomes[:5]] == [None] * 4 + ["DivergedError"]
        assert f"parameter '{name}' of rank 2 differs from that of rank 0 at step 4" in (
            outcomes[4].text
        )
    assert len({answer["outcomes"][4].headline for answer in answers}) == 1


def case_damaged_check(scenario: Scenario) -> list[Outcome]:
    """A byte of the hashes that rank 1 receives at step 2 is damaged."""
    import fake_device

    run = Run(scenario)
    outcomes = [attempt(lambda step=step: run.step(step)) for step in (0, 1)]
    if dist.get_rank() == 1:
        # The commit of step 1 comes first.
        fake_device.backends["streamed"].damage(1, 64 + 2, 0xEE)
    return outcomes + [attempt(lambda step=step: run.step(step)) for step in range(2, 6)]


def test_damaged_hashes_are_an_error_on_all_ranks_two_steps_later(worlds: Worlds) -> None:
    scenario = dataclasses.replace(check_scenario("streamed", 1), world_size=2, ddp={})
    answers = worlds(2).run(case_damaged_check, scenario=scenario)
    for outcomes in answers:
        assert [o.error for o in outcomes[:5]] == [None] * 4 + ["ProtocolError"]
        assert "rank 1 refused a message from rank 0 (step 2" in outcomes[4].text
        assert "check of parameters): checksum is " in outcomes[4].text
    assert len({outcomes[4].headline for outcomes in answers}) == 1


# --- a world of one that exchanges ----------------------------------------------------------------


def case_alone(scenario: Scenario) -> dict[str, Any]:
    from gradferry.core import device

    with mock.patch.object(device, "EXCHANGE_WHEN_ALONE", True):
        return case_train(scenario, seeds=[1])


def test_momentum_alone_is_compressed_where_it_exchanges(worlds: Worlds) -> None:
    scenario = scenario_of("sign1", 1, device="streamed")
    (answer,) = worlds(1).run(case_alone, scenario=scenario)
    assert answer["stats"]["chunks"] > 0
    lossy = answer["gradients"][0][0]
    # sign1 gives one magnitude per block; the momentum would give thousands.
    assert len(np.unique(np.abs(lossy[:4096]))) <= 64
