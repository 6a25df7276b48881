"""Callbacks after the steps of the optimizers that hold a model's parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

_calls: OrderedDict[int, tuple[WeakIdKeyDictionary, Callable[[Optimizer], None]]] = OrderedDict()


def call_after_steps(
    index: WeakIdKeyDictionary, callback: Callable[[Optimizer], None]
) -> RemovableHandle:
    """Calls `callback` after every step of any `torch.optim` optimizer that holds a parameter in
    `index`, until all these parameters were freed.

    Returns:
        A handle whose ``remove()`` ends the calls; the callback may use it.
    """
    _register()
    _forget_freed()  # where no optimizer has stepped since
    handle = RemovableHandle(_calls)
    _calls[handle.id] = (index, callback)
    return handle


@cache
def _register() -> None:
    # Never removed: torch iterates over its registry, which must not change during a call.
    register_optimizer_step_post_hook(_after_step)


def _forget_freed() -> None:
    for number, (index, _) in list(_calls.items()):
        if not index:
            _calls.pop(number, None)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _forget_freed()
    for index, callback in list(_calls.values()):
        if any(p in index for group in optimizer.param_groups for p in group["params"]):
            callback(optimizer)
