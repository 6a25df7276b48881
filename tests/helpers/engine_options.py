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
    """Those of a plain hook, with what is `given`: parameters, nodes, chunk_bytes and
    workspace_cap_bytes at least.
    """
    plain: dict[str, Any] = {
        "rank": 0,
        "config_hash": 0,
        "layout_hash": 0,
        "seed": 0,
        "warmup_steps": 0,
        "compressed_warmup": False,
        "momentum": 0.0,
        "raise_nonfinite": False,
        "exact_skip": False,
        "loss_scale": None,
        "check_every": 0,
        "equal_scatter": True,
        "collective": "all_reduce",
        "find_unused_parameters": False,
        "way_on": "",
        "store": None,
        "world_ranks": [],
    }
    return _native.EngineOptions(**{**plain, **given})
