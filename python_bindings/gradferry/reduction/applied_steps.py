"""Tells engines that an optimizer has stepped: what it has applied cannot be skipped any more."""

from __future__ import annotations

import weakref

from torch.optim.optimizer import Optimizer

from gradferry.reduction.after_steps import call_after_steps
from gradferry.reduction.running import Running


def end_optimizer_steps(running: Running) -> None:
    """Has the engine know when an optimizer of the tensors in `running` has stepped. Only
    ``exact_skip`` needs it.
    """
    if not running.config.exact_skip:
        return
    weak = weakref.ref(running)  # the model may outlive its hook

    def end(optimizer: Optimizer) -> None:
        running = weak()
        if running is not None and running.engine is not None:
            running.engine.end_optimizer_step(applied=_has_applied(optimizer))

    call_after_steps(end, index=running.index, owner=running)


def _has_applied(optimizer: Optimizer) -> bool:
    """Whether a step has changed parameters, as far as the host knows without waiting.

    A GradScaler does not call an optimizer whose step it skips. A fused one it calls always, with
    ``found_inf``, by which that skips itself; on a device, unknown to the host.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is None or (found_inf.device.type == "cpu" and not found_inf.item())
