"""Models to time: two transformers, and any of a user."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gradferry.core.names import closest
from gradferry.diagnosis import batch_loss
from gradferry.errors import ConfigError
from torch import nn

from gradferry_lab.workloads.task import Task
from gradferry_lab.workloads.text import SMALL, TextSize, load_text

_WINDOWS_PER_RANK = 4


@dataclass(frozen=True)
class Workload:
    """A model and what a step of its training computes, on this rank."""

    name: str
    build_model: Callable[[], nn.Module]  # the same weights on every rank
    draw: Callable[[torch.Generator], Any]  # this rank's next batch
    loss: Callable[[nn.Module, Any], torch.Tensor]  # a scalar to call backward() on
    learning_rate: float  # of AdamW
    sgd_learning_rate: float = 0.1  # of SGD with momentum 0.9


def _transformer(num_ranks: int) -> Task:
    windows = _WINDOWS_PER_RANK * num_ranks
    return load_text(TextSize(64, 512, 6, 8, windows, learning_rate=3e-4, validation_windows=0))


# By name: the task with a batch for that many ranks.
MODELS: dict[str, Callable[[int], Task]] = {
    "transformer": _transformer,
    "small": lambda num_ranks: load_text(SMALL),
}


def check_model(name: str) -> None:
    """Raises ConfigError when no built-in model and no module:function has this name."""
    if ":" in name:
        _find_function(name)
    elif name not in MODELS:
        raise ConfigError(
            f"unknown model {name!r}; models are {', '.join(MODELS)}, or module:function"
            f"{closest(name, list(MODELS))}"
        )


def load_workload(name: str) -> Workload:
    """Loads a model for this rank of the default process group. Raises ConfigError."""
    check_model(name)
    if ":" in name:
        return _load_users(name)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    task = MODELS[name](world_size)

    def draw(generator: torch.Generator) -> Any:
        inputs, targets = task.draw(generator)
        return inputs[rank::world_size], targets[rank::world_size]

    return Workload(
        name=name,
        build_model=task.build_model,
        draw=draw,
        loss=task.mean_loss,
        learning_rate=task.learning_rate,
    )


def _load_users(name: str) -> Workload:
    function = _find_function(name)

    def make() -> tuple[nn.Module, Callable[[], Any]]:
        match made := function():
            case (nn.Module() as model, batch_fn) if callable(batch_fn):
                return model, batch_fn
        raise ConfigError(f"--model {name} returned {made!r}; it must be (model, batch_fn)")

    _, batch_fn = make()
    return Workload(
        name=name,
        build_model=lambda: make()[0],
        draw=lambda generator: batch_fn(),
        loss=lambda model, batch: batch_loss(f"--model {name}", model, batch),
        learning_rate=1e-4,
    )


def _find_function(name: str) -> Callable[[], Any]:
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--model {name}: {error}; name a module that can be imported from here and a function "
            f"in it"
        ) from error
    if not callable(function):
        raise ConfigError(f"--model {name}: {function_name} cannot be called")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(
            f"--model {name}: {function_name} must be a function without arguments that returns "
            f"(model, batch_fn), but: {error}"
        ) from error
    return function  # type: ignore[no-any-return]
