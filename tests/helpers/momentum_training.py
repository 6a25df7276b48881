"""Trainings behind a hook that delivers momentum: in momentum mode, and with OneBitAdam."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gradferry.optim import OneBitAdam
from scenario import ChosenGradients, Scenario, Weight, hooked
from torch.nn.parallel import DistributedDataParallel

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)))
MOMENTUM = 0.8
FACTOR = math.sqrt((1 - MOMENTUM) / (1 + MOMENTUM))  # a third
STEPS = 6
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
BETAS = (0.9, 0.99)


def gradient(step: int, index: int) -> np.ndarray:
    return Scenario(WEIGHTS, seed=step).gradient(0, 0, 0, index)


def attached(
    momentum: float | None = MOMENTUM, warmup_steps: int = 0
) -> tuple[ChosenGradients, Any, Any]:
    model = ChosenGradients(Scenario(WEIGHTS))
    ddp = DistributedDataParallel(model)
    return model, ddp, hooked(ddp, "exact", momentum=momentum, warmup_steps=warmup_steps)


def one_bit_adam(
    ddp: DistributedDataParallel, *, freeze: int, **options: Any
) -> tuple[Any, OneBitAdam]:
    """The state of a hook whose warm-up ends at the freeze, and the optimizer behind it."""
    state = hooked(ddp, "sign1", momentum=BETAS[0], warmup_steps=freeze)
    options = {"betas": BETAS, "freeze_step": freeze, "state": state, **options}
    return state, OneBitAdam(ddp.parameters(), **options)
