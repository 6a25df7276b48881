"""How parameters follow from gradients: the optimizer, and what the hook remembers for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

import gradferry
from gradferry.config import closest
from gradferry.errors import ConfigError
from gradferry.workloads.task import Task

OPTIMIZERS = ("AdamW", "SGD", "OneBitAdam")
MOMENTUM_MODE = "momentum"

_BETAS = (0.9, 0.95)
_SGD_MOMENTUM = 0.9
_WEIGHT_DECAY = 0.01  # of AdamW and OneBitAdam
_DENSE_SHARE = 0.2  # of the steps: OneBitAdam learns its variance from dense gradients


@dataclass(frozen=True)
class Recipe:
    """An optimizer, and what a codec's hook remembers for it.

    Attributes:
        optimizer: one of OPTIMIZERS.
        mode: "momentum", in which the hook averages momenta in place of gradients, or the
            `error_feedback` of `gradferry.attach`. OneBitAdam and momentum go together, AdamW and
            momentum do not.
    """

    optimizer: str = "AdamW"
    mode: str = "auto"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"unknown optimizer {self.optimizer!r}; optimizers are {', '.join(OPTIMIZERS)}"
                f"{closest(self.optimizer, OPTIMIZERS)}"
            )
        fitting = {"AdamW": not self.in_momentum_mode, "OneBitAdam": self.in_momentum_mode}
        if not fitting.get(self.optimizer, True):
            raise ConfigError(
                f"{self.optimizer} with mode {self.mode!r}: momentum mode needs OneBitAdam or SGD, "
                f"and OneBitAdam needs momentum mode"
            )

    @property
    def in_momentum_mode(self) -> bool:
        """Whether the hook keeps the momentum, and the optimizer has none of its own."""
        return self.mode == MOMENTUM_MODE

    @property
    def hook_options(self) -> dict[str, object]:
        """Arguments of `gradferry.attach`."""
        if not self.in_momentum_mode:
            return {"error_feedback": self.mode}
        return {"momentum": _SGD_MOMENTUM if self.optimizer == "SGD" else _BETAS[0]}


def make_optimizer(
    recipe: Recipe,
    task: Task,
    parameters: Iterable[nn.Parameter],
    steps: int,
    state: gradferry.HookState | None,
) -> torch.optim.Optimizer:
    """The recipe's optimizer at the task's learning rate.

    Args:
        recipe: what to make.
        task: gives the learning rates.
        parameters: of the model.
        steps: of the training; OneBitAdam freezes its variance after a fifth of them.
        state: of the hook; OneBitAdam needs it.
    """
    if recipe.optimizer == "AdamW":
        return torch.optim.AdamW(
            parameters, lr=task.learning_rate, betas=_BETAS, weight_decay=_WEIGHT_DECAY
        )
    if recipe.optimizer == "OneBitAdam":
        from gradferry.optim import OneBitAdam

        return OneBitAdam(
            parameters,
            lr=task.learning_rate,
            betas=_BETAS,
            weight_decay=_WEIGHT_DECAY,
            freeze_step=max(1, round(_DENSE_SHARE * steps)),
            state=state,
        )
    if recipe.in_momentum_mode:
        # The hook's momentum is an average, (1 - beta) times the sum that SGD keeps.
        return torch.optim.SGD(parameters, lr=task.sgd_learning_rate / (1 - _SGD_MOMENTUM))
    return torch.optim.SGD(parameters, lr=task.sgd_learning_rate, momentum=_SGD_MOMENTUM)
