"""Warns where optimizers step on gradients that the hook has not averaged."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from gradferry.averaging.step_numbers import PassCounter, call_after_steps
from gradferry.core.warn import warn_and_log

SILENT_STEPS = 3  # so many ...
WINDOW = 30  # ... among so many steps of an optimizer are no accident


@dataclass
class _Steps:
    """Those of one optimizer.

    Attributes:
        taken: how many.
        silent: how many of these without a call of the hook.
        last: the numbers of the last ones of those.
        was_local: the last step came after a pass that was not meant to be synced, and no other.
    """

    taken: int = 0
    silent: int = 0
    last: deque[int] = field(default_factory=lambda: deque(maxlen=SILENT_STEPS))
    was_local: bool = False

    def add(self, *, called: bool, local: bool) -> bool:
        """Whether a step is silent: the hook was not `called` before it, or a pass followed that
        was not meant to be synced, `local`.
        """
        self.taken += 1
        was_local, self.was_local = self.was_local, local and not called
        if self.was_local or (called and not local and not was_local):
            return False
        self.silent += 1
        self.last.append(self.taken)
        return True

    @property
    def among(self) -> int:
        """Steps since the first of the last silent ones."""
        return self.taken - self.last[0] + 1


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
) -> RemovableHandle:
    """Warns once of an optimizer that trains a model for `SILENT_STEPS` of `WINDOW` steps, in a row
    or not, without a synced backward pass just before each. Rank 0 also logs it.

    Steps after passes under ``no_sync()`` alone are meant, as in local SGD, unless synced steps lie
    between them. A pass under ``no_sync()`` after a synced one, for the same step, is not meant.

    Args:
        owner: the watch ends when it is freed. The functions below must not refer to it.
        passes: returns in how many synced backward passes the hook was called so far.
        trains: says whether the last step of an optimizer used gradients that the hook should have
            averaged. It may take long: it is asked after 3, 6, 12, 24 ... silent steps, and when a
            check is due.
        explain: returns what does not happen to the gradients, why, and what to do.
        is_local: whether the last backward pass was meant not to be synced.
        inspect: called after every step, with whether it may take long. Returns a warning of what
            is wrong for certain.
        check: called in every `check_every`-th silent step. Its exceptions are raised by the
            optimizer's ``step()``.
        check_every: 0: never.

    Returns:
        A handle whose ``remove()`` ends the watch.
    """
    counter = PassCounter(passes)
    by_optimizer: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()
    warned = False

    def look(optimizer: Optimizer) -> None:
        nonlocal warned
        steps = by_optimizer.setdefault(optimizer, _Steps())
        called, local = counter.take(optimizer) > 0, is_local()
        silent = steps.add(called=called, local=local)
        asks = silent and _is_time_to_ask(steps.silent)
        text = inspect(optimizer, silent and (asks or steps.silent == 1))
        checks = silent and not called and check_every > 0 and steps.silent % check_every == 0
        asks = asks and text is None and not warned and steps.among <= WINDOW
        if (checks or asks) and trains(optimizer):
            if checks:
                check()
            if asks:
                text = (
                    f"{type(optimizer).__name__} has taken {SILENT_STEPS} of its last "
                    f"{steps.among} steps on gradients of backward passes without gradferry's "
                    f"hook. They are not {_UNSYNCED if called else explain()}"
                )
        if text is not None and not warned:
            warned = True
            if check_every == 0:
                handle.remove()
            warn_and_log(text)

    handle = call_after_steps(look, owner=owner)
    return handle


AVERAGED = "averaged, and ranks drift apart: "
_UNSYNCED = (
    f"{AVERAGED}the last backward pass of these steps was under no_sync(), and others were synced. "
    "Accumulate under no_sync(), and run the last backward pass of every step outside"
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
