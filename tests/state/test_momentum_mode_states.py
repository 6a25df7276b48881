"""Optimizers in momentum mode: copies, steps that raise, and other hooks."""

from __future__ import annotations

import copy
import math
from typing import Any

import gradferry
import pytest
import torch
from momentum_training import SETTINGS, WEIGHTS, attached, gradient
from on_ranks import on_ranks
from outcomes import attempt
from scenario import ChosenGradients
from stepping import settings, settings_of_steps, warned
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def trained(
    steps: range, optimizer: torch.optim.Optimizer, model: ChosenGradients, ddp: Any
) -> list[bytes]:
    for step in steps:
        optimizer.zero_grad()
        ddp({w.name: w.from_flat(gradient(step, i)) for i, w in enumerate(WEIGHTS)}).backward()
        optimizer.step()
    return [p.detach().numpy().tobytes() for p in model.parameters()]


@on_ranks(1)
def test_steps_leave_the_optimizer_as_it_is_whatever_happens() -> None:
    """A closure that raises; another hook for the same model; a copy; a group of a stranger, and a
    hook that reduces it.
    """
    model, ddp, state = attached()
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    before = settings(optimizer)
    gradferry.optim.momentum_mode(optimizer, state)

    def closure() -> float:
        assert settings(optimizer) == before
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    trained(range(1), optimizer, model, ddp)
    again = DistributedDataParallel(model)
    gradferry.optim.momentum_mode(optimizer, gradferry.attach(again, "exact", momentum=0.5))
    seen = settings_of_steps(optimizer)
    trained(range(1, 2), optimizer, model, again)
    # Once, and that of the second hook: the root of (1 - 1/2) / (1 + 1/2).
    assert seen[0][0]["lr"] == pytest.approx(0.01 * math.sqrt(1 / 3), rel=1e-15)
    copied = settings_of_steps(duplicate := copy.deepcopy(optimizer))
    duplicate.step()
    assert copied[0] == settings(optimizer) == before
    stranger = nn.Parameter(torch.zeros(7))
    optimizer.add_param_group({"params": [stranger]})
    refused = attempt(optimizer.step)
    assert "parameter 0 of group 1, of shape (7,), is none that the hook" in refused.text
    larger = DistributedDataParallel(nn.ParameterList([*model.parameters(), stranger]))
    gradferry.optim.momentum_mode(optimizer, gradferry.attach(larger, "exact", momentum=0.5))
    optimizer.step()


@pytest.mark.parametrize("zero", [False, True], ids=["", "zero"])
@on_ranks(1)
def test_momentum_mode_of_another_hook_warns_and_can_be_left(zero: bool) -> None:
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
    for codec, momentum in (("exact", None), ("exact", 0.5), ("off", None)):
        ddp = DistributedDataParallel(model)
        state = gradferry.attach(ddp, codec, momentum=momentum)
        with warned() as said:
            trained(range(2), optimizer, model, ddp)
        (text,) = (str(each.message) for each in said)
        assert text.startswith("AdamW was set up by momentum_mode() for another hook")
        del ddp
    with warned() as said:
        ddp = DistributedDataParallel(model)
        state = gradferry.attach(ddp, "exact")
        assert gradferry.optim.momentum_mode(optimizer, state) is optimizer
        seen = settings_of_steps(stepping)
        trained(range(1), optimizer, model, ddp)
        again = attempt(lambda: gradferry.optim.momentum_mode(optimizer, state))
    assert said == []
    assert seen[0] == before
    assert not hasattr(optimizer, "takes_momentum")
    assert not hasattr(stepping, "takes_momentum")
    assert again.error == "ConfigError"
