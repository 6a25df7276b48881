"""However `.grad` is emptied, taken or put back between steps: the hook averages as plain DDP does.

With two ranks and `exact`, (a + b) / 2 is what plain DDP computes as a / 2 + b / 2: halving is
exact, and a sum of two does not depend on order.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from scenario import hooked
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 2
# Sides of layers; a weight has 1056 elements, just enough to be compressed.
INPUTS, OUTPUTS = 33, 32


def given(parameters: nn.ParameterList, gradients: Iterable[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def detached_in_place(parameters: nn.ParameterList) -> None:
    """zero_grad() once did this. DDP's views of its buckets do not allow it."""
    for parameter in parameters:
        parameter.grad.detach_()
        parameter.grad.zero_()


def swapped(parameters: nn.ParameterList) -> None:
    """For another tensor; what was there gets other values."""
    before = [parameter.grad for parameter in parameters]
    given(parameters, [torch.zeros_like(gradient) for gradient in before])
    for gradient in before:
        gradient.fill_(math.nan)


def copied_away_and_back(parameters: nn.ParameterList) -> None:
    kept = [parameter.grad.clone() for parameter in parameters]
    given(parameters, [None] * len(kept))
    given(parameters, kept)


def cleared(parameter: nn.Parameter) -> None:
    parameter.grad.zero_()


@dataclasses.dataclass(frozen=True)
class Way:
    """What is done with `.grad`.

    before: each forward pass.
    hook: on each gradient, when it has been accumulated.
    resets: nothing of the step before is left.
    """

    before: Callable[[nn.ParameterList], object] = lambda _: None
    hook: Callable[[nn.Parameter], object] | None = None
    backward: Callable[[torch.Tensor, nn.ParameterList], object] = lambda loss, _: loss.backward()
    resets: bool = True


def of_module_alone(parameters: nn.ParameterList) -> None:
    """By torch.autograd.grad, with which DDP has nothing to do."""
    total = sum((parameter**3).sum() for parameter in parameters)
    given(parameters, torch.autograd.grad(total, list(parameters)))


NONE = Way(lambda ps: given(ps, [None] * len(ps)))
WAYS = {
    "zero_grad()": Way(lambda ps: torch.optim.SGD(ps).zero_grad()),
    "zero_grad(set_to_none=False)": Way(lambda ps: ps.zero_grad(set_to_none=False)),
    ".grad = None": NONE,
    "del .grad": Way(lambda ps: [delattr(p, "grad") for p in ps]),
    ".grad.zero_()": Way(lambda ps: [p.grad.zero_() for p in ps]),
    ".grad.data.zero_()": Way(lambda ps: [p.grad.data.zero_() for p in ps]),
    "torch._foreach_zero_": Way(lambda ps: torch._foreach_zero_([p.grad for p in ps])),
    ".grad = zeros_like": Way(lambda ps: given(ps, map(torch.zeros_like, ps))),
    ".grad.detach_()": Way(detached_in_place),
    ".grad = .grad.detach() * 0": Way(lambda ps: given(ps, [p.grad.detach() * 0 for p in ps])),
    "swapped": Way(swapped),
    "copied away and back": Way(copied_away_and_back, resets=False),
    "kept": Way(resets=False),
    "None in a hook": Way(hook=lambda p: setattr(p, "grad", None), resets=False),
    "zero_() in a hook": Way(hook=cleared, resets=False),
    "backward(inputs=)": dataclasses.replace(
        NONE, backward=lambda loss, ps: loss.backward(inputs=[*ps])
    ),
    "torch.autograd.grad": Way(of_module_alone, resets=False),
}


class Model:
    """A DDP model, attached or not, that takes steps."""

    def __init__(self, module: nn.Module, views: bool, codec: str | None, native: bool) -> None:
        module = copy.deepcopy(module)
        self.parameters = nn.ParameterList(module.parameters())
        self.ddp = DistributedDataParallel(
            module, bucket_cap_mb=0.005, gradient_as_bucket_view=views
        )
        if codec is not None:
            hooked(self.ddp, codec, native=native, error_feedback="both")

    def step(self, way: Way, x: torch.Tensor) -> list[torch.Tensor | None] | str:
        """Gradients after the step, or what `before` raised."""
        try:
            way.before(self.parameters)
        except RuntimeError as error:
            return str(error)
        hooks = [
            parameter.register_post_accumulate_grad_hook(way.hook)
            for parameter in self.parameters
            if way.hook is not None
        ]
        way.backward(self.ddp(x).square().sum(), self.parameters)
        for each in hooks:
            each.remove()
        return [p.grad if p.grad is None else p.grad.clone() for p in self.parameters]


def same(one: list[torch.Tensor | None] | str, other: list[torch.Tensor | None] | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


def differences(views: bool, native: bool) -> Iterator[str]:
    """Ways in which `exact` differs from plain DDP, or `q4` from `q4` behind `.grad = None`."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Tanh(), nn.Linear(OUTPUTS, INPUTS))
    plain, exact, lossy, straight = (
        Model(module, views, codec, native) for codec in (None, "exact", "q4", "q4")
    )
    torch.manual_seed(2 + dist.get_rank())
    for name, way in {"first": NONE, **WAYS}.items():
        for _ in range(STEPS):
            x = torch.randn(4, INPUTS)
            expected = plain.step(way, x)
            if not same(exact.step(way, x), expected):
                yield f"exact, {name}"
            if way.resets and not isinstance(expected, str):
                assert all(gradient.any() for gradient in expected)
                if not same(lossy.step(way, x), straight.step(NONE, x)):
                    yield f"q4, {name}"


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_gradients_are_those_of_plain_ddp_however_grad_was_reset(native: bool, views: bool) -> None:
    """In each way in which DDP keeps gradients and knows the hook."""
    assert list(differences(views, native)) == []
