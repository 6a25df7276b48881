"""Every form of forward and backward pass, hooks that pass through, and join(). With `exact` models
train to the bit as with plain DDP.

With two ranks, (a + b) / 2 is what plain DDP computes as a / 2 + b / 2: halving is exact, and a sum
of two does not depend on order.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from products import rows
from scenario import Run, Scenario, Weight, assert_bit_equal, hooked
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from world import World

# --- every form of forward and backward pass ------------------------------------------------------

SIDE = 33


class Layers(nn.Module):
    """Layers with something curved between them, each under a checkpoint if there are such."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE)) for _ in range(3)
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, last = self.layers
        x = self._through(first, x)
        torch._dynamo.graph_break()
        x = self._through(second, x)
        torch._dynamo.graph_break()
        return self._through(last, x)

    def _through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return layer(x)
        # The layer's parameters are no arguments: their gradients come in the backward pass inside
        # the backward pass.
        return checkpoint(layer, x, use_reentrant=self.use_reentrant)


def plain(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def of_parameters_alone(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward(inputs=[*model.parameters()])


def gradient_penalty(model: nn.Module, x: torch.Tensor) -> None:
    y = model(x).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    (y + slope.square().sum()).backward()


def cleared(parameter: nn.Parameter) -> None:
    parameter.grad.zero_()


def with_hooks(change: Callable[[nn.Parameter], object]) -> Callable[[nn.Module, Any], None]:
    """On each gradient, when it has been accumulated."""

    def backward(model: nn.Module, x: torch.Tensor) -> None:
        hooks = [p.register_post_accumulate_grad_hook(change) for p in model.parameters()]
        plain(model, x)
        for hook in hooks:
            hook.remove()

    return backward


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager")


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@dataclasses.dataclass
class Way:
    backward: Callable[[nn.Module, Any], None] = plain
    use_reentrant: bool | None = None
    options: dict[str, bool] = dataclasses.field(default_factory=dict)  # of DDP
    before: Callable[[nn.Module], nn.Module] = lambda module: module  # what DDP gets
    after: Callable[[nn.Module], nn.Module] = lambda module: module  # what is called


STATIC, VIEWS = {"static_graph": True}, {"gradient_as_bucket_view": True}
WAYS = {
    "inputs=": Way(of_parameters_alone),
    "gradient penalty": Way(gradient_penalty),
    "penalty into views": Way(gradient_penalty, options=VIEWS),
    "reentrant": Way(use_reentrant=True),
    "reentrant in a static graph": Way(use_reentrant=True, options=STATIC),
    "not reentrant": Way(use_reentrant=False),
    "not reentrant in a static graph": Way(use_reentrant=False, options=STATIC),
    "None in a hook": Way(with_hooks(lambda p: setattr(p, "grad", None))),
    "zero_() in a hook": Way(with_hooks(cleared)),
    "compiled before DDP": Way(before=compiled),
    "compiled after DDP": Way(after=compiled),
    "compiled in place before DDP": Way(before=compiled_in_place),
    "compiled in place after DDP": Way(after=compiled_in_place),
}


@pytest.mark.parametrize(("way", "native"), rows(list(WAYS), (True, False)))
@on_ranks()
def test_every_form_of_a_pass_leaves_the_gradients_of_plain_ddp(way: str, native: bool) -> None:
    how = WAYS[way]
    torch._dynamo.reset()
    counters.clear()
    model = Layers(how.use_reentrant)
    # torch.compile cuts its graphs at buckets, of which the first must be the smallest.
    options = {"bucket_cap_mb": 25 if "compiled" in way else 0.01, **how.options}
    bare = DistributedDataParallel(copy.deepcopy(model), **options)
    ddp = DistributedDataParallel(how.before(model), **options)
    state = hooked(ddp, "exact", native=native)
    called = how.after(ddp)
    generator = torch.Generator().manual_seed(2 + dist.get_rank())
    for step in range(3):
        x = torch.randn(4, SIDE, generator=generator)
        for each in bare, called:
            each.zero_grad()
            how.backward(each, x.clone().requires_grad_())
        for one, other in zip(bare.parameters(), ddp.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad), step
    assert state.stats()["steps"] == 3
    assert (counters["stats"]["unique_graphs"] >= 3) == ("compiled" in way)
    torch._dynamo.reset()


# --- without an engine, and by hand --------------------------------------------------------------


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize(
    ("codec", "environment", "why"),
    [
        ("q4", {"GRADFERRY_DISABLE": "1"}, "GRADFERRY_DISABLE=1"),
        ("auto", {"GRADFERRY_DISABLE": "1"}, "GRADFERRY_DISABLE=1"),
        ("off", {}, "codec 'off'"),
    ],
    ids=["disabled", "auto disabled", "off"],
)
@on_ranks()
def test_hook_that_passes_through_gives_what_plain_ddp_gives(
    codec: str, environment: dict[str, str], why: str, native: bool
) -> None:
    """On the same buckets."""
    scenario = Scenario(WEIGHTS, native=native, codec=codec, ddp={"bucket_cap_mb": 0.02})
    with mock.patch.dict(os.environ, environment):
        run = Run(scenario)
    with mock.patch("scenario.attach"):
        plain = Run(scenario)
    for step in range(scenario.steps):
        for one, other in zip(run.step(step), plain.step(step), strict=True):
            assert one.tobytes() == other.tobytes()
    stats = run.state.stats()
    assert stats["wire_bytes"] == 0 or not environment
    if codec == "auto":
        assert stats["choice"] == {"codec": "off", "exchange": "flat", "reason": why}
    assert f"passes through ({why})" in str(run.state)


WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("wide", (3, 4099)))


# --- join() --------------------------------------------------------------------------------------

TWO = Scenario((Weight("first", (40, 40)), Weight("second", (50, 30))), error_feedback="both")


def case_thrown(scenario: Scenario) -> tuple[Outcome, dict[str, Any]]:
    """All ranks leave join() when the first has no more input, and go on together."""
    run, gradients = Run(scenario), []

    def until_the_end() -> None:
        with run.ddp.join(throw_on_early_termination=True):
            for step in range(2 + run.rank):
                gradients.append(run.step(step))

    outcome = attempt(until_the_end)
    gradients += [run.step(step) for step in range(2, scenario.steps)]
    return outcome, run.answer(gradients)


@pytest.mark.parametrize("passes", [1, 2])
def test_training_goes_on_after_an_early_termination(world_of_2: World, passes: int) -> None:
    scenario = dataclasses.replace(TWO, passes=passes)
    (ended, one), (told, other) = world_of_2.run(case_thrown, scenario=scenario)
    assert ended.error == told.error == "RuntimeError"
    assert ended.text.startswith("Rank 0 exhausted all inputs")
    assert told.text.startswith("Detected at least one rank that exhausted inputs")
    assert_bit_equal([one, other], scenario)
