"""Warnings of what works, but not as a user wants it: optimizers, rules, surroundings."""

from __future__ import annotations

import difflib
import functools
import math
import numbers
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from gradferry.core.config import COARSE_BITS, DEFAULT_RULES, Config, Rule
from gradferry.core.device import Transport, says_yes, shown, this_build
from gradferry.core.parameters import ParameterLayout
from gradferry.core.warn import warn
from gradferry.errors import ConfigError
from gradferry.reduction.momentum import is_set_up_for_another
from gradferry.reduction.running import Running
from gradferry.reduction.step_numbers import PassCounter, call_after_steps

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


def warn_about_rules(
    config: Config,
    parameters: Sequence[ParameterLayout],
    *,
    exchanges: bool,
    option: str = "rules",
) -> None:
    """Warns of rules that match no parameter, and of a codec that no parameter gets. `option`: the
    one that gives the rules.
    """
    for number, rule in enumerate(config.rules):
        if not any(_matches(rule, parameter) for parameter in parameters):
            names = [parameter.name for parameter in parameters]
            warn(_unmatched(f"{option}[{number}]", rule, names))
    reasons = [_why_exempt(config, parameter) for parameter in parameters]
    compresses = config.codec.lossy or config.chooses
    if not exchanges or not compresses or not all(reasons) or set(reasons) <= {_BY_RULE}:
        return
    counted = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons).items())
    warn(
        f"nothing is compressed: every parameter is exempt ({counted}) and travels as 'exact', "
        "which sends no less than DDP does by itself; leave gradferry out, or give parameters of "
        f"fp32, bf16 or fp16 a codec by {option}=",
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


@dataclass(frozen=True)
class Surroundings:
    """What may cost speed.

    Attributes:
        environment: of the process.
        high_priority: whether the group was made with a high-priority stream; None: unknown.
        translated: names the GPU, if the driver must translate the kernels for it.
    """

    environment: Mapping[str, str]
    high_priority: bool | None
    translated: str | None

    @classmethod
    def of(cls, place: torch.device, group: dist.ProcessGroup) -> Surroundings:
        """Those of this process, for gradients on a CUDA device."""
        backend = group._get_backend(place)
        try:
            options = backend.options
        except (RuntimeError, AttributeError):  # a backend without options
            options = None
        high_priority = getattr(options, "is_high_priority_stream", None)
        build, translated = this_build(), None
        capability = torch.cuda.get_device_capability(place)
        if build is not None and not build.has_machine_code(capability):
            translated = f"{place}, of compute capability {shown(capability)}"
        return cls(os.environ, high_priority, translated)

    def advice(self) -> list[str]:
        """A sentence for each setting, which says what to do."""
        sentences = []
        if self.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            sentences.append(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 puts the work of all streams into one queue, so "
                "that encoding and collectives wait for backward() and it for them: unset it (DDP "
                "does not need it), or set it to 8 or more"
            )
        if self.high_priority is False and not says_yes(
            self.environment, "TORCH_NCCL_HIGH_PRIORITY"
        ):
            sentences.append(
                "the stream of this process group has normal priority, so that its collectives "
                "wait behind the kernels of backward(): set TORCH_NCCL_HIGH_PRIORITY=1, or make "
                "the group with pg_options=torch.distributed.ProcessGroupNCCL.Options("
                "is_high_priority_stream=True)"
            )
        if self.translated is not None:
            sentences.append(
                f"this installation of gradferry has no machine code for {self.translated}, so "
                "that the driver translates its kernels at the first attach, for up to a minute: "
                "install it again on this machine with CUDAARCHS=native set"
            )
        return sentences


def warn_about_surroundings(transport: Transport, group: dist.ProcessGroup) -> None:
    """Warns of settings that slow down a hook whose gradients are on a CUDA device."""
    if transport.device.type != "cuda" or not transport.streams or not transport.exchanges:
        return
    for sentence in Surroundings.of(transport.device, group).advice():
        warn(sentence)
