"""Callbacks after optimizer steps: gradferry's one entry in torch's registry of such hooks.

DDP's own callbacks run before gradients are complete, and a forward hook would miss the last step.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

_calls: OrderedDict[int, tuple[WeakIdKeyDictionary | None, Callable[[Optimizer], None]]] = (
    OrderedDict()
)


def call_after_steps(
    callback: Callable[[Optimizer], None],
    *,
    index: WeakIdKeyDictionary | None = None,
    owner: object | None = None,
) -> RemovableHandle:
    """Calls `callback` after every step of any `torch.optim` optimizer.

    Args:
        callback: gets the optimizer. Its exceptions are raised by the optimizer's ``step()``, after
            all callbacks: of several the first.
        index: limits the calls to optimizers that hold a parameter in it, and ends them when all
            these parameters were freed.
        owner: ends the calls when it is freed; `callback` must not refer to it.

    Returns:
        A handle whose ``remove()`` ends the calls; the callback may use it.
    """
    _register()
    _forget_freed()  # where no optimizer has stepped since
    handle = RemovableHandle(_calls)
    _calls[handle.id] = (index, callback)
    if owner is not None:
        weakref.finalize(owner, handle.remove).atexit = False
    return handle


class PassCounter:
    """Counts synced backward passes between the steps of each optimizer.

    Args:
        passes: returns how many there were so far.
    """

    def __init__(self, passes: Callable[[], int]) -> None:
        self._passes = passes
        self._last = passes()  # at the last step of any optimizer
        self._at_step: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def take(self, optimizer: Optimizer) -> int:
        """Passes since the last step of `optimizer`; of a new one, since that of any other."""
        before = self._at_step.get(optimizer, self._last)
        self._at_step[optimizer] = self._last = self._passes()
        return self._last - before


@cache
def _register() -> None:
    # Never removed: torch iterates over its registry, which must not change during a call.
    register_optimizer_step_post_hook(_after_step)


def _forget_freed() -> None:
    for number, (index, _) in list(_calls.items()):
        if index is not None and not index:
            _calls.pop(number, None)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _forget_freed()
    first: Exception | None = None
    for index, callback in list(_calls.values()):
        try:
            if index is None or _holds_any(optimizer, index):
                callback(optimizer)
        except Exception as error:  # the others must know of the step, too
            first = first or error
    if first is not None:
        try:
            raise first
        finally:
            del first  # its traceback refers to this frame


def _holds_any(optimizer: Optimizer, index: WeakIdKeyDictionary) -> bool:
    return any(p in index for group in optimizer.param_groups for p in group["params"])
