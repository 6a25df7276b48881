"""What a user should know about the training around the hook."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from gradferry.config import COARSE_BITS
from gradferry.parameters import ParameterLayout

# By the names of their classes: those of many libraries are called so.
_ADAPTIVE = ("adam", "lamb")


# Models whose optimizer has not stepped yet: their parameters, and what they are warned about.
_watched: list[tuple[WeakIdKeyDictionary, str]] = []


def warn_about_adam(parameters: tuple[ParameterLayout, ...], index: WeakIdKeyDictionary) -> None:
    """Warns once when Adam steps on a model whose worker residual holds back whole gradients.

    Args:
        parameters: as agreed; nothing happens unless one has a worker residual and a codec of fewer
            than 3 bits.
        index: holds the model's parameters.
    """
    for parameter in parameters:
        codec = parameter.codec
        if parameter.residuals[0] and codec.lossy and codec.bits(parameter.dtype) < COARSE_BITS:
            _register()
            _watched.append((index, str(codec)))
            return


@functools.cache
def _register() -> None:
    register_optimizer_step_post_hook(_look)  # for good: hooks must not go while they are called


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for watched in list(_watched):
        index, codec = watched
        mine = any(p in index for group in optimizer.param_groups for p in group["params"])
        if mine or not index:
            _watched[:] = [other for other in _watched if other is not watched]
        name = type(optimizer).__name__
        if mine and any(word in name.lower() for word in _ADAPTIVE):
            warnings.warn(
                f"{name} trains worse behind {codec} with error feedback: what is withheld "
                "reaches its variance late and at once. Attach with momentum=betas[0] and "
                "warmup_steps=N and use gradferry.optim.OneBitAdam; or take a codec of 3 bits or "
                "more, an optimizer like SGD, or error_feedback='owner'",
                stacklevel=3,
            )
