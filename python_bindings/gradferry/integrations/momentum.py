"""`gradferry.optim.momentum_mode` for trainers, which make schedules before a hook can exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from gradferry.ddp.state import HookState
from gradferry.errors import ConfigError
from gradferry.optim import momentum_mode

_CONTAINERS = (lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler)  # of other schedules
# All their learning rates are proportional to those they began with.
_PROPORTIONAL = (
    lr_scheduler.LambdaLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.PolynomialLR,
    *_CONTAINERS,
)
# These too, unless they have a least learning rate.
_WITH_LEAST = (lr_scheduler.CosineAnnealingLR, lr_scheduler.CosineAnnealingWarmRestarts)


def take_momentum(
    optimizer: torch.optim.Optimizer, schedules: Sequence[Any], state: HookState
) -> None:
    """Applies `momentum_mode` to an optimizer that has a momentum of its own, and its factor to the
    schedules of its learning rates. Any other optimizer is left as it is: it was set up for the
    hook, or was loaded from a checkpoint of such a training.

    Raises:
        ConfigError, StateError: as `momentum_mode`; or a schedule has rates that are not
            proportional to the first, or is of groups that momentum_mode() divided.
    """
    groups = optimizer.param_groups
    if not state.config.momentum or getattr(optimizer, "takes_momentum", False):
        return
    if not any(_has_momentum(group) for group in groups):
        return
    parts = [part for schedule in schedules for part in _parts(schedule)]
    for part in parts:
        _expect_proportional(part)
    now = [group["lr"] for group in groups]
    first = [group.pop("initial_lr", group["lr"]) for group in groups]
    for group, rate in zip(groups, first, strict=True):
        group["lr"] = rate  # that of now is 0 at the start of a warm-up
    momentum_mode(optimizer, state)
    if not parts:
        return
    if len(groups) != len(first):
        raise ConfigError(
            "parameters of one group arrive with several momenta, and its schedule of learning "
            "rates is for one: give parameters that travel as exact a group of their own, or take "
            "another codec than topk"
        )
    factors = []
    for group, rate_now, rate in zip(groups, now, first, strict=True):
        factors.append(group["lr"] / rate if rate else 1.0)
        group["initial_lr"] = group["lr"]
        group["lr"] = rate_now * factors[-1]
    for part in parts:
        for name in {"base_lrs", "_last_lr"} & vars(part).keys():
            rates = zip(getattr(part, name), factors, strict=True)
            setattr(part, name, [rate * factor for rate, factor in rates])


def _has_momentum(group: dict[str, Any]) -> bool:
    return bool(group.get("momentum") or group.get("betas", (0,))[0])


def _parts(schedule: Any) -> Iterator[Any]:
    """The schedule, and those that it consists of."""
    yield schedule
    if isinstance(schedule, _CONTAINERS):
        for part in schedule._schedulers:
            yield from _parts(part)


def _expect_proportional(schedule: Any) -> None:
    if isinstance(schedule, _PROPORTIONAL):
        return
    if isinstance(schedule, _WITH_LEAST) and not schedule.eta_min:
        return
    raise ConfigError(
        f"momentum mode changes the learning rate, and {type(schedule).__name__} has rates that do "
        "not follow: take a schedule without rates of its own, or make the optimizer with "
        "betas=(0, ...) and the learning rate that gradferry.optim.momentum_mode() documents"
    )
