"""Momentum mode: what arrives is the momentum, compressed, on every tile and every rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mixed import COMPLEX, MIXED, MOMENTUM, poisons
from outcomes import Outcome, attempt
from reference import ReferenceEngine
from scenario import Run, Scenario, Weight, assert_bit_equal, expected_gradients, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]

BETA = 0.9
WEIGHTS = (
    Weight("embedding", (70, 64)),
    Weight("just_compressed", (32, 32)),
    Weight("wide", (3, 4099)),
    Weight("bias", (67,)),
)


def scenario_of(codec: str, world_size: int, **changes: Any) -> Scenario:
    common = {"steps": 5, "ddp": {"bucket_cap_mb": 0.05}, "options": {"momentum": BETA}}
    chosen = {"weights": WEIGHTS, "world_size": world_size, "codec": codec, **common, **changes}
    return Scenario(**chosen)


def check(worlds: Worlds, scenario: Scenario) -> list[dict]:
    answers = worlds(scenario.world_size).run(train, scenario=scenario)
    assert_bit_equal(answers, scenario)
    return answers


EVERYTHING = dataclasses.replace(MIXED, weights=(*MIXED.weights, *COMPLEX))
VIEWS = {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": True}
# Later steps show what became of the residuals of every rank.
POISONED = {"world_size": 3, "poison": poisons(3), "steps": 4}


@pytest.mark.torch_core
@pytest.mark.parametrize(
    "scenario",
    [
        *(
            pytest.param(
                dataclasses.replace(EVERYTHING, world_size=size, **MOMENTUM), id=f"{size} ranks"
            )
            for size in (1, 2, 3)
        ),
        pytest.param(
            dataclasses.replace(EVERYTHING, **MOMENTUM, **POISONED), id="not finite, momentum"
        ),
        pytest.param(dataclasses.replace(EVERYTHING, **POISONED), id="not finite"),
        *(
            pytest.param(
                scenario_of("topk:ratio=0.02", 3, error_feedback=feedback, native=False),
                id=f"python, {feedback}",
            )
            for feedback in ("worker", "both")
        ),
        pytest.param(scenario_of("sign1", 2, passes=3, ddp=VIEWS), id="passes"),
        pytest.param(scenario_of("sign1", 2, ddp={**VIEWS, "static_graph": True}), id="static"),
        pytest.param(scenario_of("sign1", 3, steps_by_rank=(5, 7, 4)), id="uneven inputs"),
    ],
)
def test_momentum_equals_reference(worlds: Worlds, scenario: Scenario) -> None:
    check(worlds, scenario)


def test_world_of_one_has_the_moving_average_whatever_the_codec(worlds: Worlds) -> None:
    scenario = scenario_of("sign1", 1)
    gradients = check(worlds, scenario)[0]["gradients"]
    # In fp32, with the constants that the wire format names.
    average = [np.zeros(w.num_elements, np.float32) for w in WEIGHTS]
    alpha, beta = np.float32(1 - BETA), np.float32(BETA)
    for step in range(scenario.steps):
        for index in range(len(WEIGHTS)):
            g = scenario.gradient(step, 0, 0, index)
            average[index] = alpha * g + beta * average[index]
            assert (gradients[step][index] == average[index]).all()


def case_residual_around_a_poisoned_step(scenario: Scenario) -> list[torch.Tensor]:
    """The worker residual before and after the poisoned step 3."""
    run = Run(scenario)
    for step in range(3):
        run.step(step)
    slot = f"slot_{run.rank}"
    before = run.state.state_dict()[slot]["worker"]
    run.step(3)
    return [before, run.state.state_dict()[slot]["worker"]]


@pytest.mark.parametrize("momentum", [None, BETA])
def test_undone_residual_is_what_it_was_before_the_step(
    worlds: Worlds, momentum: float | None
) -> None:
    weights = (Weight("only", (64, 64)),)  # one tile, one unit of topk
    scenario = Scenario(
        weights,
        3,
        codec="topk:ratio=0.05",
        error_feedback="both",
        steps=4,
        poison={(3, 1, "only"): math.nan},
        options={"momentum": momentum},
    )
    for before, after in worlds(3).run(case_residual_around_a_poisoned_step, scenario=scenario):
        assert before.abs().max() > 0.5
        # Three roundings of values below 64: v - D(p), D(p) - alpha g, and their sum.
        assert before.abs().max() < 32
        assert (before - after).abs().max() <= 3 * 64 * 2.0**-24


def test_warmup_gives_plain_averages_and_then_momentum_from_zero(worlds: Worlds) -> None:
    scenario = scenario_of("sign1", 2, options={"momentum": BETA, "warmup_steps": 2})
    plain = dataclasses.replace(scenario, codec="exact", options={})
    engine = ReferenceEngine(2, [w.describe() for w in WEIGHTS], "sign1", "auto", momentum=BETA)
    count = range(len(WEIGHTS))
    expected = expected_gradients(plain)[:2] + [
        engine.step([[scenario.accumulated(s, r, i) for i in count] for r in range(2)])
        for s in range(2, 5)
    ]
    for rank, answer in enumerate(worlds(2).run(train, scenario=scenario)):
        for step, gradients in enumerate(answer["gradients"]):
            for got, want in zip(gradients, expected[step][rank], strict=True):
                assert got.tobytes() == want.tobytes(), step


def case_sgd(momentum_from_hook: bool) -> list[torch.Tensor]:
    """Parameters after 20 steps of SGD with momentum 1/2, from the hook or from the optimizer."""
    import gradferry

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 1))
    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, "exact", momentum=0.5 if momentum_from_hook else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0**-6, momentum=0.5)
    if momentum_from_hook:
        gradferry.optim.momentum_mode(optimizer, state)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(16, 20, generator=generator)
        optimizer.zero_grad()
        (ddp(x) - x[:, :1].sin()).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_sgd_without_momentum_of_its_own_equals_sgd_with_momentum(worlds: Worlds) -> None:
    # Halves and doubles commute with rounding, and equal gradients have an exact mean.
    hooked = worlds(2).run(case_sgd, momentum_from_hook=True)
    plain = worlds(2).run(case_sgd, momentum_from_hook=False)
    for one, other in zip(hooked, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


REFUSED: list[tuple[dict[str, Any], dict[str, Any], bool, str]] = [
    ({"momentum": 1.0}, {}, False, "momentum=1.0 must be a number between 0 and 1"),
    ({"momentum": 0.0}, {}, False, "leave it out"),
    ({"momentum": "0.9"}, {}, False, "momentum='0.9' must be a number"),
    ({"momentum": 0.9, "codec": "off"}, {}, False, "'off' passes gradients through"),
    ({"momentum": 0.9, "error_feedback": "owner"}, {}, False, "lives in the worker residual"),
    ({"momentum": 0.9, "error_feedback": "none"}, {}, False, "lives in the worker residual"),
    ({"momentum": 0.9}, {"find_unused_parameters": True}, False, "make every parameter take"),
    ({"momentum": 0.9}, {}, True, "sparse gradients, which 'table' has"),
    ({"grad_scaler": 2.0}, {}, False, "must be a torch.amp.GradScaler, not float"),
]


def case_refused() -> list[Outcome]:
    import gradferry

    outcomes = []
    for arguments, ddp_options, sparse, _ in REFUSED:
        layers = nn.ModuleDict({"table": nn.Embedding(40, 40, sparse=sparse)})
        ddp = DistributedDataParallel(layers, **ddp_options)
        outcomes.append(attempt(lambda ddp=ddp, given=arguments: gradferry.attach(ddp, **given)))
    return outcomes


def test_what_momentum_cannot_do_is_refused_at_attach(world_of_2: World) -> None:
    for outcomes in world_of_2.run(case_refused):
        for outcome, (arguments, *_, text) in zip(outcomes, REFUSED, strict=True):
            assert outcome.error == "ConfigError", arguments
            assert text in outcome.text


def case_sparse_later(native: bool) -> Outcome:
    """A sparse gradient that could not be seen at attach."""
    import gradferry

    table = nn.Embedding(40, 40, sparse=True)
    ddp = DistributedDataParallel(table)
    table.sparse = False
    if native:
        gradferry.attach(ddp, momentum=BETA)
    else:
        ddp.register_comm_hook(gradferry.HookState("q4", ddp, momentum=BETA), gradferry.hook)
    table.sparse = True
    loss = ddp(torch.tensor([1, 2])).sum()
    return attempt(loss.backward)


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_sparse_gradient_is_refused_when_it_comes(world_of_2: World, native: bool) -> None:
    for outcome in world_of_2.run(case_sparse_later, native=native):
        assert outcome.error == "StateError"
        assert "a sparse gradient came" in outcome.text


def case_momentum_differs() -> Outcome:
    import gradferry

    ddp = DistributedDataParallel(nn.Linear(40, 40))
    momentum = [0.9, 0.95][dist.get_rank()]
    return attempt(lambda: gradferry.attach(ddp, "sign1", momentum=momentum))


def test_ranks_must_agree_on_momentum(world_of_2: World) -> None:
    for outcome in world_of_2.run(case_momentum_differs):
        assert outcome.error == "RankMismatchError"
        assert "rank 1 differs from rank 0 in momentum: 0.95 instead of 0.9" in outcome.text
