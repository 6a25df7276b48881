"""Warnings about the optimizer of a training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from gradferry.core.config import COARSE_BITS
from gradferry.core.parameters import ParameterLayout
from gradferry.core.warn import warn
from gradferry.errors import ConfigError
from gradferry.reduction.after_steps import call_after_steps

OVERLAPPED_ZERO = (
    "ZeroRedundancyOptimizer(overlap_with_ddp=True) does not go with gradferry: it steps in a "
    "communication hook, inside backward and before ranks know that every bucket has arrived; "
    "build it without overlap_with_ddp, and call its step() after backward"
)

# Parts of class names, because optimizers of many libraries have such names.
_ADAPTIVE = ("adam", "lamb")


def watch_optimizer(
    parameters: Sequence[ParameterLayout], index: WeakIdKeyDictionary, momentum: float
) -> None:
    """Judges the first optimizer that steps on a model: warns once if it does not suit the hook.

    It raises ConfigError if that optimizer is a ZeroRedundancyOptimizer that steps in a
    communication hook only, and so has done nothing.

    In momentum mode, that is an optimizer with its own momentum, unless its class has the attribute
    ``takes_momentum = True``, which means that it expects momentum instead of gradients. Without
    momentum mode, it is Adam with a codec below 3 bits and a worker residual.

    Args:
        parameters: as agreed.
        index: holds the model's parameters.
        momentum: of the hook; 0.0: no momentum mode.
    """
    coarse = next((str(p.codec) for p in parameters if _coarse_with_residual(p)), None)
    judge: Callable[[Optimizer], str | None]
    if momentum:
        judge = functools.partial(_momentum_twice, momentum)
    elif coarse is not None:
        judge = functools.partial(_adam_behind, coarse)
    else:
        judge = _suits
    _watch(index, judge)


def _coarse_with_residual(parameter: ParameterLayout) -> bool:
    codec = parameter.codec
    return parameter.residuals[0] and codec.lossy and codec.bits(parameter.dtype) < COARSE_BITS


def _suits(optimizer: Optimizer) -> str | None:
    return None


def _momentum_twice(momentum: float, optimizer: Optimizer) -> str | None:
    if getattr(optimizer, "takes_momentum", False):
        return None
    found = {name: value for group in optimizer.param_groups for name, value in _momenta(group)}
    if not found:
        return None
    shown = ", ".join(f"{name}={value:g}" for name, value in found.items())
    return (
        f"{type(optimizer).__name__} has {shown}, but behind attach(momentum={momentum:g}) "
        "gradients arrive as momentum already, and so take part in it twice. Call "
        "gradferry.optim.momentum_mode(optimizer, state) before the first step, which takes its "
        "own away from AdamW, Adam and SGD and sets the learning rate; or use "
        "gradferry.optim.OneBitAdam, or attach without momentum"
    )


def _momenta(group: dict[str, Any]) -> list[tuple[str, float]]:
    momenta = [("momentum", group.get("momentum")), ("betas[0]", (group.get("betas") or [0])[0])]
    return [(name, float(value)) for name, value in momenta if value]


def _adam_behind(codec: str, optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    if not any(word in name.lower() for word in _ADAPTIVE):
        return None
    return (
        f"{name} trains worse behind {codec} with error feedback: what is withheld "
        "reaches its variance late and at once. Attach with momentum=, and call "
        "gradferry.optim.momentum_mode(optimizer, state) or use gradferry.optim.OneBitAdam; or "
        "take a codec of 3 bits or more, an optimizer like SGD, or error_feedback='owner'"
    )


def _watch(index: WeakIdKeyDictionary, judge: Callable[[Optimizer], str | None]) -> None:
    """Warns with the text that `judge` returns, if any, for the first optimizer that steps."""

    def look(optimizer: Optimizer) -> None:
        if getattr(optimizer, "_overlap_with_ddp", False):
            raise ConfigError(OVERLAPPED_ZERO)
        handle.remove()
        if text := judge(optimizer):
            warn(text)

    handle = call_after_steps(index, look)
