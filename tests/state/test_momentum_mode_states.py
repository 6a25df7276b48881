"""Optimizers in momentum mode: saved states, copies, steps that raise, and other hooks."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import gradferry
import pytest
import torch
from momentum_training import FACTOR, SETTINGS, STEPS, WEIGHTS, attached, gradient
from outcomes import attempt
from scenario import ChosenGradients
from stepping import settings, settings_of_steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]


def trained(
    steps: range, optimizer: torch.optim.Optimizer, model: ChosenGradients, ddp: Any
) -> list[bytes]:
    for step in steps:
        optimizer.zero_grad()
        ddp({w.name: w.from_flat(gradient(step, i)) for i, w in enumerate(WEIGHTS)}).backward()
        optimizer.step()
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def by_an_older_version(saved: dict[str, Any]) -> dict[str, Any]:
    """A state as when momentum_mode() changed the groups themselves."""
    (group,) = saved["param_groups"]
    decay, (_, beta2) = group["weight_decay"], group["betas"]
    group.update(lr=group["lr"] * FACTOR, betas=(0.0, beta2), weight_decay=decay / FACTOR)
    return saved


def case_states() -> dict[str, bool]:
    """Whether trainings that load a state in the middle end with the same bits."""

    def start() -> tuple[Any, ChosenGradients, Any, Any]:
        model, ddp, state = attached()
        optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
        return gradferry.optim.momentum_mode(optimizer, state), model, ddp, state

    optimizer, model, ddp, state = start()
    trained(range(3), optimizer, model, ddp)
    saved = copy.deepcopy((optimizer.state_dict(), model.state_dict(), state.state_dict()))
    expected = trained(range(3, STEPS), optimizer, model, ddp)

    def resumed(changed: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
        optimizer, model, ddp, state = start()
        ours, weights, hooks = copy.deepcopy(saved)
        optimizer.load_state_dict(changed(ours))
        model.load_state_dict(weights)
        state.load_state_dict(hooks)
        return trained(range(3, STEPS), optimizer, model, ddp) == expected

    return {
        "own": saved[0]["param_groups"][0]["betas"] == SETTINGS["betas"],
        "resumed": resumed(lambda ours: ours),
        "older": resumed(by_an_older_version),
    }


def test_saved_states_hold_the_users_numbers_and_resume_to_the_bit(worlds: Worlds) -> None:
    assert worlds(1).run(case_states) == [{"own": True, "resumed": True, "older": True}]


def case_unharmed() -> dict[str, Any]:
    """A closure that raises; another hook for the same model; a copy; a group of a stranger, and a
    hook that reduces it.
    """
    model, ddp, state = attached()
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    before = settings(optimizer)
    gradferry.optim.momentum_mode(optimizer, state)

    def closure() -> float:
        raise ZeroDivisionError(str(settings(optimizer) == before))

    raised = attempt(lambda: optimizer.step(closure))
    trained(range(1), optimizer, model, ddp)
    again = DistributedDataParallel(model)
    gradferry.optim.momentum_mode(optimizer, gradferry.attach(again, "exact", momentum=0.5))
    seen = settings_of_steps(optimizer)
    trained(range(1, 2), optimizer, model, again)
    copied = settings_of_steps(duplicate := copy.deepcopy(optimizer))
    duplicate.step()
    kept = settings(optimizer) == before
    stranger = nn.Parameter(torch.zeros(7))
    optimizer.add_param_group({"params": [stranger]})
    refused = attempt(optimizer.step)
    larger = DistributedDataParallel(nn.ParameterList([*model.parameters(), stranger]))
    gradferry.optim.momentum_mode(optimizer, gradferry.attach(larger, "exact", momentum=0.5))
    return {
        "raised": (raised.error, raised.text),
        "rate": seen[0][0]["lr"],
        "copy": copied[0] == before,
        "kept": kept,
        "stranger": refused.text,
        "no stranger": attempt(optimizer.step).error,
    }


def test_steps_leave_the_optimizer_as_it_is_whatever_happens(worlds: Worlds) -> None:
    (answer,) = worlds(1).run(case_unharmed)
    assert answer["raised"] == ("ZeroDivisionError", "True")
    # Once, and that of the second hook: the root of (1 - 1/2) / (1 + 1/2).
    assert answer["rate"] == pytest.approx(0.01 * math.sqrt(1 / 3), rel=1e-15)
    assert answer["copy"]
    assert answer["kept"]
    assert "parameter 0 of group 1, of shape (7,), is none that the hook" in answer["stranger"]
    assert answer["no stranger"] is None


def case_stale(zero: bool) -> dict[str, Any]:
    """Warnings, and settings of steps, behind hooks that come after the one of momentum mode."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, _, state = attached()
    if zero:
        adamw = torch.optim.AdamW
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=adamw, **SETTINGS)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    stepping = optimizer.optim if zero else optimizer
    before = settings(stepping)
    gradferry.optim.momentum_mode(optimizer, state)
    found: dict[str, Any] = {}
    for name, codec, momentum in (
        ("none", "exact", None),
        ("another", "exact", 0.5),
        ("off", "off", None),
    ):
        ddp = DistributedDataParallel(model)
        state = gradferry.attach(ddp, codec, momentum=momentum)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(range(2), optimizer, model, ddp)
        found[name] = [str(w.message) for w in caught]
        del ddp
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(model)
        state = gradferry.attach(ddp, "exact")
        assert gradferry.optim.momentum_mode(optimizer, state) is optimizer
        seen = settings_of_steps(stepping)
        trained(range(1), optimizer, model, ddp)
        again = attempt(lambda: gradferry.optim.momentum_mode(optimizer, state))
    found["left"] = [str(w.message) for w in caught], seen[0] == before
    found["says so"] = hasattr(optimizer, "takes_momentum") or hasattr(stepping, "takes_momentum")
    found["again"] = again.error
    return found


@pytest.mark.parametrize("zero", [False, True], ids=["", "zero"])
def test_momentum_mode_of_another_hook_warns_and_can_be_left(worlds: Worlds, zero: bool) -> None:
    (found,) = worlds(1).run(case_stale, zero=zero)
    for name in ("none", "another", "off"):
        (text,) = found[name]
        assert text.startswith("AdamW was set up by momentum_mode() for another hook"), name
    assert found["left"] == ([], True)
    assert not found["says so"]
    assert found["again"] == "ConfigError"
