"""Optimizers by name, set up for what the hook does with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gradferry.averaging.handle import Averaging
from gradferry.ddp.state import HookState
from gradferry.errors import ConfigError
from gradferry.optim import OneBitAdam, momentum_mode
from torch import nn

from gradferry_lab.workloads.models import Workload
from gradferry_lab.workloads.task import Task

OPTIMIZERS = ("AdamW", "SGD", "OneBitAdam", "Muon")
BETAS = (0.9, 0.95)  # of AdamW and OneBitAdam
SGD_MOMENTUM = 0.9
_WEIGHT_DECAY = 0.01  # of AdamW, OneBitAdam and Muon
_MUON_RATE = 0.02  # with torch's own factor for the shape of a matrix


def make_optimizer(
    name: str,
    rates: Task | Workload,
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
        rates: what has learning rates.
        model: what is trained.
        state: of the hook; None for a hook of PyTorch's.
        fused: torch's fast AdamW, whose last bits differ; None is torch's own choice.

    Raises:
        ConfigError: the optimizer does not fit the hook's momentum, or the model.
    """
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
        return _Muon(model, rates.learning_rate, state)
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
    """torch's Muon (Jordan et al. 2024) for matrices of a model's blocks, AdamW for all else: as
    one optimizer, so that one schedule sets the rates of both.

    Behind a hook that keeps the momentum, Muon has none, and the same rate: the length of its steps
    does not depend on that of gradients. Raises ConfigError for a model without blocks.
    """

    takes_momentum = True  # both parts do, behind such a hook

    def __init__(self, model: nn.Module, adamw_rate: float, state: Averaging | None) -> None:
        named = [(f".{name}", each) for name, each in model.named_parameters()]
        hidden = [each for name, each in named if ".blocks." in name and each.dim() == 2]
        if not hidden:
            raise ConfigError("Muon is for the tasks text, tiny_text, text_10m and gpt2_small")
        rest = [each for _, each in named if not any(each is matrix for matrix in hidden)]
        adamw = torch.optim.AdamW(rest, lr=adamw_rate, betas=BETAS, weight_decay=_WEIGHT_DECAY)
        own_momentum: dict[str, Any] = {}
        if state is not None and state.config.momentum:
            momentum_mode(adamw, state)
            own_momentum = {"momentum": 0.0, "nesterov": False}
        muon = torch.optim.Muon(hidden, lr=_MUON_RATE, weight_decay=_WEIGHT_DECAY, **own_momentum)
        self._parts: tuple[Any, ...] = (muon, adamw)
        super().__init__(model.parameters(), {})
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss
