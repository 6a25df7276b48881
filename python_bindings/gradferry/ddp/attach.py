"""`attach` for the native hook, and `hook` with the standard signature on the same engine."""

# DDP compares the hook's annotations with the classes themselves: no postponed evaluation here.

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradferry.core.nodes import AUTO
from gradferry.core.options import WORKSPACE_CAP_MB, Options
from gradferry.ddp.state import HookState, bound_to


def attach(
    ddp: DistributedDataParallel,
    codec: str = "q4",
    *,
    rules: Sequence[Mapping[str, Any]] | None = None,
    error_feedback: str = "auto",
    momentum: float | None = None,
    warmup_steps: int = 0,
    warmup: str = "exact",
    grad_scaler: object | None = None,
    nonfinite: str = "propagate",
    exact_skip: bool = False,
    check_every: int = 0,
    seed: int = 0,
    workspace_cap_mb: float = WORKSPACE_CAP_MB,
    nodes: object = AUTO,
) -> HookState:
    """Compresses the gradients of a DistributedDataParallel from now on. Collective.

    Registers a native hook, which runs without Python and the GIL. Call it once on every rank,
    after the model was wrapped and before the first backward pass that should be compressed.

    Args:
        ddp: the model; it must not have a communication hook.
        codec: see `HookState`.
        rules: see `HookState`.
        error_feedback: see `HookState`.
        momentum: see `HookState`.
        warmup_steps: see `HookState`.
        warmup: see `HookState`.
        grad_scaler: see `HookState`.
        nonfinite: see `HookState`.
        exact_skip: see `HookState`.
        check_every: see `HookState`.
        seed: see `HookState`.
        workspace_cap_mb: see `HookState`.
        nodes: see `HookState`.

    Returns:
        The hook's state. The hook lives as long as the model, whether the state is kept or not.

    Raises:
        ConfigError: an argument or the model cannot be used; nothing was changed.
        RankMismatchError: ranks differ in configuration or model; nothing was changed.
        PeerError: a rank did not call this, or failed to set up its connections or memory; nothing
            was changed.
        StateError: the process group was destroyed.
    """
    return HookState._attached(ddp, Options.among(locals()))


def hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for ``ddp.register_comm_hook(state, gradferry.hook)``.

    Args:
        state: bound to the same model.
        bucket: from DDP.

    Returns:
        A future of the bucket's buffer, holding the average over all ranks.

    Raises:
        ConfigError: the state is no HookState.
        StateError: the state is not bound, or bound to another DistributedDataParallel than the
            one that calls; or it failed before.
    """
    bound = bound_to(state)
    bound.expect_registered()
    try:
        if bound.hook.admit(bucket):
            return bound.hook.run(bucket).get_future()
    except MemoryError:  # on the way to the engine, which would leave the others waiting
        bound.hook.fail_without_memory()
    bound.hook.note_passed()
    return allreduce_hook(bound.running.group, bucket)
