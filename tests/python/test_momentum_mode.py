"""`gradferry.optim.momentum_mode`: optimizers as users have them, behind a hook with momentum."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from outcomes import Outcome, attempt
from scenario import ChosenGradients, Scenario, Weight
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)))
MOMENTUM = 0.8
FACTOR = math.sqrt((1 - MOMENTUM) / (1 + MOMENTUM))  # a third
STEPS = 6
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}


def gradient(step: int, index: int) -> np.ndarray:
    return Scenario(WEIGHTS, seed=step).gradient(0, 0, 0, index)


def attached(
    momentum: float | None = MOMENTUM, warmup_steps: int = 0
) -> tuple[ChosenGradients, Any, Any]:
    import gradferry

    model = ChosenGradients(Scenario(WEIGHTS))
    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, "exact", momentum=momentum, warmup_steps=warmup_steps)
    return model, ddp, state


def case_groups(make: str, settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The optimizer's settings afterwards, and what was logged."""
    import gradferry

    model, _, state = attached()
    optimizer = getattr(torch.optim, make)(model.parameters(), **settings)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("gradferry")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        assert gradferry.optim.momentum_mode(optimizer, state) is optimizer
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    (group,) = optimizer.param_groups
    return {key: value for key, value in group.items() if key != "params"}, said


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("make", "settings", "expected"),
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
    ],
)
def test_settings_are_those_for_momentum(
    worlds: Worlds, make: str, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    ((group, said),) = worlds(1).run(case_groups, make=make, settings=settings)
    for key, value in expected.items():
        # A handful of roundings of fp64, and nothing else, lie between both.
        assert group[key] == pytest.approx(value, rel=1e-14), key
    assert said == [
        f"gradients arrive with momentum 0.8: lr={expected['lr']:g} instead of {_rate(settings):g}"
    ]


def _rate(settings: dict[str, Any]) -> float:
    return float(settings.get("lr", 1e-3))


def case_adamw() -> list[list[np.ndarray]]:
    import gradferry

    model, ddp, state = attached()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **SETTINGS)
    gradferry.optim.momentum_mode(optimizer, state)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp({w.name: w.from_flat(gradient(step, i)) for i, w in enumerate(WEIGHTS)}).backward()
        optimizer.step()
        seen.append([p.detach().reshape(-1).numpy().copy() for p in model.parameters()])
    return seen


@pytest.mark.torch_core
def test_a_training_is_that_of_averages_over_their_own_deviation(worlds: Worlds) -> None:
    # A world of one sends nothing, so the momentum is exact.
    (seen,) = worlds(1).run(case_adamw)
    rate, beta2 = 0.01 * FACTOR, 0.95
    parameters = [
        p.detach().reshape(-1).clone() for p in ChosenGradients(Scenario(WEIGHTS)).parameters()
    ]
    for index, p in enumerate(parameters):
        average, square = np.float32(0), torch.zeros_like(p)
        for step in range(STEPS):
            new = np.float32(1 - MOMENTUM) * gradient(step, index)
            average = new + average * np.float32(MOMENTUM)
            a = torch.from_numpy(average)
            square.mul_(beta2).addcmul_(a, a, value=1 - beta2)
            deviation = (square.sqrt() / (1 - beta2 ** (step + 1)) ** 0.5).add_(1e-8)
            p.mul_(1 - rate * (0.1 / FACTOR))
            p.addcdiv_(a, deviation, value=-rate)
            assert p.numpy().tobytes() == seen[step][index].tobytes(), step


def case_top_k() -> list[tuple[list[str], float, float]]:
    """Names, learning rate and decay of every group. One parameter travels as `exact`."""
    import gradferry

    model = ChosenGradients(Scenario(WEIGHTS))
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, "topk:ratio=0.01", momentum=MOMENTUM)
    optimizer = torch.optim.AdamW([*model.parameters(), frozen], lr=1.0, weight_decay=0.1)
    gradferry.optim.momentum_mode(optimizer, state)
    names = {p: name for name, p in model.named_parameters()} | {frozen: "frozen"}
    return [
        ([names[p] for p in group["params"]], group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]


def test_parameters_that_arrive_with_less_momentum_have_a_group_of_their_own(
    worlds: Worlds,
) -> None:
    # m / (1 - m) = 4 / (1 + (1 / 0.01 - 1) / 4), so m = 16 / 119 and (1 - m) / (1 + m) = 103 / 135.
    factor = math.sqrt(103 / 135)
    for groups in worlds(2).run(case_top_k):
        (first, rate, decay), (others, other_rate, other_decay) = groups
        assert ([name.split(".")[-1] for name in first], others) == (["first", "frozen"], ["bias"])
        assert (rate, decay) == pytest.approx((factor, 0.1 / factor), rel=1e-14)
        assert (other_rate, other_decay) == pytest.approx((FACTOR, 0.1 / FACTOR), rel=1e-14)
    # A world of one compresses nothing, and keeps all of the momentum.
    ((group,),) = worlds(1).run(case_top_k)
    assert group[1] == pytest.approx(FACTOR, rel=1e-14)


def case_refused(prepare: Callable[[Any, Any], Any], momentum: float | None) -> Outcome:
    import gradferry

    model, _, state = attached(momentum)
    optimizer = prepare(model, state)

    def call() -> None:
        gradferry.optim.momentum_mode(optimizer, state)

    return attempt(call)


def adamw(model: nn.Module, state: Any) -> Any:
    return torch.optim.AdamW(model.parameters())


def rmsprop(model: nn.Module, state: Any) -> Any:
    return torch.optim.RMSprop(model.parameters())


def with_a_stranger(model: nn.Module, state: Any) -> Any:
    return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(7))])


def twice(model: nn.Module, state: Any) -> Any:
    import gradferry

    return gradferry.optim.momentum_mode(adamw(model, state), state)


def scheduled(model: nn.Module, state: Any) -> Any:
    optimizer = adamw(model, state)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return optimizer


def stepped(model: nn.Module, state: Any) -> Any:
    optimizer = adamw(model, state)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("prepare", "momentum", "kind", "text"),
    [
        (adamw, None, "ConfigError", "attach with momentum="),
        (rmsprop, 0.8, "ConfigError", "not RMSprop: take its own momentum away, and the learning "
         "rate times 0.333"),
        (with_a_stranger, 0.8, "ConfigError", "parameter 2 of group 0, of shape (7,), is none that "
         "the hook reduces"),
        (twice, 0.8, "ConfigError", "group 0 has betas[0]=0"),
        (scheduled, 0.8, "ConfigError", "make the schedule after momentum_mode()"),
        (stepped, 0.8, "StateError", "this AdamW has stepped before"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_up_is_refused(
    worlds: Worlds, prepare: Callable[[Any, Any], Any], momentum: float | None, kind: str, text: str
) -> None:
    (outcome,) = worlds(1).run(case_refused, prepare=prepare, momentum=momentum)
    assert outcome.error == kind
    assert text in outcome.text


def case_behind_a_warmup(optimizer_type: Any) -> Outcome:
    import gradferry

    model, _, state = attached(warmup_steps=7)
    optimizer = optimizer_type(model.parameters(), lr=0.1)
    return attempt(lambda: gradferry.optim.momentum_mode(optimizer, state))


def test_sgd_behind_a_warmup_is_refused(worlds: Worlds) -> None:
    """It would have no momentum there: such trainings ended 7 % to 16 % above."""
    (outcome,) = worlds(1).run(case_behind_a_warmup, optimizer_type=torch.optim.SGD)
    assert outcome.error == "ConfigError"
    assert "warmup_steps=7: so long the hook delivers gradients" in outcome.text
    (outcome,) = worlds(1).run(case_behind_a_warmup, optimizer_type=torch.optim.AdamW)
    assert outcome.error is None


def case_passes_through() -> tuple[float, float]:
    import gradferry

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADFERRY_DISABLE", "1")
        model, _, state = attached()
    optimizer = gradferry.optim.momentum_mode(adamw(model, state), state)
    group = optimizer.param_groups[0]
    return group["lr"], group["betas"][0]


def test_gradients_that_pass_through_keep_their_optimizer(worlds: Worlds) -> None:
    assert worlds(1).run(case_passes_through) == [(1e-3, 0.9)]
