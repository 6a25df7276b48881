"""The error of a compressed mean over ranks, against the mean in fp32."""

from __future__ import annotations

import torch
from gradferry import _native


def squared_error(gradients: torch.Tensor, codec: str) -> float:
    """The error of the first mean of an exchange, for which nothing was withheld before.

    Args:
        gradients: float32 (ranks, elements), contiguous, on the CPU.
        codec: a codec string.

    Returns:
        The sum over elements of (mean of the exchange - mean in fp64)^2.
    """
    mean = _native.compressed_mean(
        list(gradients), codec, seed=0, worker_residual=False, owner_residual=False
    )
    return float((mean.double() - gradients.mean(0, dtype=torch.float64)).square().sum())


def squared_norm(gradients: torch.Tensor) -> float:
    """The squared norm of the mean over ranks: what an error is relative to."""
    return float(gradients.mean(0, dtype=torch.float64).square().sum())
