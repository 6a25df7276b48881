"""Restricts `join()` for a model whose gradients gradferry averages."""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed.algorithms.join import JoinHook as TorchJoinHook
from torch.nn.parallel import DistributedDataParallel

from gradferry.errors import ConfigError


class JoinHook:
    """Replaces the method `join_hook` of one DistributedDataParallel.

    DDP does not tell a communication hook how many ranks still have input, so the hook cannot
    average over those ranks alone. Every rank enters `join()` with the same arguments, so all ranks
    raise the error.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Weak: with a reference cycle, only the garbage collector would free the model.
        self._ddp = weakref.ref(ddp)

    def __call__(self, **arguments: Any) -> TorchJoinHook:
        """Raises ConfigError for ``divide_by_initial_world_size=False``."""
        if not arguments.get("divide_by_initial_world_size", True):
            raise ConfigError(
                "join(divide_by_initial_world_size=False) does not go with gradferry: DDP does not "
                "tell communication hooks how many ranks still have input; leave it out, and scale "
                "the loss if the last steps matter"
            )
        ddp = self._ddp()
        assert ddp is not None
        hook: TorchJoinHook = type(ddp).join_hook(ddp, **arguments)  # type: ignore[no-untyped-call]
        return hook
