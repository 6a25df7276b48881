"""Optimizers by name, set up for what the hook does with gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from gradferry.core.names import closest
from gradferry.ddp.state import HookState
from gradferry.errors import ConfigError
from gradferry.optim import OneBitAdam, momentum_mode
from gradferry.reduction.averaging import Averaging
from torch import nn

OPTIMIZERS = ("AdamW", "SGD", "OneBitAdam")
BETAS = (0.9, 0.95)  # of AdamW and OneBitAdam
SGD_MOMENTUM = 0.9
_WEIGHT_DECAY = 0.01  # of AdamW and OneBitAdam


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
    parameters: Iterable[nn.Parameter],
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
        parameters: of the model.
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
            parameters,
            lr=rates.learning_rate,
            betas=BETAS,
            weight_decay=_WEIGHT_DECAY,
            freeze_step=state.config.warmup_steps,
            state=state,
        )
    optimizer: torch.optim.Optimizer
    if name == "AdamW":
        optimizer = torch.optim.AdamW(
            parameters,
            lr=rates.learning_rate,
            betas=BETAS,
            weight_decay=_WEIGHT_DECAY,
            fused=fused,
        )
    else:
        optimizer = torch.optim.SGD(parameters, lr=rates.sgd_learning_rate, momentum=SGD_MOMENTUM)
    if state is not None and state.config.momentum:
        momentum_mode(optimizer, state)
    return optimizer
