"""The compression stage of DeepSpeed's 1-bit Adam, from its published algorithm, in NumPy.

Tang et al., 1-bit Adam, ICML 2021: worker and server errors are buffers of their own, the momentum
is another one, and the average of what was compressed takes the momentum's place. DeepSpeed's scale
is the root mean square of what is compressed; any other can be given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Scale = Callable[[np.ndarray], np.ndarray]  # per element


class OneBitMomentum:
    """All ranks' momentum of one parameter: flat arrays, in the order of ranks."""

    def __init__(self, momentum: np.ndarray, world_size: int, beta: float, scale: Scale) -> None:
        self.momentum = momentum.copy()
        self.worker_error = [np.zeros_like(momentum) for _ in range(world_size)]
        self.server_error = np.zeros_like(momentum)
        self.beta = beta
        self.scale = scale

    def step(self, gradients: Sequence[np.ndarray]) -> np.ndarray:
        """Gradients by rank -> the new momentum, the same on all ranks."""
        sent = []
        for rank, gradient in enumerate(gradients):
            local = self.beta * self.momentum + (1 - self.beta) * gradient
            compensated = local + self.worker_error[rank]
            sent.append(self._compress(compensated))
            self.worker_error[rank] = compensated - sent[-1]
        compensated = sum(sent) / len(sent) + self.server_error
        self.momentum = self._compress(compensated)
        self.server_error = compensated - self.momentum
        return self.momentum

    def _compress(self, v: np.ndarray) -> np.ndarray:
        return np.where(v < 0, -1.0, 1.0).astype(v.dtype) * self.scale(v)
