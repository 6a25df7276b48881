"""`gradferry.optim.momentum_mode` for trainers, whose users cannot call it themselves."""

from __future__ import annotations

import torch

from gradferry.ddp.state import HookState
from gradferry.optim import momentum_mode
from gradferry.reduction.advice import own_momenta


def take_momentum(optimizer: torch.optim.Optimizer, state: HookState) -> None:
    """Applies `momentum_mode` to an optimizer that has a momentum of its own. Any other optimizer
    is left as it is: it was set up for the hook. Behind a hook without momentum it ends the
    momentum mode of an earlier hook.

    Raises:
        ConfigError, StateError: as `momentum_mode`.
    """
    if getattr(type(optimizer), "takes_momentum", False):
        return
    if not state.config.momentum:
        needed = getattr(optimizer, "takes_momentum", False)
    else:
        needed = any(own_momenta(group) for group in optimizer.param_groups)
    if needed:
        momentum_mode(optimizer, state)
