"""Access to the momentum in a hook, for an optimizer that hands over its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradferry.core.config import Config
from gradferry.ddp.binding import Binding


class KeptMomentum:
    """The interface of a hook to `gradferry.optim.OneBitAdam`. Use `momentum_of` to get one."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    @property
    def config(self) -> Config:
        """As agreed by all ranks."""
        return self._binding.running.config

    def current_step(self) -> int | None:
        """The current step of the hook, counted from 0; None if every gradient passes through."""
        engine = self._binding.running.engine
        return None if engine is None else engine.current_step()

    def covers(self, parameter: torch.Tensor) -> bool:
        """Whether the hook's model reduces the parameter."""
        return parameter in self._binding.running.index

    def momentum_of(self, parameter: torch.Tensor) -> float:
        """The momentum that gradients of this parameter of the model arrive with.

        It is less than the hook's behind codecs that send some elements only.
        """
        running = self._binding.running
        momentum = running.config.momentum
        if not running.transport.exchanges:
            return momentum
        share = running.config.momentum_share(running.parameters[running.index[parameter]].codec)
        return 1 - share * (1 - momentum)

    def hold(self, parameters: Iterable[torch.Tensor]) -> None:
        """Notes that an optimizer holds the momentum of these parameters until the handover."""
        if self._binding.handover is not None:
            index = self._binding.running.index
            self._binding.handover.hold(index[parameter] for parameter in parameters)

    def hand_over(self, parameter: torch.Tensor, momentum: torch.Tensor, factor: float) -> None:
        """Gives a parameter's momentum to the hook, which delivers it over the next steps.

        Args:
            parameter: of the model.
            momentum: tensor of its shape, on its device, without a loss scale.
            factor: multiplies the momentum: its decay until the next step.

        Raises:
            StateError: the hook is in the middle of a step, or failed before.
        """
        running = self._binding.running
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
        if self._binding.handover is not None:
            self._binding.handover.hand_over(number)
