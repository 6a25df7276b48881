"""Measures a model on its ranks: costs, a prediction for every hook, a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from gradferry.core.agreement import meeting_place
from gradferry.core.codec_spec import AUTO as AUTO_CODEC
from gradferry.core.config import COARSE_BITS
from gradferry.core.device import CPU, Transport, agreed_transport
from gradferry.core.nodes import AUTO, exchanges_to_choose_from, found_nodes, how_to_ask
from gradferry.errors import ConfigError
from gradferry.forecast.clock import computing_on
from gradferry.forecast.costs import Costs, Parameter, StepProfile
from gradferry.forecast.hook_names import (
    BACKEND_HOOKS,
    POWERSGD,
    RULERS,
    TORCH_DTYPES,
    check_hook,
    codecs_to_choose_from,
    hook_config,
    split_options,
)
from gradferry.forecast.measure import make_probe, measure_costs
from gradferry.forecast.measure_link import Progress
from gradferry.forecast.measure_step import Attach, measure_steps
from gradferry.forecast.predict import Prediction, predictors_of
from gradferry.forecast.verdict import advise

# Measured to find how long ranks wait for each other. It sends little, so waiting dominates.
_MEASURED_CODEC = "q4"


@dataclass(frozen=True)
class Examination:
    """The options. Hooks are already checked: names of TORCH_DTYPES, and codecs."""

    hooks: tuple[str, ...]
    bucket_caps_mb: tuple[float | None, ...]
    turns: int  # rounds of training steps
    seconds: float  # approximate time per size of a collective


@dataclass(frozen=True)
class Diagnosis:
    """The results, the same on all ranks."""

    world_size: int
    parameters: tuple[Parameter, ...]
    profile: StepProfile
    costs: tuple[Costs, ...]  # of every exchange
    predictions: tuple[Prediction, ...]  # those of RULERS first; a codec's for every exchange
    verdict: str
    device: str = CPU.type  # type of that of the model


def default_hooks() -> tuple[str, ...]:
    """PyTorch's hooks that can be predicted, and the codecs to choose from."""
    return (*TORCH_DTYPES, *codecs_to_choose_from())


def needs_momentum(hook: str) -> bool:
    """Whether a codec trains well only in momentum mode, which the hook does not use."""
    if hook in BACKEND_HOOKS or hook in RULERS:
        return False
    config = hook_config(hook)
    return not config.momentum and config.codec.bits() < COARSE_BITS


def examine(
    group: dist.ProcessGroup,
    build_model: Callable[[], nn.Module],
    make_step: Callable[[nn.Module], Callable[[], None]],
    attach: Attach,
    asked: Examination,
    emit: Progress = lambda text: None,
    place: torch.device = CPU,
) -> Diagnosis:
    """Measures and predicts. Collective.

    build_model, make_step: as for measure_steps.
    attach: `gradferry.attach`.
    place: where the models are.

    Raises:
        ConfigError: there are no kernels for this device, or the group has no backend for it.
    """
    transport = agreed_transport(place, group)
    with computing_on(place):
        return _examine(group, build_model, make_step, attach, asked, emit, transport)


def _examine(
    group: dist.ProcessGroup,
    build_model: Callable[[], nn.Module],
    make_step: Callable[[nn.Module], Callable[[], None]],
    attach: Attach,
    asked: Examination,
    emit: Progress,
    transport: Transport,
) -> Diagnosis:
    emit(f"training steps without communication, and with {_MEASURED_CODEC}")
    cap = asked.bucket_caps_mb[0]
    steps = measure_steps(
        build_model,
        group,
        make_step,
        lambda ddp: attach(ddp, _MEASURED_CODEC),
        cap,
        asked.turns,
        transport.device,
    )
    backend = [hook for hook in asked.hooks if hook in BACKEND_HOOKS]
    configs = {
        hook: transport.adapted(hook_config(hook))
        for hook in asked.hooks
        if hook not in BACKEND_HOOKS
    }
    measured = transport.adapted(hook_config(_MEASURED_CODEC))
    hosts = found_nodes(group, meeting_place(group, transport.device))
    # The last is the one that the measured hook has, as attach takes it.
    exchanges = exchanges_to_choose_from(AUTO, hosts, on_host=transport.on_host)
    probe = make_probe(group, transport, exchanges)
    codecs = [measured, *configs.values()]
    costs = measure_costs(probe, steps.parameters, backend, codecs, asked.seconds, emit)
    emit("predicting")
    predictors = predictors_of(steps.parameters, steps.profile, costs)
    calibrated = predictors[-1].calibrated(_MEASURED_CODEC, measured, cap, steps.exposed_s)
    predictors = [predictor.with_profile(calibrated.profile) for predictor in predictors]
    predictions = [calibrated.without(), calibrated.sync()]
    for hook in asked.hooks:
        if hook in configs:
            for predictor in predictors:
                predictions.append(predictor.codec(hook, configs[hook], asked.bucket_caps_mb))
        else:
            predictions.append(calibrated.backend_hook(hook, asked.bucket_caps_mb))
    return Diagnosis(
        world_size=group.size(),
        parameters=steps.parameters,
        profile=calibrated.profile,
        costs=tuple(costs),
        predictions=tuple(predictions),
        verdict=advise(
            predictions,
            needs_momentum,
            {each.name: how_to_ask(each.nodes) for each in exchanges[:-1]},
        ),
        device=transport.device.type,
    )


def require_hooks(hooks: Sequence[str]) -> tuple[str, ...]:
    """The hooks, plus `torch:fp32` and, for the verdict to compare, `q4`, if there is no codec that
    trains well as it is. Raises ConfigError for one that does not exist or cannot be predicted.
    """
    for hook in hooks:
        check_hook(hook)
        if hook.startswith(POWERSGD):
            raise ConfigError(f"hook {hook!r} cannot be predicted; measure it with bench train")
        if split_options(hook)[0] == AUTO_CODEC:
            raise ConfigError(f"hook {hook!r} chooses among hooks; name those to be compared")
    wanted = dict.fromkeys(("torch:fp32", *hooks))
    if all(hook in BACKEND_HOOKS or needs_momentum(hook) for hook in wanted):
        wanted["q4"] = None
    return tuple(wanted)
