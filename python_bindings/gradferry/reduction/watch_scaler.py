"""A warning where optimizers step and the GradScaler that the hook knows is never updated."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer

from gradferry.core.engine import loss_scale
from gradferry.core.warn import warn
from gradferry.reduction.after_steps import call_after_steps
from gradferry.reduction.running import Running

# A GradScaler itself refuses a second step of one optimizer before its update().
_STEPS = 3


def watch_scaler(running: Running) -> None:
    """Warns once if an optimizer of the tensors in `running` steps three times while nothing is
    written to the loss scale. Every ``update()`` writes to it, even if its value stays the same.
    """
    scale = loss_scale(running.config, running.transport.device)
    if scale is None or running.config.passes_through:
        return
    # By optimizer: writes to the scale, and steps since then.
    seen: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()

    def after_step(optimizer: Optimizer) -> None:
        writes, steps = seen.get(optimizer, (-1, 0))
        steps = steps + 1 if writes == scale._version else 1
        seen[optimizer] = scale._version, steps
        if steps < _STEPS:
            return
        handle.remove()
        warn(
            f"{type(optimizer).__name__} has stepped {_STEPS} times without an update() of the "
            "GradScaler that was passed as grad_scaler=, whose scale the residuals follow: pass "
            "the one that scales the loss and whose step() and update() the training calls, or "
            "leave grad_scaler= out"
        )

    handle = call_after_steps(after_step, index=running.index, owner=running)
