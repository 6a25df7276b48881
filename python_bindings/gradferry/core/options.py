"""What a user asks of a hook, as one thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Options:
    """The options of `gradferry.attach` and `gradferry.HookState`, which documents them.

    Nothing is checked here: with a model, all ranks must be told first of what is wrong.
    `make_config` checks.
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

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Options:
        """From the arguments of a function that has one for every option, as ``locals()`` has them.

        Others are left out.
        """
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})
