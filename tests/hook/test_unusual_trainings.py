"""Trainings whose steps are not one plain pass each: several, in every form of autograd, uneven
under join(), or with gradients that no number holds.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from reference import Parameter, ReferenceEngine
from scenario import (
    ChosenGradients,
    Run,
    Scenario,
    Weight,
    assert_all_bit_equal,
    assert_bit_equal,
    hooked,
    train_all,
)
from stepping import bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from world import World

Attach = Callable[[nn.Module], DistributedDataParallel]


def layers(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, outputs))


def batches() -> torch.Generator:
    return torch.Generator().manual_seed(7 + dist.get_rank())


def mean_loss(ddp: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (ddp(inputs) - inputs.sin()).square().mean()


def quasi_newton(attach: Attach) -> list[nn.Module]:
    """LBFGS, which runs several passes per step. All ranks see one loss, and so as many passes."""
    ddp, random = attach(layers(40)), batches()
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=4)
    inputs = torch.randn(8, 40, generator=random)

    def closure() -> float:
        optimizer.zero_grad()
        loss = mean_loss(ddp, inputs)
        loss.backward()
        dist.all_reduce(mean := loss.detach())
        return float(mean)

    for _ in range(3):
        optimizer.step(closure)
    return [ddp]


def adversarial(attach: Attach) -> list[nn.Module]:
    """A GAN, whose discriminator is frozen while the generator's gradients pass through it."""
    generator, judge, random = attach(layers(40)), attach(layers(1)), batches()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, judge)]
    for _ in range(4):
        real, noise = torch.randn(2, 8, 40, generator=random)
        judge.requires_grad_(True)
        judged = judge(torch.cat([real, generator(noise).detach()]))
        (judged[8:].mean() - judged[:8].mean()).backward()
        optimizers[1].step()
        judge.requires_grad_(False)
        (-judge(generator(noise)).mean()).backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [generator, judge]


def case_trained(train: Callable[[Attach], list[nn.Module]], codec: str | None) -> list[bytes]:
    def attach(model: nn.Module) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model)
        if codec is not None:
            hooked(ddp, codec)
        return ddp

    torch.manual_seed(3)
    models = train(attach)
    assert all(p.isfinite().all() for model in models for p in model.parameters())
    return [each for model in models for each in bits(model.parameters())]


@pytest.mark.parametrize("train", [quasi_newton, adversarial])
def test_several_passes_per_step_train_as_without_gradferry(
    world_of_2: World, train: Callable[[Attach], list[nn.Module]]
) -> None:
    # The mean of two numbers has one rounding, wherever they are halved.
    plain = world_of_2.run(case_trained, train=train, codec=None)
    assert world_of_2.run(case_trained, train=train, codec="exact") == plain
    one, other = world_of_2.run(case_trained, train=train, codec="q4")
    assert one == other
    assert one != plain[0]


# bf16 and E4M3
SCALE_ROUNDING = {"exact": 0.0, "q8": 2.0**-9, "sign1": 2.0**-9, "q4": 2.0**-4}


@pytest.mark.parametrize("codec", SCALE_ROUNDING)
@on_ranks()
def test_sums_beyond_fp16_have_a_finite_mean(codec: str) -> None:
    """Gradients of 40000 per element on both ranks in fp16, which ends at 65504."""
    ddp = DistributedDataParallel(nn.Linear(64, 64, bias=False, dtype=torch.float16))
    hooked(ddp, codec)
    (ddp(torch.eye(64, dtype=torch.float16)).sum() * 40000).backward()
    # 40000 = 625 * 2^6 is an fp16 number. A codec returns the largest magnitude of a block, but for
    # the rounding of its scale, once in each of two encodings, and of the result: 2^4.
    tolerance = 2 * SCALE_ROUNDING[codec] * 40000 + 2**4
    assert (ddp.module.weight.grad.double() - 40000).abs().max() <= tolerance


STEPS = 3
# Layers' sides; a weight has 1056 elements, just enough to be compressed.
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
    backward, use_reentrant, options = WAYS[way]
    torch.manual_seed(1)
    model = Layers(use_reentrant)
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, **options)
    hooked(ddp, "q4", native=native, error_feedback="both")
    torch.manual_seed(2 + dist.get_rank())
    steps = []
    for _ in range(STEPS):
        x = torch.randn(4, INPUTS)
        for module in (alone, ddp):
            module.zero_grad()
            backward(module, x.clone().requires_grad_())
        steps.append((flat_gradients(alone), flat_gradients(model)))
    return steps


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_gradients_equal_reference_in_every_form_of_backward(
    world_of_2: World, native: bool
) -> None:
    """What arrives is what the reference makes of the gradients that the same pass leaves in the
    bare module.
    """
    answers = world_of_2.run(case_backward, native=native)
    parameters = [Parameter(n, p.numel(), ndim=p.dim()) for n, p in Layers().named_parameters()]
    for way in WAYS:
        engine = ReferenceEngine(2, parameters, "q4", "both")
        for step in range(STEPS):
            expected = engine.step([answer[way][step][0] for answer in answers])
            for rank, answer in enumerate(answers):
                arrived = answer[way][step][1]
                for parameter, got, want in zip(parameters, arrived, expected[rank], strict=True):
                    assert got.tobytes() == want.tobytes(), (way, step, rank, parameter.name)
            assert any(np.abs(g).max() > 0 for g in answers[0][way][step][1])


SCENARIO = Scenario((Weight("first", (40, 40)),))


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_join_over_the_effective_world_size_is_refused(native: bool) -> None:
    ddp = DistributedDataParallel(ChosenGradients(SCENARIO))
    hooked(ddp, native=native)

    def never() -> None:
        with ddp.join(divide_by_initial_world_size=False):
            raise AssertionError("join() was entered")

    outcome = attempt(never)
    assert outcome.error == "ConfigError", outcome
    assert "divide_by_initial_world_size" in outcome.text


UNEVEN = Scenario(
    (Weight("first", (40, 40)), Weight("second", (50, 30))),
    error_feedback="both",
    passes=2,
    steps_by_rank=(5, 3),
    ddp={"bucket_cap_mb": 0.005},
)


def test_uneven_inputs_accumulated_under_no_sync_equal_the_reference(world_of_2: World) -> None:
    scenarios = [UNEVEN, dataclasses.replace(UNEVEN, native=False)]
    assert_all_bit_equal(world_of_2.run(train_all, scenarios=scenarios), scenarios)


def case_thrown(scenarios: list[Scenario]) -> list[tuple[Outcome, dict[str, Any]]]:
    return [thrown(scenario) for scenario in scenarios]


def thrown(scenario: Scenario) -> tuple[Outcome, dict[str, Any]]:
    """All ranks leave join() when the first has no more input, and go on together."""
    run, gradients = Run(scenario), []

    def until_the_end() -> None:
        with run.ddp.join(throw_on_early_termination=True):
            for step in range(3 + run.rank):
                gradients.append(run.step(step))

    outcome = attempt(until_the_end)
    gradients += [run.step(step) for step in range(3, scenario.steps)]
    return outcome, run.answer(gradients)


def test_training_goes_on_after_an_early_termination(world_of_2: World) -> None:
    scenarios = [
        dataclasses.replace(UNEVEN, passes=passes, steps_by_rank=None, steps=5) for passes in (1, 2)
    ]
    first, second = world_of_2.run(case_thrown, scenarios=scenarios)
    for scenario, (ended, one), (told, other) in zip(scenarios, first, second, strict=True):
        assert ended.error == told.error == "RuntimeError"
        assert ended.text.startswith("Rank 0 exhausted all inputs")
        assert told.text.startswith("Detected at least one rank that exhausted inputs")
        assert_bit_equal([one, other], scenario)


@on_ranks()
def test_copies_of_a_model_join_by_themselves() -> None:
    ddp = DistributedDataParallel(ChosenGradients(SCENARIO))
    hooked(ddp)
    ones = {"first": torch.ones(40, 40)}
    for other in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp)), ddp):
        with other.join():
            other(ones).backward()
        assert other.join_hook().ddp is other
