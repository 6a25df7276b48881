"""The options of a hook as one object, unchecked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gradferry import _native
from gradferry.core.nodes import AUTO

WORKSPACE_CAP_MB = _native.WORKSPACE_CAP_MB


@dataclass(frozen=True)
class Options:
    """The options of `gradferry.attach`, which documents them, and of all other ways in.

    `make_config` checks them later: all ranks must learn of an error, so attach does not raise it
    here on one rank alone.
    """

    codec: str = "q4"
    rules: Sequence[Mapping[str, Any]] | None = None
    error_feedback: str = "auto"
    momentum: float | None = None
    warmup_steps: int = 0
    warmup: str = "exact"
    grad_scaler: object | None = None
    nonfinite: str = "propagate"
    exact_skip: bool = False
    check_every: int = 0
    seed: int = 0
    workspace_cap_mb: float = WORKSPACE_CAP_MB
    nodes: object = AUTO

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Options:
        """Takes the options from ``locals()`` of a function that has an argument for each of them.

        Other names are ignored.
        """
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})
