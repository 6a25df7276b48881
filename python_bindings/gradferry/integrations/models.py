"""What trainers have: wrapped models with a hook, their optimizers, and numbers for logs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradferry.averaging.advice import own_momenta
from gradferry.core.warn import warn
from gradferry.ddp.attach import attach
from gradferry.ddp.model import unwrapped
from gradferry.ddp.state import HookState
from gradferry.errors import ConfigError, StateError
from gradferry.optim import momentum_mode


class Attachment:
    """A hook that a trainer's model has, for as long as the model lives.

    Attributes:
        model: weak, because a trainer may replace its model.
        state: of the hook.
    """

    def __init__(
        self, ddp: DistributedDataParallel, codec: str, options: dict[str, Any], scaler: object
    ) -> None:
        """Attaches. Collective; raises as `gradferry.attach` does. scaler: of the trainer."""
        self.model = weakref.ref(ddp)
        self.group = ddp.process_group
        self.state: HookState = attach(ddp, codec, **{"grad_scaler": scaler, **options})

    def expect_gone(self, remedy: str) -> None:
        """Raises StateError if the model still lives: its hook would run beside that of another."""
        if self.model() is not None:
            gc.collect()  # models are often parts of reference cycles
        if self.model() is not None:
            raise StateError(
                "a DistributedDataParallel that gradferry is attached to still exists, and its "
                f"hook would run beside that of the new one: {remedy}"
            )


def find_ddp(
    model: object, host: str, world_size: int, momentum: object
) -> DistributedDataParallel | None:
    """The DistributedDataParallel around or inside what a trainer calls its model.

    Args:
        model: as the trainer wrapped it; `torch.compile` may have wrapped that again.
        host: the trainer's name, for errors.
        world_size: processes that train.
        momentum: as asked for.

    Returns:
        None if one process trains alone, which has nothing to exchange; with a warning.

    Raises:
        ConfigError: several processes train without a DistributedDataParallel; or one process
            should deliver momentum, which only a hook can.
    """
    model = unwrapped(model)
    if isinstance(model, DistributedDataParallel):
        return model
    if world_size > 1:
        raise ConfigError(
            f"{host} trains with {type(model).__name__}, and gradferry compresses what a "
            f"DistributedDataParallel averages: have {host} train with DDP on several processes, "
            "or see docs/guide/fsdp.md for sharded models"
        )
    if momentum:
        raise ConfigError(
            f"momentum={momentum!r} is for a hook, and {host} makes none for a single process: "
            "start more, or leave out momentum"
        )
    hint = "; `accelerate launch` needs --multi_gpu, also on CPUs" if host == "accelerate" else ""
    warn(f"{host} trains with a single process: gradferry has nothing to compress{hint}")
    return None


# The numbers of `HookState.on_step` that tell whether compression works and pays.
# docs/guide/numbers.md has all.
_NAMES = ("ratio", "wire_bytes", "exposed_ms", "worker_residual_ratio", "owner_residual_ratio")


class Metrics:
    """Means over the steps of this rank since they were last taken."""

    def __init__(self, state: HookState) -> None:
        self._sums = dict.fromkeys(_NAMES, 0.0)
        self._steps = 0
        state.on_step(self._add)

    def _add(self, row: dict[str, Any]) -> None:
        for name in _NAMES:
            self._sums[name] += row[name]
        self._steps += 1

    def take(self) -> dict[str, float]:
        """The means, as ``gradferry/<name>``; empty if there was no step."""
        sums, steps = self._sums, self._steps
        self._sums, self._steps = dict.fromkeys(_NAMES, 0.0), 0
        return {f"gradferry/{name}": total / steps for name, total in sums.items() if steps}


def take_momentum(optimizer: torch.optim.Optimizer, state: HookState) -> None:
    """Applies `momentum_mode` to an optimizer that has a momentum of its own. Any other optimizer
    is left as it is: it was set up for the hook. Behind a hook without momentum it ends the
    momentum mode of an earlier hook.

    Raises:
        ConfigError, StateError: as `momentum_mode`.
    """
    if getattr(type(optimizer), "takes_momentum", False):
        return
    if not state.config.momentum:
        needed = getattr(optimizer, "takes_momentum", False)
    else:
        needed = any(own_momenta(group) for group in optimizer.param_groups)
    if needed:
        momentum_mode(optimizer, state)
