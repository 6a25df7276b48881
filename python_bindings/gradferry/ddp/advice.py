"""Warnings about the rules and the optimizer of a training."""

from __future__ import annotations

import difflib
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from gradferry.core.config import COARSE_BITS, DEFAULT_RULES, Config, Rule
from gradferry.core.parameters import ParameterLayout
from gradferry.ddp.after_steps import call_after_steps
from gradferry.ddp.model import OVERLAPPED_ZERO
from gradferry.errors import ConfigError

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
            warnings.warn(text, stacklevel=4)

    handle = call_after_steps(index, look)


def warn_about_rules(
    config: Config, parameters: Sequence[ParameterLayout], *, exchanges: bool, stacklevel: int
) -> None:
    """Warns of rules that match no parameter, and of a codec that no parameter gets."""
    for number, rule in enumerate(config.rules):
        if not any(_matches(rule, parameter) for parameter in parameters):
            names = [parameter.name for parameter in parameters]
            warnings.warn(_unmatched(number, rule, names), stacklevel=stacklevel + 1)
    reasons = [_why_exempt(config, parameter) for parameter in parameters]
    compresses = config.codec.lossy or config.chooses
    if not exchanges or not compresses or not all(reasons) or set(reasons) <= {_BY_RULE}:
        return
    counted = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).items())
    warnings.warn(
        f"nothing is compressed: every parameter is exempt ({counted}) and travels as 'exact', "
        "which sends no less than DDP does by itself; leave gradferry out, or give parameters of "
        "fp32, bf16 or fp16 a codec by rules=",
        stacklevel=stacklevel + 1,
    )


_BY_RULE = "by your rules"


def _why_exempt(config: Config, parameter: ParameterLayout) -> str | None:
    """Why a parameter is never compressed; None when a lossy codec takes it."""
    is_complex = parameter.num_elements != math.prod(parameter.shape)
    if is_complex or parameter.dtype == torch.float64:
        return "of float64 or complex"
    for rule in (*config.rules, *DEFAULT_RULES):
        if _matches(rule, parameter):
            if rule.codec.lossy:
                return None
            if rule in config.rules:
                return _BY_RULE
            if rule.max_dims is not None:
                return f"of at most {rule.max_dims} dimension"
            assert rule.max_size is not None
            return f"of fewer than {rule.max_size + 1} elements"
    return None


def _matches(rule: Rule, parameter: ParameterLayout) -> bool:
    return rule.matches(parameter.name, len(parameter.shape), math.prod(parameter.shape))


def _unmatched(number: int, rule: Rule, names: Sequence[str]) -> str:
    given = {
        key: value
        for key, value in {**asdict(rule), "codec": str(rule.codec)}.items()
        if value != Rule.__dataclass_fields__[key].default
    }
    text = f"rules[{number}]={given!r} matches no parameter"
    if any(Rule(rule.codec, rule.name).matches(name, 0, 0) for name in names):
        return f"{text}: of those with such a name none has these dimensions and this size"
    near = _closest_names(rule.name, names)
    if near:
        text += f"; the closest names are {', '.join(map(repr, near))}"
    return (
        f"{text}. A pattern covers the whole name, dots included: '*embedding*' matches "
        "'embedding.weight' and 'encoder.embedding.weight'"
    )


def _closest_names(pattern: str, names: Sequence[str]) -> list[str]:
    """At most three names that are similar to the pattern without its wildcards."""
    wanted = pattern.strip("*?.")

    def nearness(name: str) -> float:
        parts = (name, *name.split("."))
        return max(difflib.SequenceMatcher(None, wanted, part).ratio() for part in parts)

    near = [name for name in names if nearness(name) > 0.6]
    return sorted(near, key=nearness, reverse=True)[:3]
