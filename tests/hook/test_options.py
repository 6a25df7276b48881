"""What the options of attach() change, what is kept of an encoding by default, and what frameworks
around DDP do to the hook."""

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
from scenario import Run, Scenario, Weight, hooked
from stepping import slot
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
@pytest.mark.parametrize(
    ("codec", "environment", "why"),
    [
        ("q4", {"GRADFERRY_DISABLE": "1"}, "GRADFERRY_DISABLE=1"),
        ("auto", {"GRADFERRY_DISABLE": "1"}, "GRADFERRY_DISABLE=1"),
        ("off", {}, "codec 'off'"),
    ],
    ids=["disabled", "auto disabled", "off"],
)
def test_hook_that_passes_through_gives_what_plain_ddp_gives(
    world_of_2: World, codec: str, environment: dict[str, str], why: str, native: bool
) -> None:
    scenario = dataclasses.replace(SCENARIO, native=native, codec=codec)
    for answer in world_of_2.run(case_passes_through, scenario=scenario, environment=environment):
        assert answer["equal"]
        if environment:
            assert answer["stats"]["wire_bytes"] == 0
        if codec == "auto":
            choice = {"codec": "off", "exchange": "flat", "reason": why}
            assert answer["stats"]["choice"] == choice
        assert f"passes through ({why})" in answer["text"]


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
    state = hooked(ddp, native=native)
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


SIDE = 64


# By codec, whether workers and owners keep what it withholds when nobody says.
KEPT = {
    "exact": (False, False),
    "bf16": (False, True),
    "q8": (False, True),
    "q4": (True, True),
    "rht:bits=4": (True, True),
    "rht:bits=2": (True, True),
    "sign1": (True, True),
    "topk:ratio=0.01": (True, True),
}


def case_residual_elements() -> dict[str, tuple[int, int]]:
    found = {}
    for codec in KEPT:
        held = slot(hooked(DistributedDataParallel(nn.Linear(SIDE, SIDE, bias=False)), codec))
        found[codec] = held["worker"].numel(), held["owner"].numel()
    return found


def test_below_8_bits_both_residuals_are_kept(world_of_2: World) -> None:
    one, other = world_of_2.run(case_residual_elements)
    for codec, (worker, owner) in KEPT.items():
        # There is one tile: every rank has the worker's, one the owner's.
        assert one[codec][0] == other[codec][0] == SIDE * SIDE * worker
        assert sorted([one[codec][1], other[codec][1]]) == [0, SIDE * SIDE * owner]
