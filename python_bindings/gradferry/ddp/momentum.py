"""Access to the momentum in a hook, for an optimizer that hands over its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradferry.ddp.binding import Binding
from gradferry.reduction.momentum import DeliveredMomentum


class KeptMomentum(DeliveredMomentum):
    """The interface of a hook to `gradferry.optim.OneBitAdam`. Use `momentum_of` to get one."""

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding.running)
        self._handover = binding.handover

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
