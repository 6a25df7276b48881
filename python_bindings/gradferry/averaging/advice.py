"""Warnings of what works, but not as a user wants it: optimizers, rules, and short messages."""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from gradferry.averaging.momentum import is_set_up_for_another
from gradferry.averaging.running import Running
from gradferry.averaging.step_numbers import call_after_steps
from gradferry.core.config import COARSE_BITS, Rule
from gradferry.core.names import closest
from gradferry.core.parameters import ParameterLayout
from gradferry.core.warn import warn
from gradferry.errors import ConfigError

OVERLAPPED_ZERO = (
    "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps in a communication hook of its own, "
    "inside the backward pass, and not here: build it without overlap_with_ddp"
)
_SMALL_MESSAGE = 8192  # bytes
_FEW_RANKS = 8  # so few messages in a bucket cost little, however short
_FOR_ANOTHER_HOOK = (
    "{} was set up by momentum_mode() for another hook than the one that delivers its gradients: "
    "it steps without a momentum of its own, at the rate for the momentum of that hook. Call "
    "gradferry.optim.momentum_mode(optimizer, state) with the state of the hook in use, also if it "
    "has no momentum: that ends momentum mode"
)


def watch_optimizer(running: Running) -> None:
    """Warns of the first optimizer that steps on a model and does not suit its hook.

    Such is one that `momentum_mode` has set up for another hook, such as that of an earlier
    DistributedDataParallel. In momentum mode it is one with its own momentum, unless its class has
    the attribute ``takes_momentum = True``, which means that it expects momentum instead of
    gradients. Else it is Adam with a codec below 3 bits and a worker residual.
    """
    weak = weakref.ref(running)  # the model may outlive its hook
    judged = weakref.WeakSet[Optimizer]()

    def look(optimizer: Optimizer) -> None:
        running = weak()
        if running is None or optimizer in judged:
            return
        if getattr(optimizer, "_overlap_with_ddp", False):  # and so has done nothing
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
    coarse = next(
        (
            str(each.codec)
            for each in running.parameters
            if each.residuals[0] and each.codec.lossy and each.codec.bits() < COARSE_BITS
        ),
        None,
    )
    if coarse is None or "adam" not in name.lower() or not running.transport.exchanges:
        return None
    return (
        f"{name} trains worse behind {coarse} with error feedback. Attach with momentum=, and call "
        "gradferry.optim.momentum_mode(optimizer, state) or use gradferry.optim.OneBitAdam; or "
        "take a codec of 3 bits or more, or error_feedback='owner'"
    )


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


def warn_about_rules(exchanges: Sequence[tuple[Running, str]]) -> None:
    """Warns of rules that match no parameter, and of codecs that no parameter gets in any exchange
    of a model. `exchanges`: each with the option that gives its rules.
    """
    started = [(running, option) for running, option in exchanges if running.engine is not None]
    for running, option in started:
        for number, rule in enumerate(running.config.rules):
            if not any(_matches(rule, parameter) for parameter in running.parameters):
                warn(_unmatched(f"{option}[{number}]", rule, running.parameters))
    asked = [
        (running, option)
        for running, option in started
        if running.transport.exchanges and (running.config.codec.lossy or running.config.chooses)
    ]
    every = [(running.config, each) for running, _ in asked for each in running.parameters]
    ruled = (any(_matches(rule, each) for rule in config.rules) for config, each in every)
    if any(each.codec.lossy for _, each in every) or all(ruled):
        return
    codecs = " and ".join(repr(running.codec_asked_for) for running, _ in asked)
    options = " or ".join(f"{option}=" for _, option in asked)
    warn(
        f"nothing is compressed by {codecs}: every parameter is exempt (by a rule, or as one of "
        "float64 or complex numbers, of at most one dimension or of fewer than 1024 elements) and "
        f"is sent as it is. Give parameters of fp32, bf16 or fp16 a codec by {options}, or take "
        "'off' instead"
    )


def warn_about_messages(running: Running, bucket_bytes: int) -> None:
    """Warns if so many ranks share a bucket of DDP's that messages are short."""
    parameters, ranks = running.parameters, running.world_size
    whole = sum(each.num_elements * each.dtype.itemsize for each in parameters)
    sent = sum(each.num_elements * each.codec.bits(each.dtype) / 8 for each in parameters)
    message = sent * bucket_bytes / max(whole, 1) / ranks
    is_cheap = ranks <= _FEW_RANKS or whole < bucket_bytes or not running.transport.exchanges
    if is_cheap or message >= _SMALL_MESSAGE:
        return
    fewer = ", or give nodes=" if running.exchange.nodes.is_flat else ""
    warn(
        f"messages of {running.codec_asked_for!r} have about {message:,.0f} bytes, since {ranks} "
        f"ranks share every bucket of {bucket_bytes / 2**20:g} MiB; below 8 KB they cost more than "
        "their bytes: build DistributedDataParallel with bucket_cap_mb="
        f"{math.ceil(bucket_bytes / 2**20 * _SMALL_MESSAGE / message)}{fewer}"
    )


def _matches(rule: Rule, parameter: ParameterLayout) -> bool:
    return rule.matches(parameter.name, len(parameter.shape), math.prod(parameter.shape))


def _unmatched(place: str, rule: Rule, parameters: Sequence[ParameterLayout]) -> str:
    given = {key: value for key, value in vars(rule).items() if value != getattr(Rule, key, None)}
    given["codec"] = str(rule.codec)
    text = f"{place}={given!r} matches no parameter"
    names = list(dict.fromkeys(parameter.name for parameter in parameters))
    if any(Rule(rule.codec, rule.name).matches(name, 0, 0) for name in names):
        return f"{text}: of those with such a name none has these dimensions and this size"
    return (
        f"{text}. A pattern covers the whole name, dots included: '*embedding*' matches "
        f"'encoder.embedding.weight'{closest(rule.name, names)}"
    )
