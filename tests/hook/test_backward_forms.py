"""Ways in which a backward pass reaches DDP: what arrives is what the reference makes of the
gradients that the same pass leaves in the bare module.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from reference import Parameter, ReferenceEngine
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from world import World

STEPS = 3
# Of layers; a weight has 1056 elements, just enough to be compressed.
INPUTS, OUTPUTS = 33, 32


class Layers(nn.Module):
    """Layers with something curved between them, each under a checkpoint if there are such."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.Tanh(), nn.Linear(OUTPUTS, INPUTS))
            for _ in range(3)
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x)
            else:
                # The layer's parameters are no arguments: their gradients come in the backward pass
                # inside the backward pass.
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


def plain(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def gradient_penalty(model: nn.Module, x: torch.Tensor) -> None:
    y = model(x).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    (y + slope.square().sum()).backward()


def penalty_of_weights(model: nn.Module, x: torch.Tensor) -> None:
    y = model(x).square().sum()
    slopes = torch.autograd.grad(y, list(model.parameters()), create_graph=True)
    (y + sum(slope.square().sum() for slope in slopes)).backward()


WAYS = {
    "gradient_penalty": (gradient_penalty, None, {}),
    "penalty_of_weights": (penalty_of_weights, None, {}),
    "penalty_into_views": (gradient_penalty, None, {"gradient_as_bucket_view": True}),
    "reentrant": (plain, True, {}),
    "reentrant_in_a_static_graph": (plain, True, {"static_graph": True}),
    "not_reentrant": (plain, False, {}),
    "not_reentrant_in_a_static_graph": (plain, False, {"static_graph": True}),
}


def flat_gradients(model: nn.Module) -> list[np.ndarray]:
    return [p.grad.detach().reshape(-1).numpy().copy() for p in model.parameters()]


Steps = list[tuple[list[np.ndarray], list[np.ndarray]]]


def case_backward(native: bool) -> dict[str, Steps]:
    """By way, of every step: this rank's own gradients, and what arrived."""
    return {way: steps_in(way, native) for way in WAYS}


def steps_in(way: str, native: bool) -> Steps:
    import gradferry

    backward, use_reentrant, options = WAYS[way]
    torch.manual_seed(1)
    model = Layers(use_reentrant)
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, **options)
    if native:
        gradferry.attach(ddp, "q4", error_feedback="both")
    else:
        state = gradferry.HookState("q4", ddp, error_feedback="both")
        ddp.register_comm_hook(state, gradferry.hook)
    torch.manual_seed(2 + torch.distributed.get_rank())
    steps = []
    for _ in range(STEPS):
        x = torch.randn(4, INPUTS)
        for module in (alone, ddp):
            module.zero_grad()
            backward(module, x.clone().requires_grad_())
        steps.append((flat_gradients(alone), flat_gradients(model)))
    return steps


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_gradients_equal_reference(world_of_2: World, native: bool) -> None:
    answers = world_of_2.run(case_backward, native=native)
    for way in WAYS:
        check(way, [answer[way] for answer in answers])


def check(way: str, answers: list[Steps]) -> None:
    parameters = [
        Parameter(name, p.numel(), ndim=p.dim()) for name, p in Layers().named_parameters()
    ]
    engine = ReferenceEngine(2, parameters, "q4", "both")
    for step in range(STEPS):
        expected = engine.step([answer[step][0] for answer in answers])
        for rank, answer in enumerate(answers):
            for parameter, got, want in zip(
                parameters, answer[step][1], expected[rank], strict=True
            ):
                assert got.tobytes() == want.tobytes(), (way, step, rank, parameter.name)
        assert any(np.abs(g).max() > 0 for g in answers[0][step][1])
