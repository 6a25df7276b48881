"""The momentum that tensors arrive with, for optimizers."""

from __future__ import annotations

import weakref

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from gradferry.core.config import Config
from gradferry.reduction.running import Running

# By optimizer in momentum mode: what ends that, and the hook that it was set up for.
_in_momentum_mode: weakref.WeakKeyDictionary[
    Optimizer, tuple[RemovableHandle, weakref.ref[Running]]
] = weakref.WeakKeyDictionary()


class DeliveredMomentum:
    """What an optimizer must know of the momentum in residuals."""

    def __init__(self, running: Running) -> None:
        self._running = running

    @property
    def config(self) -> Config:
        """The configuration that all ranks agreed on."""
        return self._running.config

    def current_step(self) -> int | None:
        """The current step, counted from 0; None if every gradient passes through."""
        engine = self._running.engine
        return None if engine is None else engine.current_step()

    def covers(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter is averaged: DDP's model reduces it, or it was registered."""
        return parameter in self._running.index

    def momenta(self) -> dict[torch.Tensor, float]:
        """By parameter, the momentum that its gradients arrive with.

        It is less than the configured one behind codecs that send some elements only. With
        ``codec="auto"``, whose choice changes, it is the configured one.
        """
        momentum = self.config.momentum
        sends_some = self._running.transport.exchanges and not self.config.chooses
        shares = self._running.momentum_shares(exchanges=sends_some)
        index = self._running.index
        return {parameter: 1 - shares[index[parameter]] * (1 - momentum) for parameter in index}

    def begin_momentum_mode(self, optimizer: Optimizer, handle: RemovableHandle) -> None:
        """Notes that the optimizer is set up for this momentum, until `handle` is removed."""
        _in_momentum_mode[optimizer] = handle, weakref.ref(self._running)


def end_momentum_mode(optimizer: Optimizer) -> bool:
    """Whether the optimizer was in momentum mode. It no longer is."""
    if optimizer not in _in_momentum_mode:
        return False
    handle, _ = _in_momentum_mode.pop(optimizer)
    handle.remove()
    return True


def is_set_up_for_another(optimizer: Optimizer, running: Running) -> bool:
    """Whether the optimizer is in momentum mode for another hook than this one."""
    mode = _in_momentum_mode.get(optimizer)
    return mode is not None and mode[1]() is not running
