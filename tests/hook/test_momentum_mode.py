"""`gradferry.optim.momentum_mode`: optimizers as users have them, behind a hook with momentum. And
whose momentum OneBitAdam hands over, which ranks compare.
"""

from __future__ import annotations

import copy
import functools
import math
import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradferry.averaging.momentum import DeliveredMomentum
from gradferry.optim import OneBitAdam
from momentum_training import (
    BETAS,
    FACTOR,
    MOMENTUM,
    SETTINGS,
    STEPS,
    WEIGHTS,
    attached,
    gradient,
    one_bit_adam,
)
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from scenario import ChosenGradients, Scenario, Weight, hooked
from stepping import bits, logged, settings, settings_of_steps
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from world import World

Worlds = Callable[[int], World]


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("make", "given", "expected"),
    [
        # In units of the factor, a third.
        ("AdamW", SETTINGS, {"lr": 0.01 / 3, "betas": (0.0, 0.95), "weight_decay": 0.3}),
        # Adam adds its decay to the gradient, before it divides by the deviation.
        ("Adam", SETTINGS, {"lr": 0.01 / 3, "betas": (0.0, 0.95), "weight_decay": 0.1}),
        ("AdamW", {"betas": (0.5, 0.999)}, {"lr": 1e-3 / 3, "betas": (0.0, 0.999)}),
        ("SGD", {"lr": 0.1, "momentum": 0.75}, {"lr": 0.4, "momentum": 0}),
        (
            "SGD",
            {"lr": 0.1, "momentum": 0.75, "nesterov": True, "weight_decay": 0.1},
            {"lr": 0.4, "momentum": 0, "nesterov": False, "weight_decay": 0.1},
        ),
        ("SGD", {"lr": 0.1, "momentum": 0.5, "dampening": 0.5}, {"lr": 0.1, "dampening": 0}),
        ("SGD", {"lr": 0.1}, {"lr": 0.1, "momentum": 0}),
        # Set up for momentum by hand, or by a version that changed the groups themselves.
        (
            "AdamW",
            {"betas": (0.0, 0.95), "weight_decay": 0.3},
            {"lr": 1e-3, "betas": (0.0, 0.95), "weight_decay": 0.3},
        ),
    ],
)
@on_ranks(1)
def test_settings_are_those_for_momentum(
    make: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """The settings of a step; those in the optimizer stay, and what changes is logged."""
    model, _, state = attached()
    optimizer = getattr(torch.optim, make)(model.parameters(), **given)
    before = settings(optimizer)
    with logged() as said:
        assert gradferry.optim.momentum_mode(optimizer, state) is optimizer
    seen = settings_of_steps(optimizer)
    optimizer.step()
    ((group,),) = seen
    for key, value in expected.items():
        # A handful of roundings of fp64, and nothing else, lie between both.
        assert group[key] == pytest.approx(value, rel=1e-14), key
    assert settings(optimizer) == before
    rates = group["lr"], given.get("lr", 1e-3)
    assert said == [
        "gradients arrive as momentum: steps have lr=[{}] instead of lr=[{}]".format(*rates)
    ]


@pytest.mark.torch_core
@on_ranks(1)
def test_a_training_is_that_of_averages_over_their_own_deviation() -> None:
    # A world of one sends nothing, so the momentum is exact.
    model, ddp, state = attached()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **SETTINGS)
    gradferry.optim.momentum_mode(optimizer, state)
    rate, beta2 = 0.01 * FACTOR, 0.95
    parameters = [p.detach().reshape(-1).clone() for p in model.parameters()]
    averages = [np.float32(0) for _ in parameters]
    squares = [torch.zeros_like(p) for p in parameters]
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp({w.name: w.from_flat(gradient(step, i)) for i, w in enumerate(WEIGHTS)}).backward()
        optimizer.step()
        for index, (p, square) in enumerate(zip(parameters, squares, strict=True)):
            new = np.float32(1 - MOMENTUM) * gradient(step, index)
            averages[index] = new + averages[index] * np.float32(MOMENTUM)
            a = torch.from_numpy(averages[index])
            square.mul_(beta2).addcmul_(a, a, value=1 - beta2)
            deviation = (square.sqrt() / (1 - beta2 ** (step + 1)) ** 0.5).add_(1e-8)
            p.mul_(1 - rate * (0.1 / FACTOR))
            p.addcdiv_(a, deviation, value=-rate)
        assert bits(parameters) == bits(model.parameters()), step


def case_top_k() -> list[tuple[list[str], float, float]]:
    """Names, learning rate and decay of every group. One parameter travels as `exact`."""
    model = ChosenGradients(Scenario(WEIGHTS))
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, "topk:ratio=0.01", momentum=MOMENTUM)
    optimizer = torch.optim.AdamW([*model.parameters(), frozen], lr=1.0, weight_decay=0.1)
    gradferry.optim.momentum_mode(optimizer, state)
    names = {p: name for name, p in model.named_parameters()} | {frozen: "frozen"}
    found: list[tuple[list[str], float, float]] = []

    def note(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in args[0].param_groups:
            parameters = [names[p] for p in group["params"]]
            found.append((parameters, group["lr"], group["weight_decay"]))

    optimizer.register_step_pre_hook(note)
    optimizer.step()
    return found


def test_parameters_that_arrive_with_less_momentum_step_at_a_rate_of_their_own(
    worlds: Worlds,
) -> None:
    # m / (1 - m) = 4 / (1 + (1 / 0.01 - 1) / 4), so m = 16 / 119 and (1 - m) / (1 + m) = 103 / 135.
    factor = math.sqrt(103 / 135)
    for groups in worlds(2).run(case_top_k):
        (first, rate, decay), (others, other_rate, other_decay), frozen = groups
        assert ([name.split(".")[-1] for name in first], others) == (["first"], ["bias"])
        assert frozen == (["frozen"], 1.0, 0.1)
        assert (rate, decay) == pytest.approx((factor, 0.1 / factor), rel=1e-14)
        assert (other_rate, other_decay) == pytest.approx((FACTOR, 0.1 / FACTOR), rel=1e-14)
    # A world of one compresses nothing, and keeps all of the momentum.
    ((group, frozen),) = worlds(1).run(case_top_k)
    assert group[1] == pytest.approx(FACTOR, rel=1e-14)
    assert frozen == (["frozen"], 1.0, 0.1)


def adamw(model: nn.Module, state: Any) -> Any:
    return torch.optim.AdamW(model.parameters())


def rmsprop(model: nn.Module, state: Any) -> Any:
    return torch.optim.RMSprop(model.parameters())


def with_a_stranger(model: nn.Module, state: Any) -> Any:
    return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(7))])


def sgd(model: nn.Module, state: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("prepare", "momentum", "warmup_steps", "text"),
    [
        (adamw, None, 0, "attach with momentum="),
        (rmsprop, 0.8, 0, "not RMSprop: take its own momentum away, and the learning rate times "
         "0.333"),
        (with_a_stranger, 0.8, 0, "parameter 2 of group 0, of shape (7,), is none that the hook "
         "reduces"),
        # It would have no momentum there: such trainings ended 7 % to 16 % above.
        (sgd, 0.8, 7, "warmup_steps=7: so long the hook delivers gradients"),
        (adamw, 0.8, 7, None),
    ],
)  # fmt: skip
@on_ranks(1)
def test_what_cannot_be_set_up_is_refused(
    prepare: Callable[[Any, Any], Any], momentum: float | None, warmup_steps: int, text: str | None
) -> None:
    model, _, state = attached(momentum, warmup_steps)
    optimizer = prepare(model, state)
    outcome = attempt(lambda: gradferry.optim.momentum_mode(optimizer, state))
    assert outcome.error == (text and "ConfigError")
    assert (text or "") in outcome.text


@on_ranks(1)
def test_gradients_that_pass_through_keep_their_optimizer() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADFERRY_DISABLE", "1")
        model, _, state = attached()
    optimizer = gradferry.optim.momentum_mode(adamw(model, state), state)
    seen = settings_of_steps(optimizer)
    optimizer.step()
    assert (seen[0][0]["lr"], seen[0][0]["betas"][0]) == (1e-3, 0.9)


class ByHand:
    """Sets the learning rate itself, as many scripts do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = 0.1 if group["lr"] == 0.01 else 0.01


SCHEDULES = (
    functools.partial(
        lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=STEPS + 1
    ),  # cycles momenta
    functools.partial(lr_scheduler.CyclicLR, base_lr=0.001, max_lr=0.01, step_size_up=2),
    functools.partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS, eta_min=0.001),
    ByHand,
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", ["AdamW", "SGD"])
@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@on_ranks(1)
def test_rates_of_schedules_and_of_later_groups_are_converted_at_every_step(
    make: str, schedule: Callable[[Any], Any], early: bool
) -> None:
    model, ddp, state = attached()
    first, bias = model.parameters()
    options = {"momentum": 0.75} if make == "SGD" else {"weight_decay": 0.1}
    optimizer = getattr(torch.optim, make)([first], lr=0.01, **options)
    planned = schedule(optimizer) if early else None
    gradferry.optim.momentum_mode(optimizer, state)
    planned = planned or schedule(optimizer)
    seen, shown = settings_of_steps(optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradferry.GradferryWarning)
        for step in range(STEPS):
            if step == 2:
                optimizer.add_param_group({"params": [bias], "lr": 0.02})  # gradual unfreezing
            optimizer.zero_grad()
            ddp({w.name: w.from_flat(gradient(step, i)) for i, w in enumerate(WEIGHTS)}).backward()
            shown.append(settings(optimizer))
            optimizer.step()
            if step < 2 or schedule is ByHand:  # torch's know the groups they began with
                planned.step()
    assert [len(groups) for groups in shown] == [1, 1, *[2] * (STEPS - 2)]
    assert len({groups[0]["lr"] for groups in shown}) > 1
    for given, stepped in zip(shown, seen, strict=True):
        for mine, used in zip(given, stepped, strict=True):
            if make == "SGD":
                assert mine["momentum"] > 0.7
                assert used["momentum"] == 0
                # One product and one quotient, as the optimizer computes them.
                assert used["lr"] == mine["lr"] / (1 - mine["momentum"])
            else:
                assert mine["betas"][0] > 0.7
                assert used["betas"] == (0.0, 0.999)
                # FACTOR's own rounding, and one of each product and quotient.
                assert used["lr"] == pytest.approx(mine["lr"] * FACTOR, rel=1e-15)
                assert used["weight_decay"] == pytest.approx(0.1 / FACTOR, rel=1e-15)


@pytest.mark.parametrize("chooses", [False, True])
def test_a_choice_that_changes_has_the_momentum_of_codecs_that_send_all(chooses: bool) -> None:
    running = SimpleNamespace(
        index={"weight": 0},
        config=SimpleNamespace(momentum=0.75, chooses=chooses),
        transport=SimpleNamespace(exchanges=True),
        momentum_shares=lambda *, exchanges: [2.0 if exchanges else 1.0],  # of the current codec
    )
    assert DeliveredMomentum(running).momenta() == {"weight": 0.75 if chooses else 0.5}


def fused_steps(scale: float | None, tensor_rate: bool) -> tuple[list[bytes], Any]:
    """Parameters after steps of torch's fused AdamW, of which the third overflows if scaled."""
    torch.manual_seed(3)
    model = nn.Linear(40, 30)
    ddp = DistributedDataParallel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    options = {"grad_scaler": scaler} if scale else {}
    state = hooked(ddp, "exact", momentum=MOMENTUM, **options)
    rate = torch.tensor(0.01) if tensor_rate else 0.01
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=rate, weight_decay=0.1, fused=True)
    gradferry.optim.momentum_mode(optimizer, state)
    for step in (0, 1, "overflow", 2) if scale else range(3):
        optimizer.zero_grad()
        inputs = torch.full((2, 40), 3.0 if step == "overflow" else float(step + 1))
        factor = math.inf if step == "overflow" else 1.0
        scaler.scale(ddp(inputs).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update(scale)  # the same: powers of two commute with rounding
    kept = optimizer.param_groups[0]["lr"]
    assert kept is rate
    return bits(model.parameters()), float(kept)


@pytest.mark.parametrize("tensor_rate", [False, True], ids=["float", "tensor"])
@on_ranks(1)
def test_fused_steps_know_the_scaler(tensor_rate: bool) -> None:
    assert fused_steps(2.0**10, tensor_rate) == fused_steps(None, tensor_rate)


THREE_WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (64, 60)))


def case_ranks_that_differ(optimizers: dict[int, list[list[int]]]) -> list[str]:
    """The outcome of every step; optimizers: by rank, the indices of each one's parameters."""
    model = ChosenGradients(Scenario(THREE_WEIGHTS))
    ddp = DistributedDataParallel(model)
    state = hooked(ddp, "sign1", momentum=BETAS[0], warmup_steps=2)
    parameters = list(ddp.parameters())
    steppers = [
        OneBitAdam(
            [{"params": [parameters[i] for i in chosen]}], betas=BETAS, freeze_step=2, state=state
        )
        for chosen in optimizers[dist.get_rank()]
    ]
    targets = {w.name: torch.ones(w.shape) for w in THREE_WEIGHTS}
    outcomes = []
    for _ in range(4):
        outcome = attempt(lambda: ddp(targets).backward())
        outcomes.append(f"{outcome.error}: {outcome.text}" if outcome.error else "")
        if outcome.error:
            break
        for stepper in steppers:
            stepper.step()
    return outcomes


@pytest.mark.parametrize(
    ("optimizers", "fault"),
    [
        ({0: [[0, 1, 2]], 1: [[0, 1, 2]]}, ""),
        ({0: [[0, 2]], 1: [[0, 2]]}, ""),
        ({0: [[0], [1, 2]], 1: [[0], [1, 2]]}, ""),
        ({0: [[0, 1]], 1: [[2]]}, "rank 0 has no OneBitAdam that holds 'second'"),
        ({0: [[0, 1, 2]], 1: [[]]}, "rank 1 has no OneBitAdam that holds 'first' and 2 more"),
        ({0: [[0], [1, 2]], 1: [[0]]}, "rank 1 has no OneBitAdam that holds 'bias' and 1 more"),
        ({0: [], 1: [[1]]}, "rank 0 has no OneBitAdam that holds 'bias'"),
    ],
)
def test_every_rank_must_hold_the_same_momenta(
    world_of_2: World, optimizers: dict[int, list[list[int]]], fault: str
) -> None:
    one, other = world_of_2.run(case_ranks_that_differ, optimizers=optimizers)
    assert one == other
    if fault:
        assert one[0].startswith(f"StateError: {fault}, unlike another rank"), one
        assert "without ZeroRedundancyOptimizer" in one[0]
    else:
        assert one == [""] * 4


@pytest.mark.torch_core
@pytest.mark.parametrize(("native", "built_at"), [(True, 0), (False, 0), (True, 1)])
def test_a_sharded_optimizer_is_refused_on_all_ranks(
    world_of_3: World, native: bool, built_at: int
) -> None:
    # One parameter for three ranks: two shards are empty.
    outcomes = world_of_3.run(case_sharded, native=native, built_at=built_at)
    assert [o.error for o in outcomes] == ["StateError"] * 3
    assert len({o.text for o in outcomes}) == 1
    assert "has no OneBitAdam that holds 'weight'" in outcomes[0].text


def case_sharded(native: bool, built_at: int) -> Outcome:
    """The first step after the optimizer was built at which ranks compare."""
    ddp = DistributedDataParallel(nn.Linear(40, 40, bias=False))
    state = hooked(ddp, "sign1", native=native, momentum=0.9, warmup_steps=2)

    def backward() -> None:
        ddp(torch.ones(2, 40)).sum().backward()

    for _ in range(built_at):
        backward()
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class=OneBitAdam, freeze_step=2, state=state
    )
    for _ in range(built_at, 2 if built_at else 0):
        backward()
        optimizer.step()
    return attempt(backward)


def case_a_rank_that_does_not_step(resumed: bool) -> list[str]:
    """Rank 1 leaves out its optimizer's step at the freeze; perhaps after a checkpoint."""
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    state, optimizer = one_bit_adam(ddp, freeze=3)
    outcomes = []
    for step in range(5):
        if resumed and step == 2:
            state.load_state_dict(state.state_dict())
        outcome = attempt(lambda: ddp(torch.ones(2, 40)).sum().backward())
        outcomes.append(f"{outcome.error}: {outcome.text}" if outcome.error else "")
        if outcome.error:
            break
        if step < 2 or dist.get_rank() == 0:
            optimizer.step()
    return outcomes


@pytest.mark.parametrize("resumed", [False, True])
def test_a_rank_that_hands_over_no_momentum_stops_all(world_of_2: World, resumed: bool) -> None:
    one, other = world_of_2.run(case_a_rank_that_does_not_step, resumed=resumed)
    assert one == other
    assert one[:3] == [""] * 3
    assert len(one) == 4
    assert one[3].startswith(
        "StateError: rank 1 did not hand over, after step 2, the momentum of 'weight' and 1 more"
    )


def pickled(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled])
@on_ranks(1)
def test_a_copied_optimizer_says_that_it_has_no_hook(copied: Callable[[Any], Any]) -> None:
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    _, optimizer = one_bit_adam(ddp, freeze=2)
    ddp(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    duplicate = copied(optimizer)
    for call in (
        duplicate.step,
        lambda: duplicate.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
    ):
        outcome = attempt(call)
        assert outcome.error == "StateError"
        assert "a copied or pickled OneBitAdam has no hook" in outcome.text
        assert "make a new OneBitAdam" in outcome.text
    saved = duplicate.state_dict()
    duplicate.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    ddp(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    assert repr(duplicate) == repr(optimizer)
    assert len(duplicate.param_groups) == 1
    assert optimizer.state[ddp.module.weight]["step"].item() == 2
