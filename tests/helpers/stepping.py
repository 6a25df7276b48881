"""What optimizers step with."""

from __future__ import annotations

from typing import Any

import torch


def settings_of_steps(optimizer: torch.optim.Optimizer) -> list[list[dict[str, Any]]]:
    """Gets the settings of all groups, without their parameters, of every later step."""
    seen: list[list[dict[str, Any]]] = []

    def note(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(settings(args[0]))  # what steps: the optimizer, or its substitute

    optimizer.register_step_pre_hook(note)
    return seen


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
