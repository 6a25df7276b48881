"""Calls of a user's model and functions, with errors that say what does not fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from gradferry.errors import ConfigError


def batch_loss(name: str, model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that a user's model returns for a batch. Raises ConfigError, with `name`, when the
    model cannot be called with the batch, or returns something else.
    """
    if not isinstance(batch, (tuple, list, Mapping)):
        raise ConfigError(
            f"{name}: a batch is {_kind(batch)}; it must be a tuple or list of the model's "
            "positional arguments, or a dict of its keyword arguments: one tensor alone is (x,)"
        )
    keywords = batch if isinstance(batch, Mapping) else {}
    arguments = () if isinstance(batch, Mapping) else batch
    try:
        returned = model(*arguments, **keywords)
    except TypeError as error:
        called = getattr(model, "module", model).forward
        mismatch = misfit(called, *arguments, **keywords)
        if mismatch is None:
            raise
        raise ConfigError(
            f"{name}: the model's forward{inspect.signature(called)} does not take a batch of "
            f"{_contents(batch)}: {mismatch}"
        ) from error
    loss = getattr(returned, "loss", returned)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"{name}: the model returned {type(returned).__name__}; called with a batch "
            f"it must return its loss, a tensor of one element, or an object whose .loss is one"
        )
    return loss


def misfit(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str | None:
    """Why the function cannot be called with these arguments; None if it can, or is unknown."""
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        return str(error)
    except ValueError:  # some functions written in C have no signature
        return None
    return None


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _contents(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return ", ".join(map(str, batch))
    return f"{len(batch)} value{'s' * (len(batch) != 1)}"
