"""Warnings of what works, but not as a user wants it: optimizers, and rules."""

from __future__ import annotations

import math
import numbers
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from gradferry.averaging.momentum import is_set_up_for_another
from gradferry.averaging.running import Running
from gradferry.averaging.step_numbers import call_after_steps
from gradferry.core.codec_spec import AUTO
from gradferry.core.config import COARSE_BITS, DEFAULT_RULES, Config, Rule
from gradferry.core.names import closest
from gradferry.core.parameters import ParameterLayout
from gradferry.core.warn import warn
from gradferry.errors import ConfigError

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
    """Judges every optimizer that steps on a model: warns of the first that does not suit the hook.

    Such is one that `momentum_mode` has set up for another hook, such as that of an earlier
    DistributedDataParallel. In momentum mode it is one with its own momentum, unless its class has
    the attribute ``takes_momentum = True``, which means that it expects momentum instead of
    gradients. Else it is Adam with a codec below 3 bits and a worker residual.

    A ZeroRedundancyOptimizer that steps in a communication hook only, and so has done nothing, gets
    a ConfigError.
    """
    weak = weakref.ref(running)  # the model may outlive its hook
    judged = weakref.WeakSet[Optimizer]()

    def look(optimizer: Optimizer) -> None:
        running = weak()
        if running is None or optimizer in judged:
            return
        if getattr(optimizer, "_overlap_with_ddp", False):
            raise ConfigError(OVERLAPPED_ZERO)
        judged.add(optimizer)
        if text := _unsuited(running, optimizer):
            handle.remove()
            warn(text)

    handle = call_after_steps(look, index=running.index, owner=running)


def _unsuited(running: Running, optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    if is_set_up_for_another(optimizer, running):
        return _FOR_ANOTHER_HOOK.format(name)
    if running.engine is None:
        return None
    if running.config.momentum:
        return _momentum_twice(running.config.momentum, optimizer)
    coarse = next((str(p.codec) for p in running.parameters if _coarse_with_residual(p)), None)
    adaptive = any(word in name.lower() for word in _ADAPTIVE)
    if coarse is None or not adaptive or not running.transport.exchanges:
        return None
    return (
        f"{name} trains worse behind {coarse} with error feedback: what is withheld "
        "reaches its variance late and at once. Attach with momentum=, and call "
        "gradferry.optim.momentum_mode(optimizer, state) or use gradferry.optim.OneBitAdam; or "
        "take a codec of 3 bits or more, an optimizer like SGD, or error_feedback='owner'"
    )


def _coarse_with_residual(parameter: ParameterLayout) -> bool:
    codec = parameter.codec
    return parameter.residuals[0] and codec.lossy and codec.bits(parameter.dtype) < COARSE_BITS


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


def warn_about_rules(
    config: Config, parameters: Sequence[ParameterLayout], *, exchanges: bool
) -> None:
    """Warns of rules that match no parameter, and of a codec that no parameter gets."""
    warn_about_unmatched(config, parameters, "rules")
    if exchanges:
        warn_if_nothing_is_compressed([(config, parameters, "rules")])


def warn_about_unmatched(
    config: Config, parameters: Sequence[ParameterLayout], option: str
) -> None:
    """Warns of rules that match no parameter. `option`: the one that gives them."""
    for number, rule in enumerate(config.rules):
        if not any(_matches(rule, parameter) for parameter in parameters):
            names = list(dict.fromkeys(parameter.name for parameter in parameters))
            warn(_unmatched(f"{option}[{number}]", rule, names))


def warn_if_nothing_is_compressed(
    exchanges: Sequence[tuple[Config, Sequence[ParameterLayout], str]],
) -> None:
    """Warns if codecs were asked for, and no parameter gets one in any of the exchanges of a model:
    of each the configuration, its parameters, and the option that gives its rules.
    """
    asked = [each for each in exchanges if each[0].codec.lossy or each[0].chooses]
    reasons, options = {}, []
    for config, parameters, option in asked:
        options.append(f"{option}=")
        for parameter in parameters:
            if (reason := _why_exempt(config, parameter)) is None:
                return
            reasons[parameter.name] = reason  # once, for the shards of all ranks
    if set(reasons.values()) <= {_BY_RULE}:
        return
    counted = ", ".join(f"{count} {kind}" for kind, count in Counter(reasons.values()).items())
    codecs = [repr(AUTO if each.chooses else str(each.codec)) for each, _, _ in asked]
    warn(
        f"nothing is compressed by {' and '.join(codecs)}: every parameter is exempt ({counted}) "
        "and is sent as it is. Give parameters of fp32, bf16 or fp16 a codec by "
        f"{' or '.join(options)}, or take 'off' instead"
    )


_BY_RULE = "by your rules"


def _why_exempt(config: Config, parameter: ParameterLayout) -> str | None:
    """Why a parameter is never compressed; None when a lossy codec takes it."""
    if parameter.is_complex or parameter.dtype == torch.float64:
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


def _unmatched(place: str, rule: Rule, names: Sequence[str]) -> str:
    given = {
        key: value
        for key, value in {**asdict(rule), "codec": str(rule.codec)}.items()
        if value != Rule.__dataclass_fields__[key].default
    }
    text = f"{place}={given!r} matches no parameter"
    if any(Rule(rule.codec, rule.name).matches(name, 0, 0) for name in names):
        return f"{text}: of those with such a name none has these dimensions and this size"
    return (
        f"{text}. A pattern covers the whole name, dots included: '*embedding*' matches "
        f"'encoder.embedding.weight'{closest(rule.name, names)}"
    )
