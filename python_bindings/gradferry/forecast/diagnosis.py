"""What `gradferry doctor` finds out on the ranks: costs, a prediction for every hook, a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradferry import _native
from gradferry.config import COARSE_BITS
from gradferry.forecast.costs import Parameter, StepProfile
from gradferry.forecast.measure import measure_costs
from gradferry.forecast.measure_link import LinkProbe, Progress
from gradferry.forecast.measure_step import measure_steps
from gradferry.forecast.predict import OWN_HOOKS, Costs, Prediction, Predictor
from gradferry.forecast.verdict import advise
from gradferry.workloads.hooks import hook_config
from gradferry.workloads.models import load_workload
from gradferry.workloads.optimizers import make_optimizer

# Measured to see how much ranks wait for each other. It sends little, so that is what shows.
_MEASURED_CODEC = "q4"
OWN = ("torch:fp32", "torch:fp16", "torch:bf16")


@dataclass(frozen=True)
class Examination:
    """What is asked. Hooks are known to be good: of OWN, and codecs."""

    hooks: tuple[str, ...]
    bucket_caps_mb: tuple[float | None, ...]
    turns: int  # of training steps
    seconds: float  # about, per size of a collective


@dataclass(frozen=True)
class Diagnosis:
    """What was found, the same on all ranks."""

    world_size: int
    parameters: tuple[Parameter, ...]
    profile: StepProfile
    costs: Costs
    predictions: tuple[Prediction, ...]  # `none` first
    verdict: str


def default_hooks() -> tuple[str, ...]:
    """PyTorch's own that can be predicted, and every codec."""
    return (*OWN, *(str(codec["name"]) for codec in _native.codecs()))


def needs_momentum(hook: str) -> bool:
    """Whether a codec trains well only in momentum mode, which the hook does not use."""
    if hook in OWN_HOOKS:
        return False
    config = hook_config(hook)
    return not config.momentum and config.codec.bits() < COARSE_BITS


def examine_workload(emit: Progress, model: str, asked: Examination, seed: int) -> Diagnosis:
    """Runs on every rank of the default group, on a model as `bench train` has it."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(seed)
    workload = load_workload(model)

    def make_step(ddp: nn.Module) -> Callable[[], None]:
        optimizer = make_optimizer("AdamW", workload, ddp.parameters(), None, fused=True)
        generator = torch.Generator().manual_seed(seed)
        batch: Any = workload.draw(generator)

        def step() -> None:
            optimizer.zero_grad()
            workload.loss(ddp, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    return examine(group, workload.build_model, make_step, asked, emit)


def examine(
    group: dist.ProcessGroup,
    build_model: Callable[[], nn.Module],
    make_step: Callable[[nn.Module], Callable[[], None]],
    asked: Examination,
    emit: Progress = lambda text: None,
) -> Diagnosis:
    """Measures and predicts. Collective. `build_model` and `make_step`: as for measure_steps."""
    emit(f"training steps without communication, and with {_MEASURED_CODEC}")
    cap = asked.bucket_caps_mb[0]
    steps = measure_steps(build_model, group, make_step, _MEASURED_CODEC, cap, asked.turns)
    own = [hook for hook in asked.hooks if hook in OWN_HOOKS]
    configs = {hook: hook_config(hook) for hook in asked.hooks if hook not in OWN_HOOKS}
    measured = hook_config(_MEASURED_CODEC)
    probe = LinkProbe(group)
    codecs = [measured, *configs.values()]
    costs = measure_costs(probe, steps.parameters, own, codecs, asked.seconds, emit)
    emit("predicting")
    predictor = Predictor(steps.parameters, steps.profile, costs)
    predictor = predictor.calibrated(_MEASURED_CODEC, measured, cap, steps.exposed_s)
    predictions = [predictor.without()]
    for hook in asked.hooks:
        if hook in configs:
            predictions.append(predictor.codec(hook, configs[hook], asked.bucket_caps_mb))
        else:
            predictions.append(predictor.own_hook(hook, asked.bucket_caps_mb))
    return Diagnosis(
        world_size=probe.world_size,
        parameters=steps.parameters,
        profile=predictor.profile,
        costs=costs,
        predictions=tuple(predictions),
        verdict=advise(predictions, needs_momentum),
    )


def require_hooks(hooks: Sequence[str]) -> tuple[str, ...]:
    """The hooks, with those of PyTorch's own and a codec that every verdict compares with."""
    wanted = dict.fromkeys((OWN[0], *hooks))
    if all(hook in OWN_HOOKS for hook in wanted):
        wanted["q4"] = None
    return tuple(wanted)
