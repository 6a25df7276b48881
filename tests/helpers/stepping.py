"""What optimizers step with, what is said meanwhile, and the bits of parameters."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from gradferry.errors import GradferryWarning


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


@contextlib.contextmanager
def warned() -> Iterator[list[warnings.WarningMessage]]:
    """All warnings that are given meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What gradferry logs meanwhile, from INFO on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradferry")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def bits(parameters: Iterable[torch.Tensor]) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in parameters]


def slot(state: Any) -> dict[str, torch.Tensor]:
    """This rank's residuals, as a saved state has them."""
    return state.state_dict()[f"slot_{dist.get_rank()}"]


def flip_last_bit(parameter: torch.Tensor) -> None:
    """Changes the last element in memory: its real part, if it is complex."""
    with torch.no_grad():
        flat = parameter.as_strided((parameter.numel(),), (1,)).view(torch.uint8)
        flat[-parameter.element_size()] ^= 1


@contextlib.contextmanager
def texts(file: str) -> Iterator[list[str]]:
    """Texts of the warnings about a hook that is not called, which point to `file`."""
    found: list[str] = []
    with warned() as caught:
        yield found
    said = [w for w in caught if w.category is GradferryWarning]
    assert all(w.filename == file for w in said), said
    found += [str(w.message) for w in said]
