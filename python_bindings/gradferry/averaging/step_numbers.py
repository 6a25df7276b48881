"""Callbacks after optimizer steps, and the numbers of single steps, which they end.

DDP's own callbacks run before gradients are complete, and a forward hook would miss the last step.
docs/guide/numbers.md explains the numbers.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Container
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import NotRequired, TypedDict, get_type_hints

# Keys of stats() that are sums over steps; their increase is the number of one step.
SUMS = (
    "buckets",
    "chunks",
    "gradient_bytes",
    "wire_bytes",
    "local_bytes",
    "fallbacks",
    "encode_ms",
    "network_ms",
    "reduce_ms",
    "decode_ms",
    "exposed_ms",
)
# Keys that continue when another engine takes over.
CONTINUED = (*SUMS, "workspace_allocations", "host_waits")
# Keys of stats() that refer to the last step.
RATIOS = ("worker_residual_ratio", "owner_residual_ratio")


def zeros() -> dict[str, Any]:
    """The counters of an engine that has done nothing."""
    of_states = ("total_steps", "ratio", "fallbacks", "choice", "packing_bytes", "exchanges")
    return {key: kind() for key, kind in get_type_hints(Stats).items() if key not in of_states}


def ratio(ring_bytes: float, wire_bytes: int) -> float:
    """Bytes of an uncompressed ring, divided by those sent; 0.0 if none were sent."""
    return ring_bytes / wire_bytes if wire_bytes else 0.0


class Choice(TypedDict):
    """The entry ``choice`` of `Stats`; the last three keys with ``codec="auto"`` only."""

    codec: str
    exchange: str
    reason: str
    step: NotRequired[int]
    next_check: NotRequired[int]
    measured_ms: NotRequired[dict[str, float]]


class Stats(TypedDict):
    """What ``stats()`` of a `HookState`, a `Reducer` or a `fsdp.ShardedState` returns.
    docs/guide/numbers.md explains the keys.
    """

    steps: int
    total_steps: int
    buckets: int
    chunks: int
    gradient_bytes: int
    wire_bytes: int
    local_bytes: int
    ratio: float
    residual_bytes: int
    workspace_bytes: int
    workspace_allocations: int
    in_flight: int
    host_waits: int
    fallbacks: int
    encode_ms: float
    network_ms: float
    reduce_ms: float
    decode_ms: float
    exposed_ms: float
    worker_residual_ratio: float
    owner_residual_ratio: float
    choice: Choice
    step_buckets: list[list[int]]
    packing_bytes: NotRequired[int]  # of a Reducer
    exchanges: NotRequired[dict[str, dict[str, Any]]]  # of a fsdp.ShardedState


# Index, owner, callback.
_calls: OrderedDict[
    int,
    tuple[Container[torch.Tensor] | None, Callable[[], object | None], Callable[[Optimizer], None]],
] = OrderedDict()


def call_after_steps(
    callback: Callable[[Optimizer], None],
    *,
    index: Container[torch.Tensor] | None = None,
    owner: object | None = None,
) -> RemovableHandle:
    """Calls `callback` after every step of any `torch.optim` optimizer.

    Args:
        callback: gets the optimizer. Its exceptions are raised by the optimizer's ``step()``, after
            all callbacks: of several the first.
        index: limits the calls to optimizers that hold a parameter in it. What has weak references
            to parameters keeps torch from moving and converting sharded models.
        owner: ends the calls when it is freed, and is held during each; `callback` must not refer
            to it.

    Returns:
        A handle whose ``remove()`` ends the calls; the callback may use it.
    """
    _register()
    handle = RemovableHandle(_calls)
    find_owner = (lambda: callback) if owner is None else weakref.ref(owner)
    _calls[handle.id] = (index, find_owner, callback)
    if owner is not None:
        weakref.finalize(owner, handle.remove).atexit = False
    return handle


def was_skipped(optimizer: Optimizer) -> bool | None:
    """Whether a step has changed nothing, as far as the host knows without waiting; None: it may.

    A GradScaler does not call an optimizer whose step it skips. A fused one it calls always, with
    ``found_inf``, by which that skips itself; on a device, unknown to the host.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return False
    return bool(found_inf.item()) if found_inf.device.type == "cpu" else None


@cache
def _register() -> None:
    # Never removed: torch iterates over its registry, which must not change during a call.
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    first: Exception | None = None
    for index, find_owner, callback in list(_calls.values()):
        owner = find_owner()  # which an earlier callback, or a collection in it, may have freed
        try:
            if owner is not None and (index is None or _holds_any(optimizer, index)):
                callback(optimizer)
        except Exception as error:  # the others must know of the step, too
            first = first or error
        finally:
            del owner  # an error's traceback refers to this frame
    if first is not None:
        try:
            raise first
        finally:
            del first  # likewise


def _holds_any(optimizer: Optimizer, index: Container[torch.Tensor]) -> bool:
    return any(p in index for group in optimizer.param_groups for p in group["params"])
