"""Optimizers for gradients that arrive as momentum."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import ParamsT

from gradferry.ddp.state import HookState, momentum_of
from gradferry.errors import ConfigError, StateError
from gradferry.reduction.averaging import Averaging, delivered_momentum
from gradferry.reduction.momentum import DeliveredMomentum

__all__ = ["OneBitAdam", "momentum_mode"]

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
_log = logging.getLogger("gradferry")


def momentum_mode(optimizer: OptimizerT, state: Averaging) -> OptimizerT:
    """Makes an optimizer, set up as without gradferry, one for gradients that are momentum already.

    Call this once, after `attach`, before the first step and before a schedule of learning rates
    is made. Codecs below 3 bits so need no dense steps and no optimizer of their own:

    >>> state = gradferry.attach(ddp, "sign1", momentum=0.8)
    >>> optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    >>> gradferry.optim.momentum_mode(optimizer, state)

    * **AdamW and Adam**: ``betas[0]`` becomes 0, and the learning rate ``sqrt((1 - m) / (1 + m))``
      times what it was, 0.33 for m = 0.8 and 0.23 for 0.9; AdamW's ``weight_decay``, which acts
      through the rate, is divided by as much. Behind ``topk``, which keeps less of the momentum,
      m and with it the factor are those of what arrives; a group whose parameters arrive with
      several m is divided. With ``codec="auto"`` m is that of codecs that send every element.
    * **SGD**: its own momentum goes, and the learning rate becomes
      ``lr * (1 - dampening) / (1 - momentum)`` with its own: as much of every gradient is applied
      in all.

    Why the factor: what arrives is the average m * average + (1 - m) * gradient, whose mean is the
    gradient's and whose noise has (1 - m) / (1 + m) of its variance. Adam divides by the root of
    that, so that without the factor it would go that much too far. With it parameters drift and
    scatter, where noise prevails, as at the rate that was tuned; where signal prevails steps are
    shorter, by that factor at most.

    Why it bears coarse compression: an average changes little from step to step, so that error
    feedback has made up for what was withheld while it still counts (1-bit Adam: Tang et al. 2021;
    EF21-SGDM: Fatkhullin et al. 2023). And Adam squares after averaging and compressing, so that
    what compression adds is in its variance, element by element: with ``betas[1]=0`` this would be
    Signum (Bernstein et al. 2018). `OneBitAdam` squares gradients, as Adam does, and therefore has
    to do so before compression begins.

    Where a hook passes gradients through (``GRADFERRY_DISABLE=1``) the optimizer is left as it is.
    An optimizer class of your own that expects momentum says so with ``takes_momentum = True``, so
    that the hook does not warn of it.

    Args:
        optimizer: a `torch.optim` AdamW, Adam or SGD, all groups of which are changed.
        state: of the hook, in momentum mode: a bound HookState, what `gradferry.fsdp.attach`
            returned, or a Reducer of the model's parameters.

    Returns:
        The same optimizer.

    Raises:
        ConfigError: the hook has no momentum, or warm-up steps, and the optimizer is SGD; the
            optimizer is another, was changed before, has a schedule already, or holds a parameter
            that the hook does not reduce.
        StateError: the state is not bound, or the optimizer has stepped.
    """
    hook = delivered_momentum(state)
    if not hook.config.momentum:
        raise ConfigError(
            "momentum_mode() is for a hook that delivers momentum, and this one delivers gradients;"
            " attach with momentum=, such as 0.9"
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ConfigError(
            "momentum_mode() cannot change the shards of a ZeroRedundancyOptimizer: give what it "
            "would set to ZeroRedundancyOptimizer(...) itself, betas=(0, ...) and lr times "
            f"{_deviation(hook.config.momentum):.3g} for AdamW and Adam (and AdamW's weight_decay "
            "divided by that), without momentum and lr / (1 - momentum) for SGD; "
            "docs/guide/zero.md says it for every codec"
        )
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        raise ConfigError(
            f"momentum_mode() knows AdamW, Adam and SGD, not {type(optimizer).__name__}: take its "
            "own momentum away, and the learning rate times "
            f"{_deviation(hook.config.momentum):.3g} where it divides by a variance"
        )
    if optimizer.state:
        raise StateError(
            f"this {type(optimizer).__name__} has stepped before: call momentum_mode() on a new "
            "one, and load a state that was saved in momentum mode after it"
        )
    if type(optimizer) is torch.optim.SGD and hook.config.warmup_steps:
        raise ConfigError(
            f"warmup_steps={hook.config.warmup_steps}: so long the hook delivers gradients, and "
            "this SGD would have no momentum, at a learning rate for momentum; attach without "
            "warmup_steps, which are for optimizers that learn a variance"
        )
    groups = list(optimizer.param_groups)
    for number, group in enumerate(groups):
        _expect_fresh(number, group, hook)
    if hook.current_step() is None:
        return optimizer
    for group in groups:
        if "betas" in group:
            _average_first(optimizer, group, hook)
        else:
            _give_up_momentum(group, hook)
    return optimizer


def _deviation(momentum: float) -> float:
    """Of an average of independent numbers, in units of theirs."""
    return math.sqrt((1 - momentum) / (1 + momentum))


def _expect_fresh(number: int, group: dict[str, Any], hook: DeliveredMomentum) -> None:
    if "initial_lr" in group:
        raise ConfigError(
            f"group {number} has a schedule of learning rates, which goes on from the old one: "
            "make the schedule after momentum_mode()"
        )
    if group.get("betas", (None,))[0] == 0:
        raise ConfigError(f"group {number} has betas[0]=0: it takes no momentum of its own")
    for index, parameter in enumerate(group["params"]):
        if parameter.requires_grad and not hook.covers(parameter):
            raise ConfigError(
                f"parameter {index} of group {number}, of shape {tuple(parameter.shape)}, is none "
                "that the hook reduces: it needs an optimizer of its own"
            )


def _average_first(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], hook: DeliveredMomentum
) -> None:
    """Divides an Adam's group by the momentum behind which its parameters are."""
    by_momentum: dict[float, list[torch.Tensor]] = {}
    for parameter in group["params"]:
        if parameter.requires_grad:
            by_momentum.setdefault(hook.momentum_of(parameter), []).append(parameter)
    frozen = [parameter for parameter in group["params"] if not parameter.requires_grad]
    settings = {key: value for key, value in group.items() if key != "params"}
    for number, (momentum, parameters) in enumerate(by_momentum.items()):
        factor = _deviation(momentum)
        changed = {**settings, "lr": settings["lr"] * factor, "betas": (0.0, settings["betas"][1])}
        if settings["decoupled_weight_decay"]:
            changed["weight_decay"] = settings["weight_decay"] / factor
        if number == 0:
            group.update(changed, params=parameters + frozen)
        else:
            optimizer.add_param_group({**changed, "params": parameters})
        _log_rate(changed, settings, momentum)


def _give_up_momentum(group: dict[str, Any], hook: DeliveredMomentum) -> None:
    """Of SGD."""
    before = dict(group)
    group["lr"] = before["lr"] * (1 - before["dampening"]) / (1 - before["momentum"])
    group.update(momentum=0, dampening=0, nesterov=False)
    _log_rate(group, before, hook.config.momentum)


def _log_rate(now: dict[str, Any], before: dict[str, Any], momentum: float) -> None:
    rates = now["lr"], before["lr"]
    _log.info("gradients arrive with momentum %g: lr=%g instead of %g", momentum, *rates)


class OneBitAdam(torch.optim.Optimizer):
    """1-bit Adam (Tang et al. 2021): Adam for which ranks exchange the momentum.

    In the first ``freeze_step`` steps, the hook's warm-up, this is `torch.optim.AdamW`: to the bit
    that of an uncompressed training if the hook has ``warmup="exact"``, the default. With another
    ``warmup``, such as ``"q8"``, it learns the variance from what arrives. Then the variance is
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
        StateError: the state is not bound.
    """

    takes_momentum = True  # gradferry.reduction.advice reads it

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
        self._hook = momentum_of(state)
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer.add_param_group`; raises ConfigError as the class does."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        momentum = self._hook.config.momentum
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
        """As `torch.optim.Optimizer.load_state_dict`; also load the hook's state of that step."""
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
        """AdamW's denominator, with bias correction."""
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
