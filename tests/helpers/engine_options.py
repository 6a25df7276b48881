"""Options of an engine that a test starts without a hook."""

from __future__ import annotations

from typing import Any

import torch
from gradferry import _native


def parameter(
    name: str, num_elements: int, codec: str, dtype: torch.dtype = torch.float32
) -> _native.ParameterSpec:
    """Without residuals, and exact in warm-up steps."""
    return _native.ParameterSpec(
        name=name,
        num_elements=num_elements,
        dtype=dtype,
        codec=codec,
        warmup="exact",
        worker_residual=False,
        owner_residual=False,
        owner=None,
    )


def engine_options(**given: Any) -> _native.EngineOptions:
    """Those of a plain hook on a device, with what is `given`: parameters and nodes at least."""
    return _native.EngineOptions(**{"on_streams": True, **given})
