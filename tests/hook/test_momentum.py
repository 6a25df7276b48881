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
from outcomes import attempt
from products import rows
from reference import Parameter, ReferenceEngine
from reference.codecs import find_codec
from reference.engine import momentum_behind
from scenario import ChosenGradients, Run, Scenario, Weight, hooked, reference_of
from stepping import bits, logged, settings, settings_of_steps, warned
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from world import Worlds

# --- momentum mode --------------------------------------------------------------------------------


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("make", "given", "expected"),
    [
        # In units of the factor, a third. Adam adds its decay to the gradient, before it divides by
        # the deviation.
        ("Adam", SETTINGS, {"lr": 0.01 / 3, "betas": (0.0, 0.95), "weight_decay": 0.1}),
        (
            "SGD",
            {"lr": 0.1, "momentum": 0.75, "nesterov": True, "weight_decay": 0.1},
            {"lr": 0.4, "momentum": 0, "nesterov": False, "weight_decay": 0.1},
        ),
        ("SGD", {"lr": 0.1, "momentum": 0.5, "dampening": 0.5}, {"lr": 0.1, "dampening": 0}),
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


def with_a_stranger(mine: Any) -> Any:
    return torch.optim.AdamW([*mine, nn.Parameter(torch.zeros(7))])


@pytest.mark.parametrize(
    ("make", "momentum", "warmup_steps", "text"),
    [
        (torch.optim.AdamW, None, 0, "attach with momentum="),
        (torch.optim.RMSprop, 0.8, 0, "not RMSprop: take its own momentum away, and the learning "
         "rate times 0.333"),
        (with_a_stranger, 0.8, 0,
         "parameter 2 of group 0, of shape (7,), is none that the hook reduces"),
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


SCHEDULES = (
    functools.partial(lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=STEPS + 1),  # and momenta
    functools.partial(lr_scheduler.CyclicLR, base_lr=0.001, max_lr=0.01, step_size_up=2),
    functools.partial(lr_scheduler.CosineAnnealingLR, T_max=STEPS, eta_min=0.001),
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
            if step < 2:  # it knows the groups it began with
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


# --- whose momentum OneBitAdam hands over: ranks compare ------------------------------------------

THREE_WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (64, 60)))


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("optimizers", "built_at", "native", "fault"),
    [
        ({0: [[0, 2]], 1: [[0, 2]]}, 0, True, ""),
        ({0: [[0], [1, 2]], 1: [[0], [1, 2]]}, 0, True, ""),
        ({0: [[0, 1, 2]], 1: [[]]}, 0, True, "rank 1 has no OneBitAdam that holds 'first' and 2"),
        ({0: [[0], [1, 2]], 1: [[0]]}, 0, True, "rank 1 has no OneBitAdam that holds 'bias' and 1"),
        ({0: [], 1: [[1]]}, 0, True, "rank 0 has no OneBitAdam that holds 'bias'"),
        *(
            (None, built_at, native, "rank 0 has no OneBitAdam that holds 'bias' and 1")
            for built_at, native in ((0, True), (0, False), (1, True))
        ),
    ],
)
@on_ranks()
def test_every_rank_must_hold_the_same_momenta(
    optimizers: dict[int, list[list[int]]] | None, built_at: int, native: bool, fault: str
) -> None:
    """In the first step after it was built at which ranks compare.

    optimizers: by rank, the indices of each one's parameters; None: one that is sharded.
    """
    ddp = DistributedDataParallel(ChosenGradients(Scenario(THREE_WEIGHTS)))
    state = hooked(ddp, "sign1", native=native, momentum=BETAS[0], warmup_steps=2)
    parameters = list(ddp.parameters())
    options = {"betas": BETAS, "freeze_step": 2, "state": state}
    targets = {w.name: torch.ones(w.shape) for w in THREE_WEIGHTS}
    steppers: list[Any] = []
    for step in range(4):
        if step == built_at and optimizers is None:
            steppers = [ZeroRedundancyOptimizer(parameters, OneBitAdam, **options)]
        elif step == built_at:
            mine = [[parameters[i] for i in each] for each in optimizers[dist.get_rank()]]
            steppers = [OneBitAdam([{"params": each}], **options) for each in mine]
        outcome = attempt(lambda: ddp(targets).backward())
        if fault and step == 2 * built_at:
            assert outcome.error == "StateError"
            assert outcome.text.startswith(fault)
            assert "unlike another rank" in outcome.text
            assert "without ZeroRedundancyOptimizer" in outcome.text
            return
        assert outcome.error is None, outcome
        for stepper in steppers:
            stepper.step()
    assert not fault


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

FREEZE = 3
RATE, DECAY = 0.01, 0.1
FLOOR = 0.01  # variance_floor by default
EPS = 1e-8  # by default
SCENARIO = Scenario(THREE_WEIGHTS)


@on_ranks()
def test_behind_a_hook_that_passes_through_all_steps_are_those_of_adamw() -> None:
    found = []
    for ours in (True, False):
        ddp = DistributedDataParallel(ChosenGradients(SCENARIO))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)
        if ours:
            with pytest.MonkeyPatch.context() as patch, warned() as caught:
                patch.setenv("GRADFERRY_DISABLE", "1")
                _, optimizer = one_bit_adam(ddp, freeze=2, lr=RATE, weight_decay=DECAY)
            assert any("without the momentum" in str(each.message) for each in caught)
        for step in range(5):
            optimizer.zero_grad()
            ddp(SCENARIO.targets(step, dist.get_rank())).backward()
            optimizer.step()
        found.append(bits(ddp.parameters()))
    assert found[0] == found[1]


def test_the_references_momentum_is_that_of_deepspeeds_algorithm() -> None:
    """Tang et al., 1-bit Adam, ICML 2021: worker and server errors are buffers of their own, the
    momentum is another one, and the average of what was compressed takes the momentum's place.
    """
    # Multiples of 1/8, beta 1/2, two ranks and a few steps: float64 and float32 are both exact, so
    # that two algorithms with other buffers and another order must agree to the bit.
    n, beta, rng, codec = 2048, 0.5, np.random.default_rng(9), find_codec("sign1")

    def eighths() -> np.ndarray:
        return (rng.integers(-7, 8, n) / 8).astype(np.float32)

    def compressed(v: np.ndarray) -> np.ndarray:
        return codec.decode(codec.encode(v[None].astype(np.float32), "float32"), n, "float32")[0]

    start = eighths()
    ours = ReferenceEngine(2, [Parameter("w", n)], "sign1", momentum=beta)
    for residual in ours.worker_residual[0]:
        residual += np.float32(beta) * start  # as OneBitAdam hands it over
    momentum, server_error = start.astype(float), np.zeros(n)
    errors = [np.zeros(n), np.zeros(n)]
    for _ in range(4):
        gradients = [eighths() for _ in range(2)]
        local = [
            beta * momentum + (1 - beta) * g + e for g, e in zip(gradients, errors, strict=True)
        ]
        sent = [compressed(each) for each in local]
        errors = [one - other for one, other in zip(local, sent, strict=True)]
        mean = (sent[0].astype(float) + sent[1]) / 2 + server_error
        momentum = compressed(mean).astype(float)
        server_error = mean - momentum
        assert (ours.step([[gradient] for gradient in gradients])[0][0] == momentum).all()
    for kept, error in zip(ours.worker_residual[0], errors, strict=True):
        # Ours has one buffer for what DeepSpeed has two.
        assert (kept == error + beta * momentum).all()
    assert (ours.owner_residual[0] == server_error).all()


@on_ranks()
def test_the_floor_takes_a_complex_element_as_one_number() -> None:
    """So that one whose imaginary part has no gradient is as active as its real part."""
    weights = (Weight("complex", (8, 4), torch.complex64),)
    found = []
    for floor in (FLOOR, 0.0):
        ddp = DistributedDataParallel(ChosenGradients(Scenario(weights)))
        _, optimizer = one_bit_adam(ddp, freeze=FREEZE, lr=1.0, variance_floor=floor)
        for _ in range(FREEZE + 2):
            optimizer.zero_grad()
            ddp({"complex": torch.ones(8, 4, dtype=torch.complex64)}).backward()
            optimizer.step()
        found.append(bits(ddp.parameters()))
    assert found[0] == found[1]


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


def warming_up(codec: str, warmup: str = "q8", steps: int = FREEZE) -> Scenario:
    options = {"momentum": BETAS[0], "warmup_steps": steps, "warmup": warmup}
    return Scenario(THREE_WEIGHTS, codec=codec, options=options, ddp={"bucket_cap_mb": 0.05})


@pytest.mark.parametrize("at", [FREEZE - 1, FREEZE])
@on_ranks()
def test_residuals_of_a_compressed_warmup_are_not_taken_for_momentum(at: int) -> None:
    """A state of step `at` is loaded under other options, and back."""
    scenario = warming_up("sign1")
    dense = {"momentum": BETAS[0], "warmup_steps": FREEZE}
    for options in ({"momentum": BETAS[0]}, dense, {**dense, "warmup": "q4"}):
        one, other = Run(scenario), Run(dataclasses.replace(scenario, options=options))
        assert "warm-up: 3 steps with q8" in str(one.state)
        for step in range(at):
            one.step(step)
            other.step(step)
        saved = one.state.state_dict(), other.state.state_dict()
        fits = at == FREEZE or "warmup" in options
        for run, theirs in zip((other, one), saved, strict=True):
            outcome = attempt(lambda run=run, theirs=theirs: run.state.load_state_dict(theirs))
            assert outcome.error == (None if fits else "StateError")
            assert fits or "load it with the arguments it was saved with" in outcome.text


# --- momentum that an optimizer hands over --------------------------------------------------------


def case_one_bit(
    scenario: Scenario, skipped: tuple[int, ...]
) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    """Gradients, unscaled, and parameters, of the steps that a GradScaler does not skip.

    All gradients of the others are infinite, so that they leave every residual as it was.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    options = {**scenario.options, "warmup_steps": FREEZE, "grad_scaler": scaler}
    run = Run(dataclasses.replace(scenario, options=options))
    parameters = list(run.model.parameters())
    optimizer = OneBitAdam(
        parameters, lr=RATE, betas=BETAS, weight_decay=DECAY, freeze_step=FREEZE, state=run.state
    )
    seen = []
    for step in range(7):
        optimizer.zero_grad()
        targets = run.targets(step)
        if step in skipped:
            targets = {name: torch.full_like(each, math.inf) for name, each in targets.items()}
        scaler.scale(run.ddp(targets)).backward()
        gradients = [p.grad.div(scaler.get_scale()).numpy().flatten() for p in parameters]
        scaler.step(optimizer)
        scaler.update()
        if step not in skipped:
            seen.append((gradients, [p.detach().numpy().flatten() for p in parameters]))
    return seen


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("codecs", "skipped", "place"),
    rows(
        (("sign1", "q8"), ("topk:ratio=0.05", "exact"), ("exact", "exact")),
        ((), (0,), (2,), (2, 3), (3,)),
        (
            {"world_size": 2},
            {"world_size": 4, "nodes": ((0, 1), (2, 3))},
            {"world_size": 3},
            {"world_size": 1},
        ),
    ),
)
def test_dense_steps_are_those_of_adamw_and_frozen_ones_keep_its_variance(
    worlds: Worlds, codecs: tuple[str, str], skipped: tuple[int, ...], place: dict[str, Any]
) -> None:
    """`codecs`: after the warm-up, and in it. What arrives then is the momentum handed over."""
    fewer = sum(step < FREEZE for step in skipped)
    late = FREEZE - 1 in skipped  # one step more passes until the optimizer finds it is to freeze
    dense = FREEZE - fewer
    scenario = dataclasses.replace(warming_up(*codecs, dense), **place)
    engine, count = reference_of(scenario), range(len(THREE_WEIGHTS))
    ours = [nn.Parameter(torch.zeros(w.num_elements)) for w in THREE_WEIGHTS]
    adamw = torch.optim.AdamW(ours, lr=RATE, betas=BETAS, weight_decay=DECAY, foreach=False)
    taken = [step for step in range(7) if step not in skipped]
    by_rank = worlds(scenario.world_size).run(case_one_bit, scenario=scenario, skipped=skipped)
    for turn, step in enumerate(taken):
        given = [
            [SCENARIO.gradient(step, 0, rank, i) for i in count]
            for rank in range(scenario.world_size)
        ]
        arrived = engine.step(given)[0]
        if turn < dense:
            for parameter, gradient in zip(ours, arrived, strict=True):
                parameter.grad = torch.from_numpy(gradient)
            adamw.step()
        states = [adamw.state[parameter] for parameter in ours]
        averages = [state["exp_avg"].numpy() for state in states]
        if turn == dense - 1 + late:
            for index in count:
                own = engine.codec_of(index)
                share = (1 - momentum_behind(own, BETAS[0])) / (1 - BETAS[0])
                factor = np.float32(BETAS[0] ** (1 + late) * share)
                for residual in engine.worker_residual[index]:
                    residual += averages[index] * factor
        for seen in by_rank:
            gradients, parameters = seen[turn]
            assert [g.tobytes() for g in gradients] == [g.tobytes() for g in arrived], step
            if turn < dense:
                assert [p.tobytes() for p in parameters] == bits(ours), step
                continue
            for i in count:
                v = states[i]["exp_avg_sq"].double().numpy()
                v = np.maximum(v, FLOOR * v.mean()) / (1 - BETAS[1] ** dense)
                before = seen[turn - 1][1][i].astype(float)
                left = BETAS[0] * averages[i] * (late and turn == dense)
                rate = RATE / (1 - BETAS[0] ** (turn + 1)) / (np.sqrt(v) + EPS)
                expected = before * (1 - RATE * DECAY) - rate * (arrived[i] + left)
                # 2 fp32 roundings of the decay, 3 of the deviation, 2 of the momentum and 3 of the
                # step, of which none is of a larger number.
                bound = np.abs(before) + rate * (np.abs(arrived[i]) + np.abs(left))
                assert (np.abs(parameters[i] - expected) <= 10 * 2.0**-24 * bound).all(), step
