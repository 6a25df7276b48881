"""Numbers while training: what a step adds to the counters, handed to callbacks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

StepCallback = Callable[[dict[str, Any]], None]


class Counting(Protocol):
    """What counts: a `HookState`."""

    def stats(self) -> dict[str, Any]:
        """See `HookState.stats`."""


# Of stats(), sums over steps: the number of one step is what they grow by in it.
SUMS = (
    "buckets",
    "chunks",
    "gradient_bytes",
    "wire_bytes",
    "fallbacks",
    "encode_ms",
    "network_ms",
    "reduce_ms",
    "decode_ms",
    "exposed_ms",
)
# As they are now, or of the last step.
_RATIOS = ("worker_residual_ratio", "owner_residual_ratio")
_COUNTERS = (
    "steps",
    "buckets",
    "chunks",
    "gradient_bytes",
    "wire_bytes",
    "residual_bytes",
    "workspace_bytes",
    "workspace_allocations",
    "in_flight",
    "host_waits",
)


def zeros() -> dict[str, Any]:
    """What an engine that never did anything would count."""
    times = dict.fromkeys((key for key in (*SUMS, *_RATIOS) if key not in _COUNTERS), 0.0)
    return {**dict.fromkeys(_COUNTERS, 0), **times, "step_buckets": []}


def ratio(counts: Mapping[str, Any], world_size: int) -> float:
    """Bytes of an uncompressed ring all-reduce over those sent; 0.0 when none were."""
    ring = 2 * (world_size - 1) / world_size * float(counts["gradient_bytes"])
    return ring / counts["wire_bytes"] if counts["wire_bytes"] else 0.0


def call_after_steps(state: Counting, callback: StepCallback, world_size: int) -> RemovableHandle:
    """See `HookState.on_step`."""
    weak_state = weakref.ref(state)  # what is registered with torch lives as long as the process
    before = state.stats()
    passed_steps = 0  # of a hook without an engine, which counts no steps

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal before, passed_steps
        state = weak_state()
        if state is None:
            return
        now = state.stats()
        step = {key: now[key] - before[key] for key in SUMS}
        # Another model's optimizer, or gradients that are still on their way.
        if step["buckets"] + step["fallbacks"] == 0 or now["in_flight"]:
            return
        before = now
        number = now["steps"] if now["buckets"] else passed_steps
        passed_steps += 1
        ratios = {key: now[key] for key in _RATIOS}
        callback({"step": number, **step, "ratio": ratio(step, world_size), **ratios})

    handle = register_optimizer_step_post_hook(after_step)
    # Not by after_step itself: torch is then going through the hooks.
    weakref.finalize(state, handle.remove).atexit = False
    return handle
