"""`attach` for the native hook, and `hook` with the standard signature on the same engine."""

# DDP compares the hook's annotations with the classes themselves: no postponed evaluation here.

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from gradferry.core.options import Options, takes_options
from gradferry.ddp.state import HookState, bound_to


@takes_options()
def attach(
    ddp: DistributedDataParallel,
    codec: str = "q4",
    **options: Unpack[Options],
) -> HookState:
    """Compresses the gradients of a DistributedDataParallel from now on. Collective.

    Registers a native hook, which runs without Python and the GIL. Call it once on every rank,
    after the model was wrapped and before the first backward pass that should be compressed.

    Args:
        ddp: the model, also as torch.compile or Lightning Fabric wrapped it again; it must not have
            a communication hook.
        codec: a codec string such as ``"q4"``, ``"off"`` for the backend's own all-reduce, or
            ``"auto"``. That begins with ``q4``. From the third step on, or behind a warm-up,
            ``q4``, ``q8`` and ``off`` (or ``exact``, where an option needs an engine; in momentum
            mode ``rht:bits=3`` and codecs below 3 bits) train for seven steps each, and the most
            precise one within 2 % of the fastest stays. It tries again after 1000 steps, then less
            often after every change. ``stats()["choice"]`` explains the choice.
        **options: see `gradferry.Options`.

    Returns:
        The hook's state. The hook lives as long as the model, whether the state is kept or not.

    Raises:
        ConfigError: an argument or the model cannot be used; nothing was changed.
        RankMismatchError: ranks differ in configuration or model; nothing was changed.
        PeerError: a rank did not call this, or failed to set up its connections or memory; nothing
            was changed.
        StateError: the process group was destroyed.
    """
    return HookState._attached(ddp, codec, options)


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
    try:
        if bound.hook.admit(bucket):
            return bound.hook.run(bucket).get_future()
    except MemoryError:  # on the way to the engine, which would leave the others waiting
        bound.hook.fail_without_memory()
    bound.hook.note_passed()
    return allreduce_hook(bound.running.group, bucket)
