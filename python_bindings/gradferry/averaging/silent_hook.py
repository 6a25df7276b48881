"""Warns where optimizers step on gradients that the hook has not averaged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.optim.optimizer import Optimizer

from gradferry.averaging.step_numbers import call_after_steps
from gradferry.core.warn import warn_and_log

SILENT_STEPS = 3  # so many in a row are no accident
AVERAGED = "averaged, and ranks drift apart: "


def watch_hook(
    owner: object,
    *,
    passes: Callable[[], int],
    trains: Callable[[Optimizer], bool],
    explain: Callable[[], str],
    is_local: Callable[[], bool] = lambda: False,
    inspect: Callable[[Optimizer, bool], str | None] = lambda *_: None,
    check: Callable[[], None] = lambda: None,
    check_every: int = 0,
) -> None:
    """Warns once of an optimizer that trains a model for `SILENT_STEPS` steps in a row without a
    synced backward pass before any. Rank 0 also logs it.

    Args:
        owner: the watch ends when it is freed. The functions below must not refer to it.
        passes: returns in how many synced backward passes the hook was called so far.
        trains: says whether the last step of an optimizer used gradients that the hook should have
            averaged. It may take long: it is asked after 3, 6, 12, 24 ... silent steps, and when a
            check is due.
        explain: returns what does not happen to the gradients, why, and what to do.
        is_local: whether backward passes since the last synced one were meant not to be synced.
        inspect: called after every step, with whether it may take long. Returns a warning of what
            is wrong for certain.
        check: called in every `check_every`-th silent step. Its exceptions are raised by the
            optimizer's ``step()``.
        check_every: 0: never.
    """
    last = passes()  # at the last step of any optimizer
    at_step: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
    silent: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
    warned = False

    def look(optimizer: Optimizer) -> None:
        nonlocal last, warned
        before = at_step.get(optimizer, last)
        at_step[optimizer] = last = passes()
        is_silent = last == before and not is_local()
        count = silent[optimizer] = silent.get(optimizer, 0) + 1 if is_silent else 0
        # Those of another model's optimizer must cost next to nothing.
        asks = count % SILENT_STEPS == 0 and (count // SILENT_STEPS).bit_count() == 1
        text = inspect(optimizer, asks or count == 1)
        checks = count > 0 and check_every > 0 and count % check_every == 0
        asks = asks and text is None and not warned
        if (checks or asks) and trains(optimizer):
            if checks:
                check()
            if asks:
                text = (
                    f"{type(optimizer).__name__} has taken its last {count} steps on gradients of "
                    f"backward passes without gradferry's hook. They are not {explain()}"
                )
        if text is not None and not warned:
            warned = True
            if check_every == 0:
                handle.remove()
            warn_and_log(text)

    handle = call_after_steps(look, owner=owner)


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
