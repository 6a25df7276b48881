"""Momentum from the hook: optimizers in momentum mode, OneBitAdam, and the change from a warm-up to
momentum. That what arrives is the reference's: test_scenarios.py.
"""

from __future__ import annotations

import copy
import dataclasses
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
from gradferry.core.codec_spec import parse_codec
from gradferry.errors import ConfigError
from gradferry.optim import OneBitAdam
from gradferry_lab.workloads.hooks import hook_config
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
from outcomes import attempt
from products import rows
from reference import Parameter, ReferenceEngine
from reference.codecs import find_codec
from reference.engine import momentum_behind
from reference.one_bit_adam import OneBitMomentum
from scenario import ChosenGradients, Run, Scenario, Weight, hooked, reference_of
from stepping import bits, logged, settings, settings_of_steps, warned
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from world import World

Worlds = Callable[[int], World]

# --- momentum mode --------------------------------------------------------------------------------


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


def steps_behind_topk() -> list[tuple[list[str], float, float]]:
    """Names, learning rate and decay of every group. One parameter travels as `exact`."""
    model = ChosenGradients(Scenario(WEIGHTS))
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    state = hooked(DistributedDataParallel(model), "topk:ratio=0.01", momentum=MOMENTUM)
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


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_that_arrive_with_less_momentum_step_at_a_rate_of_their_own(
    worlds: Worlds, world_size: int
) -> None:
    # m / (1 - m) = 4 / (1 + (1 / 0.01 - 1) / 4), so m = 16 / 119 and (1 - m) / (1 + m) = 103 / 135.
    # A world of one compresses nothing, and keeps all of the momentum.
    behind = math.sqrt(103 / 135)
    factors = {"first": behind, "bias": FACTOR} if world_size == 2 else {"first bias": FACTOR}
    for *groups, frozen in worlds(world_size).run(steps_behind_topk):
        assert frozen == (["frozen"], 1.0, 0.1)
        for (names, rate, decay), (expected, factor) in zip(groups, factors.items(), strict=True):
            assert names == expected.split()
            assert (rate, decay) == pytest.approx((factor, 0.1 / factor), rel=1e-14)


def with_a_stranger(parameters: Any) -> Any:
    return torch.optim.AdamW([*parameters, nn.Parameter(torch.zeros(7))])


@pytest.mark.parametrize(
    ("make", "momentum", "warmup_steps", "text"),
    [
        (torch.optim.AdamW, None, 0, "attach with momentum="),
        (torch.optim.RMSprop, 0.8, 0, "not RMSprop: take its own momentum away, and the learning "
         "rate times 0.333"),
        (with_a_stranger, 0.8, 0, "parameter 2 of group 0, of shape (7,), is none that the hook "
         "reduces"),
        # It would have no momentum there: such trainings ended 7 % to 16 % above.
        (torch.optim.SGD, 0.8, 7, "warmup_steps=7: so long the hook delivers gradients"),
        (torch.optim.AdamW, 0.8, 7, None),
    ],
)  # fmt: skip
@on_ranks(1)
def test_what_cannot_be_set_up_is_refused(
    make: Any, momentum: float | None, warmup_steps: int, text: str | None
) -> None:
    model, _, state = attached(momentum, warmup_steps)
    optimizer = make(model.parameters())
    outcome = attempt(lambda: gradferry.optim.momentum_mode(optimizer, state))
    assert outcome.error == (text and "ConfigError")
    assert (text or "") in outcome.text


@on_ranks(1)
def test_gradients_that_pass_through_keep_their_optimizer() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADFERRY_DISABLE", "1")
        model, _, state = attached()
    optimizer = torch.optim.AdamW(model.parameters())
    gradferry.optim.momentum_mode(optimizer, state)
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


@on_ranks()
def test_sgd_without_momentum_of_its_own_equals_sgd_with_momentum() -> None:
    # Halves and doubles commute with rounding, and equal gradients have an exact mean.
    found = []
    for from_hook in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 1))
        ddp = DistributedDataParallel(model)
        state = hooked(ddp, "exact", momentum=0.5 if from_hook else None)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0**-6, momentum=0.5)
        if from_hook:
            gradferry.optim.momentum_mode(optimizer, state)
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            x = torch.randn(16, 20, generator=generator)
            optimizer.zero_grad()
            (ddp(x) - x[:, :1].sin()).square().mean().backward()
            optimizer.step()
        found.append(bits(model.parameters()))
    assert found[0] == found[1]


# --- whose momentum OneBitAdam hands over: ranks compare ------------------------------------------

THREE_WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (64, 60)))


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
@on_ranks()
def test_every_rank_must_hold_the_same_momenta(
    optimizers: dict[int, list[list[int]]], fault: str
) -> None:
    """optimizers: by rank, the indices of each one's parameters."""
    ddp = DistributedDataParallel(ChosenGradients(Scenario(THREE_WEIGHTS)))
    state = hooked(ddp, "sign1", momentum=BETAS[0], warmup_steps=2)
    parameters = list(ddp.parameters())
    steppers = [
        OneBitAdam(
            [{"params": [parameters[i] for i in chosen]}], betas=BETAS, freeze_step=2, state=state
        )
        for chosen in optimizers[dist.get_rank()]
    ]
    targets = {w.name: torch.ones(w.shape) for w in THREE_WEIGHTS}
    for _ in range(4):
        outcome = attempt(lambda: ddp(targets).backward())
        assert outcome.error == ("StateError" if fault else None), outcome
        if fault:
            assert outcome.text.startswith(f"{fault}, unlike another rank")
            assert "without ZeroRedundancyOptimizer" in outcome.text
            return
        for stepper in steppers:
            stepper.step()


@pytest.mark.torch_core
@pytest.mark.parametrize(("native", "built_at"), [(True, 0), (False, 0), (True, 1)])
@on_ranks(3)
def test_a_sharded_optimizer_is_refused_on_all_ranks(native: bool, built_at: int) -> None:
    """In the first step after it was built at which ranks compare. One parameter for three ranks:
    two shards are empty.
    """
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
    outcome = attempt(backward)
    assert outcome.error == "StateError"
    assert outcome.text.startswith("rank 1 has no OneBitAdam that holds 'weight'")


@pytest.mark.parametrize("resumed", [False, True])
@on_ranks()
def test_a_rank_that_hands_over_no_momentum_stops_all(resumed: bool) -> None:
    """Rank 1 leaves out its optimizer's step at the freeze; perhaps after a checkpoint."""
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    state, optimizer = one_bit_adam(ddp, freeze=3)
    for step in range(4):
        if resumed and step == 2:
            state.load_state_dict(state.state_dict())
        outcome = attempt(lambda: ddp(torch.ones(2, 40)).sum().backward())
        assert outcome.error == (None if step < 3 else "StateError"), (step, outcome)
        if step < 2 or (step == 2 and dist.get_rank() == 0):
            optimizer.step()
    assert outcome.text.startswith(
        "rank 1 did not hand over, after step 2, the momentum of 'weight' and 1 more"
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
    more = {"params": [nn.Parameter(torch.zeros(3))]}
    for call in (duplicate.step, lambda: duplicate.add_param_group(more)):
        outcome = attempt(call)
        assert outcome.error == "StateError"
        assert "a copied or pickled OneBitAdam has no hook" in outcome.text
    duplicate.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(duplicate.state_dict())
    ddp(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    assert repr(duplicate) == repr(optimizer)
    assert optimizer.state[ddp.module.weight]["step"].item() == 2


# --- OneBitAdam -----------------------------------------------------------------------------------

FREEZE = 4
NUM_STEPS = 10
FLOOR = 0.01  # variance_floor by default
EPS = 1e-8  # by default
SCENARIO = Scenario(THREE_WEIGHTS)


def flat_gradient(step: int, rank: int, index: int) -> np.ndarray:
    return SCENARIO.gradient(step, 0, rank, index)


def case_dense(disabled: bool) -> list[list[bytes]]:
    """Parameters after every step, none of which is frozen."""
    model = ChosenGradients(SCENARIO)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    freeze = 2 if disabled else NUM_STEPS + 1
    with pytest.MonkeyPatch.context() as patch, warned() as caught:
        patch.setenv("GRADFERRY_DISABLE", str(int(disabled)))
        _, optimizer = one_bit_adam(ddp, freeze=freeze, lr=0.01, weight_decay=0.1)
    assert any("without the momentum" in str(each.message) for each in caught) == disabled
    seen = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        ddp(SCENARIO.targets(step, dist.get_rank())).backward()
        optimizer.step()
        seen.append(bits(model.parameters()))
    return seen


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("world_size", "disabled"), [(1, False), (2, False), (3, False), (2, True)]
)
def test_dense_steps_are_those_of_adamw(worlds: Worlds, world_size: int, disabled: bool) -> None:
    """And so are all steps behind a hook that passes gradients through."""
    model = ChosenGradients(SCENARIO)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=BETAS, weight_decay=0.1, foreach=False
    )
    expected = []
    for step in range(NUM_STEPS):
        for index, p in enumerate(model.parameters()):
            total = flat_gradient(step, 0, index)
            for rank in range(1, world_size):
                total = total + flat_gradient(step, rank, index)
            mean = total * (np.float32(1) / np.float32(world_size))
            p.grad = THREE_WEIGHTS[index].from_flat(mean)
        optimizer.step()
        expected.append(bits(model.parameters()))
    # Halving commutes with rounding: DDP's mean of two is the reference's.
    for seen in worlds(world_size).run(case_dense, disabled=disabled):
        assert seen == expected


def eighths(step: int, rank: int, n: int) -> np.ndarray:
    rng = np.random.default_rng([step, rank])
    return (rng.integers(-7, 8, n) / 8).astype(np.float32)


def mean_magnitude_of_blocks(v: np.ndarray) -> np.ndarray:
    """The scale of sign1: its codec decodes to it, up to the sign."""
    codec = find_codec("sign1")
    tile = np.abs(v)[None].astype(np.float32)
    return codec.decode(codec.encode(tile, "float32"), v.size, "float32")[0].astype(v.dtype)


def test_the_references_momentum_is_that_of_deepspeeds_algorithm() -> None:
    # Multiples of 1/8, beta 1/2, two ranks and a few steps: float64 and float32 are both exact, so
    # that two algorithms with other buffers and another order must agree to the bit.
    n, beta = 2048, 0.5
    start = eighths(9, 9, n)
    ours = ReferenceEngine(2, [Parameter("w", n)], "sign1", momentum=beta)
    for residual in ours.worker_residual[0]:
        residual += np.float32(beta) * start  # as OneBitAdam hands it over
    theirs = OneBitMomentum(start.astype(float), 2, beta, mean_magnitude_of_blocks)
    for step in range(4):
        gradients = [eighths(step, rank, n) for rank in range(2)]
        expected = theirs.step([gradient.astype(float) for gradient in gradients])
        assert (ours.step([[gradient] for gradient in gradients])[0][0] == expected).all()
    for rank in range(2):
        # Ours has one buffer for what DeepSpeed has two.
        withheld = theirs.worker_error[rank] + theirs.beta * theirs.momentum
        assert (ours.worker_residual[0][rank] == withheld).all()
    assert (ours.owner_residual[0] == theirs.server_error).all()


def case_skip_at_the_switch(skipped: tuple[int, ...]) -> dict[str, Any]:
    """Trains under a GradScaler; all gradients of the steps in `skipped` are infinite, so that they
    leave every residual as it was.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    model = ChosenGradients(SCENARIO)
    ddp = DistributedDataParallel(model)
    options = {"grad_scaler": scaler}
    settings = {"lr": 0.01, "weight_decay": 0.1}
    _, optimizer = one_bit_adam(ddp, "exact", freeze=FREEZE, attach=options, **settings)
    taken = 0
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        targets = SCENARIO.targets(taken, dist.get_rank())
        if step in skipped:
            targets = {name: torch.full_like(each, math.inf) for name, each in targets.items()}
        else:
            taken += 1
        scaler.scale(ddp(targets)).backward()
        scaler.step(optimizer)
        scaler.update()
    return {
        "parameters": [p.detach().numpy().copy() for p in model.parameters()],
        "taken": taken,
        "scale": scaler.get_scale(),
    }


@pytest.mark.parametrize("skipped", [(), (1,), (FREEZE - 1,), (FREEZE - 1, FREEZE), (FREEZE, 6)])
def test_frozen_steps_keep_the_variance_whatever_a_scaler_skips(
    worlds: Worlds, skipped: tuple[int, ...]
) -> None:
    answers = worlds(2).run(case_skip_at_the_switch, skipped=skipped)
    one, other = (answer["parameters"] for answer in answers)
    assert all(map(np.array_equal, one, other))
    # The variance freezes after the dense steps that were taken, the momentum goes on.
    frozen_at = FREEZE - sum(step < FREEZE for step in skipped)
    for index in range(len(THREE_WEIGHTS)):
        m = v = p = np.zeros(THREE_WEIGHTS[index].num_elements)
        for step in range(answers[0]["taken"]):
            g = (flat_gradient(step, 0, index).astype(float) + flat_gradient(step, 1, index)) / 2
            m = BETAS[0] * m + (1 - BETAS[0]) * g
            if step < frozen_at:
                v = BETAS[1] * v + (1 - BETAS[1]) * g * g
            elif step == frozen_at:
                v = np.maximum(v, FLOOR * v.mean())
            m_hat = m / (1 - BETAS[0] ** (step + 1))
            deviation = np.sqrt(v / (1 - BETAS[1] ** min(step + 1, frozen_at))) + EPS
            p = p * (1 - 0.01 * 0.1) - 0.01 * m_hat / deviation
        got = answers[0]["parameters"][index].reshape(-1)
        # A gradient near 0 in all dense steps has a deviation near eps and a large update; what
        # counts is the momentum's error: some 10 fp32 roundings per step, of values below 32,
        # and those of the parameter itself.
        bound = NUM_STEPS * 10 * 2.0**-24 * (32 * 0.01 / deviation + np.abs(p) + 1)
        assert (np.abs(got - p) <= bound).all(), (index, np.abs(got - p).max())


def quiet_elements(floor: float) -> dict[str, Any]:
    """Every other element never has a gradient, and a neighbour in its block always does."""
    weights = (Weight("real", (64, 32)), Weight("complex", (8, 4), torch.complex64))
    targets = {w.name: w.from_flat(np.resize(np.float32([1, 0]), w.num_elements)) for w in weights}
    model = ChosenGradients(Scenario(weights))
    ddp = DistributedDataParallel(model)
    _, optimizer = one_bit_adam(ddp, freeze=FREEZE, lr=1.0, variance_floor=floor)
    starts = [p.detach().clone() for p in model.parameters()]
    for _ in range(FREEZE + 2):
        optimizer.zero_grad()
        ddp(targets).backward()
        optimizer.step()
    moved = [(p.detach() - start).abs() for p, start in zip(ddp.parameters(), starts, strict=True)]
    denominator = optimizer.state[next(model.parameters())]["denominator"]
    return {
        "moved": float(moved[0].flatten()[1::2].max()),
        "complex_moved": float(moved[1].max()),
        "denominators": denominator.flatten()[:2].tolist(),
    }


@on_ranks()
def test_elements_without_a_gradient_are_not_thrown_far() -> None:
    floored, published = quiet_elements(FLOOR), quiet_elements(0.0)
    active, quiet = (denominator - EPS for denominator in floored["denominators"])
    # Half of the elements are active, so that the mean is half of their variance. Root, correction
    # and eps round both by 2^-24 each, which the square doubles.
    assert quiet**2 == pytest.approx(FLOOR * active**2 / 2, rel=12 * 2.0**-24)
    # sign1 gives a quiet element at most its neighbours' momentum, and that is at most 1 - beta^t
    # of the gradient 1, which the correction divides by: a step is below 1 / deviation.
    assert 0 < floored["moved"] < 2 / (FLOOR / 2) ** 0.5
    assert published["moved"] > 1e6  # over eps
    # A complex element whose imaginary part is quiet is as active as its real part.
    assert floored["complex_moved"] == published["complex_moved"]


@on_ranks()
def test_what_would_train_wrongly_is_refused() -> None:
    mine, ddp, plain = (DistributedDataParallel(nn.Linear(40, 40)) for _ in range(3))
    _, optimizer = one_bit_adam(mine, freeze=FREEZE)
    without = hooked(plain, "sign1", warmup_steps=FREEZE)
    bound = hooked(ddp, "sign1", momentum=0.9, warmup_steps=FREEZE)
    for owner, given, options, error, text in (
        (mine, gradferry.HookState("sign1", momentum=0.9), {}, "StateError", "not bound"),
        (mine, None, {}, "ConfigError", "is None, not a gradferry.HookState"),
        (plain, without, {}, "ConfigError", "betas[0]=0.9 and the hook's momentum=None"),
        (mine, bound, {}, "ConfigError", "of shape (40, 40), is none that the hook reduces"),
        (ddp, bound, {"freeze_step": 5}, "ConfigError", "freeze_step=5 and the hook's warmup_st"),
        (ddp, bound, {"betas": (0.8, 0.9)}, "ConfigError", "betas[0]=0.8 and the hook's momentum"),
        (ddp, bound, {"variance_floor": math.nan}, "ConfigError", "variance_floor=nan must be"),
    ):
        options = {"freeze_step": FREEZE, **options}
        make = functools.partial(OneBitAdam, owner.parameters(), state=given, **options)
        outcome = attempt(make)
        assert outcome.error == error, outcome
        assert text in outcome.text
    for passes, error in ((1, None), (0, "StateError"), (2, "StateError")):
        for _ in range(passes):
            mine(torch.ones(2, 40)).sum().backward()
        outcome = attempt(optimizer.step)
        assert outcome.error == error
        assert error is None or f"{passes} synced backward passes since the last" in outcome.text


# --- compressed warm-up ---------------------------------------------------------------------------

WARMUP_STEPS = 3


def warming_up(codec: str, warmup: str = "q8", steps: int = WARMUP_STEPS) -> Scenario:
    options = {"momentum": BETAS[0], "warmup_steps": steps, "warmup": warmup}
    return Scenario(THREE_WEIGHTS, codec=codec, options=options, ddp={"bucket_cap_mb": 0.05})


@on_ranks()
def test_a_hook_says_how_it_warms_up() -> None:
    assert "warm-up: 3 steps with q8" in str(Run(warming_up("sign1")).state)


def test_a_hook_by_name_has_a_warmup() -> None:
    config = hook_config("sign1+momentum=0.9+warmup_steps=100+warmup=topk:ratio=0.25")
    assert config.warmup == parse_codec("topk:ratio=0.25")
    with pytest.raises(ConfigError, match="warmup_steps="):
        hook_config("sign1+momentum=0.9+warmup=q8")


@pytest.mark.parametrize("codec", ["sign1", "topk:ratio=0.05", "q4"])
@pytest.mark.parametrize("momentum", [0.0, BETAS[0]])
def test_what_the_reference_withholds_in_a_warmup_comes_once(codec: str, momentum: float) -> None:
    """And so what the hook withholds, whose residuals are the reference's."""
    parameters = [weight.describe() for weight in THREE_WEIGHTS]
    engine = ReferenceEngine(
        2, parameters, codec, "both", (), 0, momentum, WARMUP_STEPS, "rht:bits=2"
    )
    given, applied = ([np.zeros(p.num_elements) for p in parameters] for _ in range(2))
    for step in range(2 * WARMUP_STEPS):
        own = [[SCENARIO.gradient(step, 0, rank, i) for i in range(3)] for rank in range(2)]
        (arrived, _) = engine.step(own)
        for i, codec_of in enumerate(engine.layout.codecs):
            given[i] += np.mean([gradients[i].astype(float) for gradients in own], axis=0)
            applied[i] += arrived[i]
            missing = np.zeros_like(given[i])
            for each in (*engine.worker_residual[i], engine.owner_residual[i]):
                if each is not None:
                    missing += each / (1 if each is engine.owner_residual[i] else 2)
            # A residual in momentum mode delivers 1 - m of itself next, then (1 - m) m, and so on.
            share = 1 - momentum_behind(codec_of, momentum)
            if step + 1 >= WARMUP_STEPS:
                missing /= share
            lost = np.abs(given[i] - applied[i] - missing).max()
            # Per step and rank at most: alpha g, its sum, v - D, m D and its sum; the sum over
            # ranks; then the mean, 1 / W, the owner's sum and its v - D; at the change one product
            # for each. All of numbers below 64, and residuals count 1 / (1 - m) times.
            assert lost <= (step + 1) * (2 * 7 + 5) * 64 * 2.0**-24 / share, (step, i)
            assert i == 1 or np.abs(missing).max() > 0.5


@pytest.mark.parametrize("at", [WARMUP_STEPS - 1, WARMUP_STEPS])
@on_ranks()
def test_residuals_of_a_compressed_warmup_are_not_taken_for_momentum(at: int) -> None:
    """A state of step `at` is loaded under other options, and back."""
    scenario = warming_up("sign1")
    dense = {"momentum": BETAS[0], "warmup_steps": WARMUP_STEPS}
    for options in ({"momentum": BETAS[0]}, dense, {**dense, "warmup": "q4"}):
        one, other = Run(scenario), Run(dataclasses.replace(scenario, options=options))
        for step in range(at):
            one.step(step)
            other.step(step)
        saved = one.state.state_dict(), other.state.state_dict()
        fits = at == WARMUP_STEPS or "warmup" in options
        for run, theirs in zip((other, one), saved, strict=True):
            outcome = attempt(lambda run=run, theirs=theirs: run.state.load_state_dict(theirs))
            assert outcome.error == (None if fits else "StateError")
            assert fits or "load it with the arguments it was saved with" in outcome.text


# --- momentum that an optimizer hands over --------------------------------------------------------


# --- momentum that an optimizer hands over --------------------------------------------------------


def case_hand_over(scenario: Scenario, skipped: tuple[int, ...]) -> list[list[np.ndarray]]:
    """What OneBitAdam gets, unscaled, in the steps that a GradScaler does not skip.

    All gradients of the others are infinite, so that they leave every residual as it was.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    options = {**scenario.options, "warmup_steps": WARMUP_STEPS, "grad_scaler": scaler}
    run = Run(dataclasses.replace(scenario, options=options))
    optimizer = OneBitAdam(
        run.ddp.parameters(), lr=0.01, betas=BETAS, freeze_step=WARMUP_STEPS, state=run.state
    )
    kept = []
    for step in range(7):
        optimizer.zero_grad()
        targets = run.targets(step)
        if step in skipped:
            targets = {name: torch.full_like(each, math.inf) for name, each in targets.items()}
        scaler.scale(run.ddp(targets)).backward()
        if step not in skipped:
            kept.append([p.grad.div(scaler.get_scale()).numpy() for p in run.model.parameters()])
        scaler.step(optimizer)
        scaler.update()
    return kept


@pytest.mark.parametrize(
    ("codecs", "skipped", "nodes"),
    rows(
        (("sign1", "q8"), ("topk:ratio=0.05", "exact"), ("topk:ratio=0.01", "q8"), ("exact",) * 2),
        ((), (0,), (2,), (2, 3), (3,)),
        (None, ((0, 1), (2, 3))),
    ),
)
def test_momentum_is_handed_over_after_the_change(
    worlds: Worlds, codecs: tuple[str, str], skipped: tuple[int, ...], nodes: Any
) -> None:
    """`codecs`: after the warm-up, and in it."""
    fewer = sum(step < WARMUP_STEPS for step in skipped)
    late = 2 in skipped  # one step more passes until the optimizer finds that it is to freeze
    scenario = warming_up(*codecs, WARMUP_STEPS - fewer)
    if nodes:
        scenario = dataclasses.replace(scenario, nodes=nodes, world_size=4)
    engine, count = reference_of(scenario), range(len(THREE_WEIGHTS))
    averages = [torch.zeros(w.num_elements) for w in THREE_WEIGHTS]
    expected: list[list[np.ndarray]] = []
    handed_over = False
    for step in range(7):
        if step in skipped:
            continue
        ranks = range(scenario.world_size)
        given = [[SCENARIO.gradient(step, 0, rank, i) for i in count] for rank in ranks]
        expected.append(engine.step(given)[0])
        if step < WARMUP_STEPS:
            for average, arrived in zip(averages, expected[-1], strict=True):
                average.lerp_(torch.from_numpy(arrived), 1 - BETAS[0])
        if step + 1 >= WARMUP_STEPS and not handed_over:
            handed_over = True
            for index, own in enumerate(engine.layout.codecs):
                share = (1 - momentum_behind(own, BETAS[0])) / (1 - BETAS[0])
                factor = np.float32(BETAS[0] ** (1 + late) * share)
                for residual in engine.worker_residual[index]:
                    residual += averages[index].numpy() * factor
    for kept in worlds(scenario.world_size).run(case_hand_over, scenario=scenario, skipped=skipped):
        for got, want in zip(kept, expected, strict=True):
            assert [g.tobytes() for g in got] == [w.tobytes() for w in want]
