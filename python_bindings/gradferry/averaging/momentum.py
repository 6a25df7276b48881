"""The momentum that tensors arrive with, and the handover of an optimizer's own.

The exchange averages over ranks, so a momentum arrives completely only if every rank hands it over
to its residual. Ranks compare at a bucket, because every rank takes part in every bucket, whatever
its optimizers hold and do. A difference is an error even where it could be compensated: one rank's
residual would then hold the momentum of all, with that much more compression error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from gradferry import _native
from gradferry.averaging.running import Running
from gradferry.core.agreement import Record, gather_records
from gradferry.core.config import Config
from gradferry.core.names import first_of
from gradferry.errors import StateError

# By optimizer in momentum mode: what ends that, and the hook that it was set up for.
_in_momentum_mode: weakref.WeakKeyDictionary[
    Optimizer, tuple[RemovableHandle, weakref.ref[Running]]
] = weakref.WeakKeyDictionary()


class DeliveredMomentum:
    """What an optimizer must know of the momentum in residuals, and where it hands over its own."""

    def __init__(self, running: Running, handover: MomentumHandover | None = None) -> None:
        self._running = running
        self._handover = handover

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

    def hold(self, parameters: Iterable[torch.Tensor]) -> None:
        """Notes that an optimizer holds the momentum of these parameters until the handover."""
        if self._handover is not None:
            index = self._running.index
            self._handover.hold(index[parameter] for parameter in parameters)

    def hand_over(self, parameter: torch.Tensor, momentum: torch.Tensor, factor: float) -> None:
        """Gives a parameter's momentum to the hook, which delivers it over the next steps.

        Args:
            parameter: of the model.
            momentum: tensor of its shape, on its device, without a loss scale.
            factor: multiplies the momentum: its decay until the next step.

        Raises:
            StateError: the hook is in the middle of a step, or failed before.
        """
        running = self._running
        if running.engine is None:
            return
        number = running.index[parameter]
        layout = running.parameters[number]
        laid_out = torch.empty_strided(
            layout.shape, layout.strides, dtype=parameter.dtype, device=parameter.device
        ).copy_(momentum)
        real = torch.view_as_real(laid_out) if laid_out.is_complex() else laid_out
        flat = real.as_strided((real.numel(),), (1,))
        exchanges = running.transport.exchanges
        share = running.config.momentum_share(layout.codec) if exchanges else 1.0
        running.engine.add_to_worker_residual(number, flat, factor * share)
        if self._handover is not None:
            self._handover.hand_over(number)


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


class MomentumHandover:
    """The handover of momentum to one hook, on this rank.

    Args:
        running: has momentum mode, warm-up steps and other ranks.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self._held: set[int] = set()
        self._handed_over: set[int] = set()

    def start(self, hook: _native.BucketHook) -> None:
        """Makes the ranks compare at the next step, and at the first one with momentum."""
        self._handed_over.clear()
        hook.call_at(0, self._check, "momentum handover")

    def hold(self, parameters: Iterable[int]) -> None:
        """Notes that an optimizer holds the momentum of these parameters until the handover."""
        self._held.update(parameters)

    def hand_over(self, parameter: int) -> None:
        """Notes that the parameter's momentum is now in this rank's residual."""
        self._handed_over.add(parameter)

    def _check(self, hook: _native.BucketHook, step: int) -> None:
        """Compares the ranks, at the first bucket of a step. Collective.

        Raises:
            StateError: the ranks differ; the same text on every rank.
        """
        first_with_momentum = self._running.config.warmup_steps
        if step > first_with_momentum:
            return  # the training was resumed after that step
        record: Record = {
            "held": sorted(self._held),
            "handed_over": sorted(self._handed_over),
        }
        running = self._running
        records = gather_records(record, running.group, running.transport.device)
        self._expect_equal(
            [record["held"] for record in records],
            "has no OneBitAdam that holds",
            "every rank's must hold the same parameters, because each hands over its share of "
            "every momentum; build it over all parameters, without ZeroRedundancyOptimizer (from "
            "the freeze on the momentum takes no memory of its own)",
        )
        self._expect_equal(
            [record["handed_over"] for record in records],
            f"did not hand over, after step {first_with_momentum - 1}, the momentum of",
            "step OneBitAdam on every rank; under join() with uneven inputs, freeze at a step that "
            "every rank has inputs for",
        )
        if step < first_with_momentum:
            hook.call_at(first_with_momentum, self._check, "momentum handover")

    def _expect_equal(self, by_rank: list[list[int]], fault: str, advice: str) -> None:
        every = set().union(*by_rank)
        for rank, numbers in zip(self._running.world_ranks, by_rank, strict=True):
            missing = sorted(every.difference(numbers))
            if missing:
                names = [self._running.parameters[number].name for number in missing]
                raise StateError(
                    f"rank {rank} {fault} {first_of(names)}, unlike another rank: {advice}"
                )
