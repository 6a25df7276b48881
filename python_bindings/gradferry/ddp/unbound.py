"""A warning about HookStates that no model uses."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gradferry.core.warn import warn

HOW_TO_BIND = (
    "pass the DistributedDataParallel to HookState(codec, ddp), or call state.bind(ddp) before the "
    "first backward pass; where a trainer wraps the model, such as Lightning's DDPStrategy, leave "
    "out ddp_comm_state and ddp_comm_hook and use gradferry.integrations instead "
    "(gradferry.integrations.lightning.GradferryCallback)"
)

_unbound: weakref.WeakSet[Any] = weakref.WeakSet()


def expect_binding(state: object) -> None:
    """Warns if the state is still unbound when ranks that train together step an optimizer.

    A trainer may take a state and hook and register them nowhere, without a word: Lightning does,
    on the CPU. What steps first may be another model's optimizer, so this is no error.
    """
    _register()
    _unbound.add(state)


def note_binding(state: object) -> None:
    """Ends what `expect_binding` began."""
    _unbound.discard(state)


@cache
def _register() -> None:
    # Never removed: torch iterates over its registry, which must not change during a call.
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _unbound or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    state = next(iter(_unbound))
    _unbound.clear()
    warn(f"{state!r} compresses nothing, no model uses it: {HOW_TO_BIND}")
