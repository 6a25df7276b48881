"""Optimizers for gradients that arrive as momentum."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import torch
from torch.optim.optimizer import ParamsT

from gradferry.averaging.advice import OVERLAPPED_ZERO
from gradferry.averaging.handle import Averaging
from gradferry.averaging.momentum import DeliveredMomentum, end_momentum_mode
from gradferry.ddp.state import HookState, bound_to
from gradferry.errors import ConfigError, StateError

__all__ = ["OneBitAdam", "momentum_mode"]

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Group: TypeAlias = dict[str, Any]  # of an optimizer's parameters, with their settings
Momenta: TypeAlias = dict[torch.Tensor, float]  # that gradients of parameters arrive with
_log = logging.getLogger("gradferry")


def momentum_mode(optimizer: OptimizerT, state: Averaging) -> OptimizerT:
    """Makes an optimizer, set up as without gradferry, one for gradients that are momentum already.

    Call it after `attach`. Codecs below 3 bits so need no dense steps and no optimizer of their
    own:

    >>> state = gradferry.attach(ddp, "sign1", momentum=0.8)
    >>> optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    >>> gradferry.optim.momentum_mode(optimizer, state)

    From then on ``step()`` takes the numbers in ``optimizer.param_groups`` and steps with others:

    * **AdamW and Adam**: ``betas[0]`` is 0, and the learning rate ``sqrt((1 - m) / (1 + m))``
      times as high, 0.33 for m = 0.8 and 0.23 for 0.9; AdamW's ``weight_decay``, which acts
      through the rate, is divided by as much. Behind ``topk``, which keeps less of the momentum,
      m and with it the factor are those of what arrives, parameter by parameter. With
      ``codec="auto"`` m is that of codecs that send every element. A group with ``betas[0]=0``
      was set up for momentum, and steps as it is.
    * **SGD**: its own momentum goes, and the learning rate is
      ``lr * (1 - dampening) / (1 - momentum)`` with its own: as much of every gradient is applied
      in all.

    The groups themselves stay as they are. So any schedule may set their learning rates and
    momenta, before this call or after it, groups may be added, and what is logged and saved are
    your own numbers. A copy of the optimizer is not in momentum mode. Call this again for another
    hook, after the model was wrapped and attached again: a hook without momentum ends momentum
    mode. Until then the first step behind that hook warns.

    docs/design/decisions.md derives the factor. With it parameters drift and scatter, where noise
    prevails, as at the rate that was tuned; where signal prevails steps are shorter, by that factor
    at most.

    Why it bears coarse compression: an average changes slowly, so the parts that error feedback
    delivers late are still right when they arrive (1-bit Adam: Tang et al. 2021;
    EF21-SGDM: Fatkhullin et al. 2023). And Adam squares after averaging and compressing, so that
    what compression adds is in its variance, element by element: with ``betas[1]=0`` this would be
    Signum (Bernstein et al. 2018). `OneBitAdam` squares gradients, as Adam does, and therefore has
    to do so before compression begins.

    Where a hook passes gradients through (``GRADFERRY_DISABLE=1``) the optimizer steps as without
    gradferry. An optimizer class of your own that expects momentum says so with
    ``takes_momentum = True``, so that the hook does not warn of it.

    Args:
        optimizer: a `torch.optim` AdamW, Adam or SGD, or a ``ZeroRedundancyOptimizer`` of one. The
            variance of one that has stepped before is still that of gradients, so that its steps
            are shorter at first.
        state: of the hook, in momentum mode: a bound HookState, what `gradferry.fsdp.attach`
            returned, or a Reducer of the model's parameters.

    Returns:
        The same optimizer.

    Raises:
        ConfigError: the hook has no momentum, and the optimizer is not in momentum mode; the hook
            has warm-up steps, and the optimizer is SGD; the optimizer is another, or holds a
            parameter that the hook does not reduce. A later ``step()`` raises it, too, for
            parameters in groups that were added.
        StateError: the state is not bound.
    """
    if not isinstance(state, Averaging):
        raise ConfigError(
            f"the state is {state!r}, which is none of gradferry's: give what gradferry.attach(), "
            "gradferry.fsdp.attach() or gradferry.Reducer() returns"
        )
    hook = DeliveredMomentum(state._running)
    stepping = _that_steps(optimizer)
    if not hook.config.momentum:
        if _end_momentum_mode(optimizer):
            return optimizer
        raise ConfigError(
            "momentum_mode() is for a hook that delivers momentum, and this one delivers gradients;"
            " attach with momentum=, such as 0.9"
        )
    if type(stepping) not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        raise ConfigError(
            f"momentum_mode() knows AdamW, Adam and SGD, not {type(stepping).__name__}: take its "
            "own momentum away, and the learning rate times "
            f"{_deviation(hook.config.momentum):.3g} where it divides by a variance"
        )
    if type(stepping) is torch.optim.SGD and hook.config.warmup_steps:
        raise ConfigError(
            f"warmup_steps={hook.config.warmup_steps}: so long the hook delivers gradients, and "
            "this SGD would have no momentum, at a learning rate for momentum; attach without "
            "warmup_steps, which are for optimizers that learn a variance"
        )
    momenta = hook.momenta()
    groups = _groups_for_momentum(stepping, momenta)
    _end_momentum_mode(optimizer)
    if hook.current_step() is None:
        return optimizer
    substitute = functools.partial(_substitute, momenta)
    hook.begin_momentum_mode(stepping, stepping.register_step_pre_hook(substitute))
    for each in (optimizer, stepping):
        each.takes_momentum = True  # type: ignore[attr-defined]
    rates = [[group["lr"] for group in each] for each in (groups, stepping.param_groups)]
    _log.info("gradients arrive as momentum: steps have lr=%s instead of lr=%s", *rates)
    return optimizer


def _that_steps(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer itself, or that of this rank's shard, which takes over its numbers."""
    if type(optimizer).__name__ != "ZeroRedundancyOptimizer":
        return optimizer
    if optimizer._overlap_with_ddp:  # type: ignore[attr-defined]
        raise ConfigError(OVERLAPPED_ZERO)
    shard: torch.optim.Optimizer = optimizer.optim  # type: ignore[attr-defined]
    return shard


def _end_momentum_mode(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it was in momentum mode."""
    stepping = _that_steps(optimizer)
    if not end_momentum_mode(stepping):
        return False
    for each in (optimizer, stepping):
        vars(each).pop("takes_momentum", None)
    return True


def _substitute(
    momenta: Momenta, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """A pre-hook of ``step()``: another object steps instead, which differs in its groups only.

    So nobody sees groups that are meant for momentum, even after a step that raised.
    """
    substitute = object.__new__(type(optimizer))
    vars(substitute).update(vars(optimizer))
    substitute.param_groups = _groups_for_momentum(optimizer, momenta)
    return (substitute, *args[1:]), kwargs


def _groups_for_momentum(optimizer: torch.optim.Optimizer, momenta: Momenta) -> list[Group]:
    groups: list[Group] = []
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter.requires_grad and parameter not in momenta:
                raise ConfigError(
                    f"parameter {index} of group {number}, of shape {tuple(parameter.shape)}, is "
                    "none that the hook reduces: it needs an optimizer of its own"
                )
        if "betas" not in group:
            groups.append(_without_momentum(group))
        elif group["betas"][0] == 0 or not group["params"]:
            groups.append(group)
        else:
            groups += _averages_first(group, momenta)
    return groups


def _without_momentum(group: Group) -> Group:
    """The group of an SGD."""
    rate = group["lr"] * (1 - group["dampening"]) / (1 - group["momentum"])
    return {**group, "lr": rate, "momentum": 0, "dampening": 0, "nesterov": False}


def _averages_first(group: Group, momenta: Momenta) -> Iterator[Group]:
    """Divides an Adam's group by the momentum behind which its parameters are."""
    by_momentum: dict[float | None, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        by_momentum.setdefault(momenta.get(parameter), []).append(parameter)
    for momentum, parameters in by_momentum.items():
        if momentum is None:  # they are frozen
            yield {**group, "params": parameters}
            continue
        factor, (beta1, beta2) = _deviation(momentum), group["betas"]
        decay = group["weight_decay"]
        yield {
            **group,
            "params": parameters,
            "lr": group["lr"] * factor,
            "betas": (0 * beta1, beta2),  # a tensor stays one
            "weight_decay": decay / factor if group["decoupled_weight_decay"] else decay,
        }


def _deviation(momentum: float) -> float:
    """The standard deviation of an average of independent numbers, in units of theirs."""
    return math.sqrt((1 - momentum) / (1 + momentum))


class OneBitAdam(torch.optim.Optimizer):
    """1-bit Adam (Tang et al. 2021): Adam for which ranks exchange the momentum.

    In the first ``freeze_step`` steps, the hook's warm-up, this is `torch.optim.AdamW`, to the bit,
    on the mean that the hook delivers: with ``warmup="exact"``, the default, that of the gradients
    as they are (`gradferry.attach` says how it is rounded). With another ``warmup``, such as
    ``"q8"``, it learns the variance from what arrives. Then the variance is
    frozen, the momentum moves into the hook's residual, and the hook delivers the compressed
    momentum in ``.grad``. Any codec may compress it, during the backward pass. The optimizer frees
    its momentum.

    The hook must be attached with ``momentum=betas[0]`` and ``warmup_steps=freeze_step``:

    >>> state = gradferry.attach(ddp, "sign1", momentum=0.9, warmup_steps=100)
    >>> optimizer = OneBitAdam(ddp.parameters(), lr=1e-3, freeze_step=100, state=state)

    There must be one synced backward pass per step (accumulate under ``no_sync()``). Freeze when
    the variance has settled: after the learning rate's warm-up, at 15 to 20 % of the steps. With a
    hook that passes gradients through, this stays AdamW.

    Every rank hands over its share of every momentum. So the optimizers of all ranks must hold the
    same parameters, and no ``ZeroRedundancyOptimizer`` may shard them. Ranks compare in the first
    backward pass and in the first one after the freeze; if they differ, all raise `StateError`.

    Args:
        params: parameters that the hook's model reduces, or groups of them.
        lr: learning rate.
        betas: decay of momentum and variance; ``betas[0]`` must be the same in all groups.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient, as in AdamW.
        freeze_step: number of warm-up steps, at least 1.
        state: of the hook, bound.
        variance_floor: in 0..1. At the freeze, variances below this share of their parameter's mean
            variance are raised to it. A codec gives a momentum even to elements with almost no
            gradient, such as those of an inactive unit, and a tiny variance would make their
            updates huge. 0: no floor, as published.

    Raises:
        ConfigError: the hook has another momentum or warm-up, does not reduce a parameter, state is
            no HookState, or variance_floor is not in 0..1.
        StateError: the state is not bound. ``step()`` of a copy, which has no hook, raises it, too.
    """

    takes_momentum = True  # gradferry.averaging.advice reads it
    _kept: DeliveredMomentum | None = None  # of the hook; torch copies and pickles numbers alone

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
        state: HookState,
        variance_floor: float = 0.01,
    ) -> None:
        bound = bound_to(state)
        self._kept = DeliveredMomentum(bound.running, bound.handover)
        warmup_steps = self._hook.config.warmup_steps
        self._freeze_step = freeze_step
        self._last_step: int | None = None  # of the hook
        if warmup_steps != freeze_step or freeze_step < 1:
            raise ConfigError(
                f"freeze_step={freeze_step} and the hook's warmup_steps={warmup_steps} must be the "
                "same number, at least 1: attach with warmup_steps=freeze_step"
            )
        if not 0 <= variance_floor <= 1:
            raise ConfigError(f"variance_floor={variance_floor} must be from 0 to 1")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "variance_floor": variance_floor,
            },
        )

    @property
    def _hook(self) -> DeliveredMomentum:
        if self._kept is None:
            raise StateError(
                "a copied or pickled OneBitAdam has no hook, and its parameters are copies: attach "
                "to their model, make a new OneBitAdam of them with state=, and give it this one's "
                "state_dict()"
            )
        return self._kept

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Does what `torch.optim.Optimizer` does, and raises ConfigError as the class does."""
        momentum = self._hook.config.momentum
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if momentum != group["betas"][0]:
            raise ConfigError(
                f"betas[0]={group['betas'][0]} and the hook's momentum={momentum or None} must be "
                "the same number: attach with momentum=betas[0]"
            )
        for index, parameter in enumerate(group["params"]):
            if not self._hook.covers(parameter):
                raise ConfigError(
                    f"parameter {index} of the last group, of shape {tuple(parameter.shape)}, is "
                    "none that the hook reduces; pass the parameters of the attached model"
                )
        self._hook.hold(group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step. The closure, if given, runs the backward pass.

        Raises:
            StateError: there was not exactly one synced backward pass since the last step, or a
                parameter without variance gets its first gradient after the freeze.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        now = self._hook.current_step()
        passes_through = now is None
        step = 0 if now is None else self._count(now)
        dense = passes_through or step < self._freeze_step
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if dense:
                    self._dense_step(parameter, group)
                    if not passes_through and step + 1 == self._freeze_step:
                        self._freeze(parameter, group, delay=0)
                else:
                    self._frozen_step(parameter, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does what `torch.optim.Optimizer` does; also load the hook's state of that step."""
        super().load_state_dict(state_dict)
        self._last_step = None

    def _count(self, step: int) -> int:
        passes = None if self._last_step is None else step - self._last_step
        skips = self._hook.config.grad_scaler is not None  # the scaler may skip whole steps
        if passes is not None and (passes < 1 or (passes > 1 and not skips)):
            raise StateError(
                f"{passes} synced backward passes since the last step of OneBitAdam, instead of "
                "one: every synced pass moves the momentum on; accumulate under no_sync()"
            )
        self._last_step = step
        return step

    def _dense_step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient.conj(), value=1 - beta2)
        self._update(parameter, group, state["exp_avg"], self._denominator(parameter, group))

    def _frozen_step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = parameter.grad
        assert momentum is not None
        state = self.state[parameter]
        if not state:
            raise StateError(
                f"a parameter of shape {tuple(parameter.shape)} gets its first gradient after the "
                f"variance was frozen at step {self._freeze_step}; let every parameter take part "
                "before"
            )
        if "exp_avg" in state:
            # A GradScaler skipped the step at which the momentum should have moved: it moves now.
            momentum.add_(state["exp_avg"], alpha=group["betas"][0])
            self._freeze(parameter, group, delay=1)
        state["step"] += 1
        self._update(parameter, group, momentum, state["denominator"])

    def _freeze(self, parameter: torch.Tensor, group: dict[str, Any], *, delay: int) -> None:
        """Floors the variance, replaces it by the final denominator of updates, and moves the
        momentum into the residual, decayed for `delay` + 1 steps.
        """
        state = self.state[parameter]
        # Complex numbers have no order, but a complex variance has no imaginary part. The mean is
        # fp64, so that ranks whose processors sum in another order round to the same floor.
        square = state["exp_avg_sq"]
        variance = square.real if square.is_complex() else square
        mean = float(variance.mean(dtype=torch.float64))
        variance.clamp_(min=group["variance_floor"] * mean)
        state["denominator"] = self._denominator(parameter, group)
        del state["exp_avg_sq"]
        self._hook.hand_over(parameter, state.pop("exp_avg"), group["betas"][0] ** (delay + 1))

    def _denominator(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """AdamW's denominator, with bias correction: a variance that is frozen after n steps would
        be too small by the factor 1 - beta2^n without it.
        """
        state, (_, beta2) = self.state[parameter], group["betas"]
        correction = 1 - beta2 ** int(state["step"])
        deviation: torch.Tensor = state["exp_avg_sq"].sqrt() / correction**0.5
        return deviation.add_(group["eps"])

    def _update(
        self,
        parameter: torch.Tensor,
        group: dict[str, Any],
        momentum: torch.Tensor,
        denominator: torch.Tensor,
    ) -> None:
        """One update of AdamW: weight decay, then a step along the bias-corrected momentum."""
        rate = float(group["lr"])
        if group["weight_decay"] != 0:
            parameter.mul_(1 - rate * group["weight_decay"])
        step_size = rate / (1 - group["betas"][0] ** int(self.state[parameter]["step"]))
        parameter.addcdiv_(momentum, denominator, value=-step_size)
