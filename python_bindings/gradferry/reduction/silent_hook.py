"""Warns where optimizers step and nobody calls the hook, or nobody updates the GradScaler."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from gradferry.core.engine import loss_scale
from gradferry.core.warn import warn, warn_and_log
from gradferry.reduction.running import Running
from gradferry.reduction.step_numbers import PassCounter, call_after_steps

SILENT_STEPS = 3


def watch_hook(
    owner: object,
    *,
    passes: Callable[[], int],
    trains: Callable[[Optimizer], bool],
    explain: Callable[[Optimizer], str],
    check: Callable[[], None] = lambda: None,
    check_every: int = 0,
) -> RemovableHandle:
    """Warns once, after an optimizer has trained a model for `SILENT_STEPS` steps in a row without
    a synced backward pass in between. Rank 0 also logs it.

    Args:
        owner: the watch ends when it is freed. The functions below must not refer to it.
        passes: returns in how many synced backward passes the hook was called so far.
        trains: says whether the last step of an optimizer used gradients that the hook should have
            averaged. It may take long: it is asked after 3, 6, 12, 24 ... silent steps, and when a
            check is due.
        explain: returns the warning: why the hook is not called, and what to do.
        check: called in every `check_every`-th of such steps. Its exceptions are raised by the
            optimizer's ``step()``.
        check_every: 0: never.

    Returns:
        A handle whose ``remove()`` ends the watch.
    """
    counter = PassCounter(passes)
    silent: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
    warned = False

    def look(optimizer: Optimizer) -> None:
        nonlocal warned
        count = 0 if counter.take(optimizer) else silent.get(optimizer, 0) + 1
        silent[optimizer] = count
        checks = check_every > 0 and count > 0 and count % check_every == 0
        warns = not warned and _is_time_to_ask(count)
        if not (checks or warns) or not trains(optimizer):
            return
        if checks:
            check()
        if warns:
            warned = True
            if check_every == 0:
                handle.remove()
            warn_and_log(explain(optimizer))

    handle = call_after_steps(look, owner=owner)
    return handle


def silence_of(optimizer: Optimizer) -> str:
    """How the warning of a model begins; it goes on with what does not happen, and why."""
    return (
        f"{type(optimizer).__name__} has stepped {SILENT_STEPS} times in a row without a synced "
        "backward pass in which gradferry's hook was called. Its gradients are not "
    )


def _is_time_to_ask(count: int) -> bool:
    """At 3, 6, 12, 24 ... steps: those of another model's optimizer must cost next to nothing."""
    return count % SILENT_STEPS == 0 and (count // SILENT_STEPS).bit_count() == 1


def has_gradients_of(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the optimizer holds one of these parameters with a gradient that is not zero."""
    known = {id(parameter) for parameter in parameters}
    return any(
        id(p) in known and p.grad is not None and _is_not_zero(p.grad)
        for group in optimizer.param_groups
        for p in group["params"]
    )


def _is_not_zero(gradient: torch.Tensor) -> bool:
    """``zero_grad(set_to_none=False)`` leaves zeros to models that do not take part."""
    local: torch.Tensor = getattr(gradient, "_local_tensor", gradient)  # that of a DTensor
    return bool(local.norm() != 0)  # also of sparse gradients, and true of NaN


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
