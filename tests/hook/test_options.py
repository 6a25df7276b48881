"""What the options of attach() change, and what frameworks around DDP do to the hook."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import re
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradferry.core.options import DEFAULTS, Options
from outcomes import Outcome, attempt
from reference import ReferenceEngine
from scenario import Run, Scenario, Weight, assert_same_parameters, expected_gradients, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))
SCENARIO = Scenario(WEIGHTS, 2, error_feedback="both", ddp={"bucket_cap_mb": 0.02})


NOT_SCATTERED = ("momentum", "exact_skip", "check_every", "nodes")
WAYS_IN = {
    "attach": (gradferry.attach, (), {}),
    "HookState": (gradferry.HookState, (), {}),
    "Reducer": (gradferry.Reducer, (), {}),
    "fsdp": (gradferry.fsdp.attach, ("exact_skip",), {}),
    "reduce_scatter": (
        gradferry.fsdp.attach_reduce_scatter, NOT_SCATTERED, {"error_feedback": "none"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("way_in", "without", "defaults"), WAYS_IN.values(), ids=WAYS_IN)
def test_every_way_in_shows_the_same_options(
    way_in: Any, without: tuple[str, ...], defaults: dict[str, Any]
) -> None:
    shown = {
        name: parameter.default
        for name, parameter in inspect.signature(way_in).parameters.items()
        if name in DEFAULTS
    }
    assert shown == {
        name: defaults.get(name, default)
        for name, default in DEFAULTS.items()
        if name not in without
    }
    assert set(DEFAULTS) == set(Options.__annotations__)
    for name in DEFAULTS:
        text = re.search(rf"^        {name}: .+", way_in.__doc__, re.M)
        assert (text is None) == (name in without), name
    assert "**options" not in way_in.__doc__


def case_unknown_option() -> list[Outcome]:
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    mine = {"momentun": 0.9} if dist.get_rank() == 0 else {}
    return [
        attempt(lambda: gradferry.attach(ddp, "q4", **mine)),
        attempt(lambda: gradferry.Reducer([("a", torch.zeros(2000))], **mine)),
        attempt(lambda: gradferry.HookState("q4", momentun=0.9)),
    ]


def test_an_option_that_does_not_exist_is_one_error_on_all_ranks(world_of_2: World) -> None:
    for attached, reducer, unbound in world_of_2.run(case_unknown_option):
        for outcome in (attached, reducer, unbound):
            assert outcome.error == "ConfigError"
            assert "there is no option 'momentun' here; the options are rules, " in outcome.text
            assert outcome.text.endswith("; did you mean 'momentum'?")


def same(left: list[list[np.ndarray]], right: list[list[np.ndarray]]) -> bool:
    return all(
        a.tobytes() == b.tobytes()
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def case_passes_through(scenario: Scenario, environment: dict[str, str]) -> dict[str, Any]:
    """The hook's gradients, and those of plain DDP on the same buckets."""
    with mock.patch.dict(os.environ, environment):
        run = Run(scenario)
    hooked = [run.step(step) for step in range(scenario.steps)]
    with mock.patch("scenario.attach"):
        plain = Run(scenario)
    return {
        "equal": same(hooked, [plain.step(step) for step in range(scenario.steps)]),
        "stats": run.state.stats(),
        "text": str(run.state),
    }


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_disabled_hook_gives_what_plain_ddp_gives(world_of_2: World, native: bool) -> None:
    scenario = dataclasses.replace(SCENARIO, native=native)
    for answer in world_of_2.run(
        case_passes_through, scenario=scenario, environment={"GRADFERRY_DISABLE": "1"}
    ):
        assert answer["equal"]
        assert answer["stats"]["wire_bytes"] == 0
        assert "passes through (GRADFERRY_DISABLE=1)" in answer["text"]


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_codec_off_gives_what_plain_ddp_gives(world_of_2: World, native: bool) -> None:
    scenario = dataclasses.replace(SCENARIO, native=native, codec="off")
    for answer in world_of_2.run(case_passes_through, scenario=scenario, environment={}):
        assert answer["equal"]
        assert "passes through (codec 'off')" in answer["text"]


# Looked up on two ranks.
ROWS = {
    "all": ([1, 2, 2], [1, 2, 3]),
    "one rank": ([1, 2, 2], []),
    "none": ([], []),
}


def case_sparse(native: bool) -> dict[str, dict[str, Any]]:
    return {name: sparse_steps(native, rows[dist.get_rank()]) for name, rows in ROWS.items()}


def sparse_steps(native: bool, rows: list[int]) -> dict[str, Any]:
    model = nn.ModuleDict({"table": nn.Embedding(50, 40, sparse=True), "out": nn.Linear(40, 60)})
    plain = nn.Embedding(50, 40, sparse=True)
    plain.load_state_dict(model["table"].state_dict())
    ddp = DistributedDataParallel(_Lookup(model))
    if native:
        state = gradferry.attach(ddp)
    else:
        state = gradferry.HookState("q4", ddp)
        ddp.register_comm_hook(state, gradferry.hook)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor(rows, dtype=torch.int64)).sum().backward()
    gradient = model["table"].weight.grad
    return {"sparse": gradient.is_sparse, "dense": gradient.to_dense(), "stats": state.stats()}


class _Lookup(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.parts["table"](index).sum() + self.parts["out"](torch.ones(40)).sum()


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_sparse_gradients_pass_through_averaged(world_of_2: World, native: bool) -> None:
    for answer in world_of_2.run(case_sparse, native=native):
        for name, rows in ROWS.items():
            expected = torch.zeros(50, 40)
            for row in itertools.chain(*rows):
                expected[row] += 0.5  # halves are exact
            assert answer[name]["sparse"]
            assert torch.equal(answer[name]["dense"], expected), name
            assert answer[name]["stats"]["buckets"] > 0  # the dense ones were compressed


def test_warmup_steps_are_exact_and_leave_residuals_alone(world_of_2: World) -> None:
    scenario = dataclasses.replace(SCENARIO, steps=5, options={"warmup_steps": 2})
    dense = expected_gradients(dataclasses.replace(scenario, codec="exact"))
    engine = ReferenceEngine(2, [w.describe() for w in WEIGHTS], "q4", "both")
    count = range(len(WEIGHTS))
    expected = dense[:2] + [
        engine.step([[scenario.accumulated(s, r, i) for i in count] for r in range(2)])
        for s in range(2, 5)
    ]
    answers = world_of_2.run(train, scenario=scenario)
    for rank, answer in enumerate(answers):
        assert same(answer["gradients"], [step[rank] for step in expected])
    assert_same_parameters(answers)


def case_nonfinite(scenario: Scenario) -> list[str]:
    run = Run(scenario)
    texts = []
    for step in range(3):
        try:
            run.step(step)
            texts.append("")
        except gradferry.StateError as error:
            texts.append(str(error).splitlines()[0])
    return texts


@pytest.mark.parametrize("name", ["second", "bias"])
def test_nonfinite_raise_names_the_parameter_on_all_ranks(world_of_3: World, name: str) -> None:
    scenario = dataclasses.replace(
        SCENARIO,
        world_size=3,
        options={"nonfinite": "raise"},
        poison={(1, 2, name): float("nan")},
    )
    answers = world_of_3.run(case_nonfinite, scenario=scenario)
    assert answers[0] == answers[1] == answers[2]
    first, second, third = answers[0]
    assert first == ""
    assert f"the averaged gradient of '{name}' is not finite at step 1" in second
    assert third == second


def case_misused() -> list[str]:
    """What wrappers and DDP's own changes around the hook lead to."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper

    texts = []
    ddp = DistributedDataParallel(nn.Linear(40, 60))
    state = gradferry.HookState("q4", ddp)
    ddp.register_comm_hook(state, fp16_compress_wrapper(gradferry.hook))
    with pytest.raises(gradferry.StateError) as caught:
        ddp(torch.ones(3, 40)).sum().backward()
    texts.append(str(caught.value))

    ddp = DistributedDataParallel(nn.Linear(40, 60))
    gradferry.attach(ddp)
    with pytest.raises(gradferry.StateError) as caught:
        ddp._update_process_group(dist.group.WORLD)
    texts.append(str(caught.value))

    cap = 1 if dist.get_rank() == 0 else 25
    ddp = DistributedDataParallel(nn.Linear(40, 60), bucket_cap_mb=cap)
    with pytest.raises(gradferry.RankMismatchError) as caught:
        gradferry.attach(ddp)
    texts.append(str(caught.value))
    return texts


@pytest.mark.torch_core
def test_misuse_around_the_hook_is_refused_with_advice(world_of_2: World) -> None:
    for wrapped, group, cap in world_of_2.run(case_misused):
        assert "of Half on cpu" in wrapped
        assert "do not wrap the hook in a compress wrapper" in wrapped
        assert "build a new DistributedDataParallel" in group
        assert "rank 1 differs from rank 0 in bucket_cap_mb: 25.0 instead of 1.0" in cap


def case_autocast(compiled: bool) -> dict[str, Any]:
    """Whether a few steps of a real model under autocast follow uncompressed training."""
    losses = {}
    for name in ("plain", "hooked"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 1))
        ddp = DistributedDataParallel(model)
        if name == "hooked":
            gradferry.attach(ddp, "exact")
        forward = torch.compile(ddp, backend="aot_eager") if compiled else ddp
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses[name] = []
        for _ in range(4):
            x = torch.randn(16, 64, generator=generator)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (forward(x) - x[:, :1]).float().square().mean()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    return losses


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "torch.compile"])
def test_training_under_autocast_equals_plain_ddp(world_of_2: World, compiled: bool) -> None:
    # With two ranks and `exact`, (a + b) / 2 is what plain DDP computes as a / 2 + b / 2: halving
    # is exact, and a sum of two does not depend on order.
    for losses in world_of_2.run(case_autocast, compiled=compiled):
        assert losses["hooked"] == losses["plain"]
        assert len(set(losses["plain"])) == 4
