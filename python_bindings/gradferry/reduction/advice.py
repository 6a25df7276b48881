"""Warnings about the optimizer of a training."""

from __future__ import annotations

import functools
import numbers
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from gradferry.core.config import COARSE_BITS
from gradferry.core.parameters import ParameterLayout
from gradferry.core.warn import warn
from gradferry.errors import ConfigError
from gradferry.reduction.after_steps import PassCounter, call_after_steps
from gradferry.reduction.momentum import is_set_up_for_another
from gradferry.reduction.running import Running

OVERLAPPED_ZERO = (
    "ZeroRedundancyOptimizer(overlap_with_ddp=True) does not go with gradferry: it steps in a "
    "communication hook, inside backward and before ranks know that every bucket has arrived; "
    "build it without overlap_with_ddp, and call its step() after backward"
)

_FOR_ANOTHER_HOOK = (
    "{} was set up by momentum_mode() for another hook than the one that delivers its gradients: "
    "it steps without a momentum of its own, at the rate for the momentum of that hook. Call "
    "gradferry.optim.momentum_mode(optimizer, state) with the state of the hook in use, also if it "
    "has no momentum: that ends momentum mode"
)

# Parts of class names, because optimizers of many libraries have such names.
_ADAPTIVE = ("adam", "lamb")


def watch_optimizer(running: Running) -> None:
    """Judges the first optimizer that steps on a model: warns once if it does not suit the hook.

    It raises ConfigError if that optimizer is a ZeroRedundancyOptimizer that steps in a
    communication hook only, and so has done nothing.

    In momentum mode, that is an optimizer with its own momentum, unless its class has the attribute
    ``takes_momentum = True``, which means that it expects momentum instead of gradients. Without
    momentum mode, it is Adam with a codec below 3 bits and a worker residual.

    With any hook, also one that passes gradients through, it is one that `momentum_mode` has set up
    for another hook, such as that of an earlier DistributedDataParallel.

    In momentum mode it also warns once if several passes are synced for each step.
    """
    momentum = running.config.momentum
    coarse = next((str(p.codec) for p in running.parameters if _coarse_with_residual(p)), None)
    judge: Callable[[Optimizer], str | None]
    if running.engine is None:
        judge = _suits
    elif momentum:
        judge = functools.partial(_momentum_twice, momentum)
        if running.config.grad_scaler is None:  # which may skip whole steps
            _watch_passes(running)
    elif running.transport.exchanges and coarse is not None:
        judge = functools.partial(_adam_behind, coarse)
    else:
        judge = _suits
    _watch(running, judge)


def _coarse_with_residual(parameter: ParameterLayout) -> bool:
    codec = parameter.codec
    return parameter.residuals[0] and codec.lossy and codec.bits(parameter.dtype) < COARSE_BITS


def _suits(optimizer: Optimizer) -> str | None:
    return None


def _momentum_twice(momentum: float, optimizer: Optimizer) -> str | None:
    if getattr(optimizer, "takes_momentum", False):
        return None
    found = {name: value for group in optimizer.param_groups for name, value in own_momenta(group)}
    if not found:
        return None
    shown = ", ".join(f"{name}={value:g}" for name, value in found.items())
    return (
        f"{type(optimizer).__name__} has {shown}, but behind attach(momentum={momentum:g}) "
        "gradients arrive as momentum already, and so take part in it twice. Call "
        "gradferry.optim.momentum_mode(optimizer, state), which has AdamW, Adam and SGD step "
        "without their own and at a rate that fits; or use gradferry.optim.OneBitAdam, or attach "
        "without momentum"
    )


def own_momenta(group: dict[str, Any]) -> list[tuple[str, float]]:
    """Names and values of the momenta of an optimizer's group that are not 0. What some optimizer
    keeps under these names and is no number is no momentum.
    """
    betas = group.get("betas")
    first = betas[0] if isinstance(betas, list | tuple) and betas else None
    momenta = []
    for name, value in (("momentum", group.get("momentum")), ("betas[0]", first)):
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, numbers.Real) and value:
            momenta.append((name, float(value)))
    return momenta


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


def _watch(running: Running, judge: Callable[[Optimizer], str | None]) -> None:
    """Warns for the first optimizer that steps if it is in momentum mode for another hook, else
    with the text that `judge` returns, if any.
    """
    weak = weakref.ref(running)  # the model may outlive its hook

    def look(optimizer: Optimizer) -> None:
        if getattr(optimizer, "_overlap_with_ddp", False):
            raise ConfigError(OVERLAPPED_ZERO)
        handle.remove()
        running = weak()
        if running is None:
            return
        if is_set_up_for_another(optimizer, running):
            warn(_FOR_ANOTHER_HOOK.format(type(optimizer).__name__))
        elif text := judge(optimizer):
            warn(text)

    handle = call_after_steps(look, index=running.index, owner=running)


def _watch_passes(running: Running) -> None:
    """Warns once an optimizer has stepped twice in a row after several synced passes. Once alone
    may be a loaded state, which moves the count of passes.
    """
    weak = weakref.ref(running)  # the model may outlive its hook

    def current_step() -> int:
        running = weak()
        return 0 if running is None or running.engine is None else running.engine.current_step()

    passes_of = PassCounter(current_step)
    before: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def count(optimizer: Optimizer) -> None:
        passes = passes_of.take(optimizer)
        if min(passes, before.get(optimizer, 0)) > 1:
            handle.remove()
            warn(
                f"{passes} backward passes were synced since the last step of "
                f"{type(optimizer).__name__}: behind attach(momentum={momentum:g}) every synced "
                "pass moves the momentum on, also one whose gradients no step uses. Run all passes "
                "but one under no_sync(), with FSDP2 set_requires_gradient_sync(False); an "
                "optimizer that needs several, such as LBFGS, goes without momentum mode. If a "
                "GradScaler skips steps, attach with grad_scaler="
            )
        before[optimizer] = passes

    momentum = running.config.momentum
    handle = call_after_steps(count, index=running.index, owner=running)
