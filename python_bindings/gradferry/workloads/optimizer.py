"""The optimizer that goes with a hook: AdamW, or its 1-bit variant for hooks in momentum mode."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from gradferry.optim import OneBitAdam
from gradferry.workloads.hooks import HookHandle

_VARIANCE_DECAY = 0.95
_MOMENTUM = 0.9


def make_optimizer(
    handle: HookHandle, parameters: ParamsT, learning_rate: float, *, fused: bool | None = None
) -> torch.optim.Optimizer:
    """AdamW with betas 0.9 and 0.95; with the hook's momentum instead of 0.9 in momentum mode.

    fused: torch's fast AdamW; None is torch's own choice.
    """
    if handle.state:
        config = handle.state._bound().config
        if config.momentum:
            return OneBitAdam(
                parameters,
                lr=learning_rate,
                betas=(config.momentum, _VARIANCE_DECAY),
                weight_decay=0.01,  # AdamW's default
                freeze_step=config.warmup_steps,
                state=handle.state,
            )
    return torch.optim.AdamW(
        parameters, lr=learning_rate, betas=(_MOMENTUM, _VARIANCE_DECAY), fused=fused
    )
