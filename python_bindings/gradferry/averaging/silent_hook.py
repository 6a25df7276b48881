"""Warns where optimizers step on gradients that the hook has not averaged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from gradferry.averaging.step_numbers import call_after_steps
from gradferry.core.warn import warn_and_log

SILENT_STEPS = 3  # so many in a row are no accident


def watch_hook(
    owner: object,
    *,
    passes: Callable[[], int],
    trains: Callable[[Optimizer], bool],
    explain: Callable[[], str],
    is_local: Callable[[], bool] = lambda: False,
) -> RemovableHandle:
    """Warns once of an optimizer that trains a model for `SILENT_STEPS` steps in a row without a
    synced backward pass before any. Rank 0 also logs it.

    Args:
        owner: the watch ends when it is freed. The functions below must not refer to it.
        passes: returns in how many synced backward passes the hook was called so far.
        trains: says whether the last step of an optimizer used gradients that the hook should have
            averaged. It is asked in every third silent step only, and may take longer.
        explain: returns what does not happen to the gradients, why, and what to do.
        is_local: whether the last forward pass was meant not to be synced.

    Returns:
        A handle whose ``remove()`` ends the watch.
    """
    # By optimizer: the passes before its last step, and its silent steps in a row.
    seen: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()

    def look(optimizer: Optimizer) -> None:
        now = passes()
        before, silent = seen.get(optimizer, (-1, 0))
        silent = silent + 1 if now == before and not is_local() else 0
        seen[optimizer] = now, silent
        if silent and silent % SILENT_STEPS == 0 and trains(optimizer):
            handle.remove()
            warn_and_log(
                f"{type(optimizer).__name__} has taken its last {silent} steps on gradients of "
                f"backward passes without gradferry's hook. They are not {explain()}"
            )

    handle = call_after_steps(look, owner=owner)
    return handle


def has_gradients_of(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the optimizer holds one of these parameters with a gradient."""
    known = {id(parameter) for parameter in parameters}
    return any(
        id(p) in known and p.grad is not None
        for group in optimizer.param_groups
        for p in group["params"]
    )
