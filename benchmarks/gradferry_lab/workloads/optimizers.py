"""Optimizers by name, set up for what the hook does with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from gradferry.core.names import closest
from gradferry.ddp.state import HookState
from gradferry.errors import ConfigError
from gradferry.optim import OneBitAdam, momentum_mode
from gradferry.reduction.averaging import Averaging
from torch import nn

OPTIMIZERS = ("AdamW", "SGD", "OneBitAdam", "Muon")
BETAS = (0.9, 0.95)  # of AdamW and OneBitAdam
SGD_MOMENTUM = 0.9
_WEIGHT_DECAY = 0.01  # of AdamW, OneBitAdam and Muon
_MUON_RATE = 0.02  # with torch's own factor for the shape of a matrix


class LearningRates(Protocol):
    """What a task says about its optimizers."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of AdamW."""

    @property
    def sgd_learning_rate(self) -> float:
        """The learning rate of SGD with momentum 0.9."""


def check_optimizer(name: str) -> None:
    """Raises ConfigError, with the closest match, when no optimizer has this name."""
    if name not in OPTIMIZERS:
        raise ConfigError(
            f"unknown optimizer {name!r}; optimizers are {', '.join(OPTIMIZERS)}"
            f"{closest(name, OPTIMIZERS)}"
        )


def make_optimizer(
    name: str,
    rates: LearningRates,
    model: nn.Module,
    state: Averaging | None,
    *,
    fused: bool | None = None,
) -> torch.optim.Optimizer:
    """An optimizer at the learning rate of a task.

    Behind a hook that keeps the momentum, AdamW and SGD are those of `momentum_mode`, and
    OneBitAdam freezes its variance when the hook's warm-up steps end.

    Args:
        name: one of OPTIMIZERS.
        rates: of the task.
        model: what is trained.
        state: of the hook; None for a hook of PyTorch's.
        fused: torch's fast AdamW, whose last bits differ; None is torch's own choice.

    Raises:
        ConfigError: the name is unknown, or the optimizer does not fit the hook's momentum.
    """
    check_optimizer(name)
    if name == "OneBitAdam":
        if not isinstance(state, HookState):
            raise ConfigError(
                "OneBitAdam needs a codec with momentum under DDP, not a hook of PyTorch's or FSDP2"
            )
        return OneBitAdam(
            model.parameters(),
            lr=rates.learning_rate,
            betas=BETAS,
            weight_decay=_WEIGHT_DECAY,
            freeze_step=state.config.warmup_steps,
            state=state,
        )
    if name == "Muon":
        if state is not None and state.config.momentum:
            raise ConfigError("Muon has a momentum of its own: name a hook without momentum=")
        return _Muon(model, rates.learning_rate)
    optimizer: torch.optim.Optimizer
    if name == "AdamW":
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=rates.learning_rate,
            betas=BETAS,
            weight_decay=_WEIGHT_DECAY,
            fused=fused,
        )
    else:
        optimizer = torch.optim.SGD(
            model.parameters(), lr=rates.sgd_learning_rate, momentum=SGD_MOMENTUM
        )
    if state is not None and state.config.momentum:
        momentum_mode(optimizer, state)
    return optimizer


class _Muon(torch.optim.Optimizer):
    """torch's Muon (Jordan et al. 2024) for hidden matrices, AdamW for all else: as one optimizer,
    so that one schedule sets the rates of both.

    Hidden matrices are the weights of `nn.Linear`, but for the last, which gives the outputs.
    """

    def __init__(self, model: nn.Module, adamw_rate: float) -> None:
        linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        hidden = {id(weight) for weight in linear[:-1]}
        rest = [each for each in model.parameters() if id(each) not in hidden]
        self._parts = (
            torch.optim.Muon(linear[:-1], lr=_MUON_RATE, weight_decay=_WEIGHT_DECAY),
            torch.optim.AdamW(rest, lr=adamw_rate, betas=BETAS, weight_decay=_WEIGHT_DECAY),
        )
        super().__init__(model.parameters(), {})
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()  # type: ignore[no-untyped-call]
        return loss
