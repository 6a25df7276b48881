"""What the options of attach() change, and what is kept of an encoding by default; what a process
may have set: another default dtype or device, inference mode, and TORCH_DISTRIBUTED_DEBUG=DETAIL,
in which torch wraps every process group.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import itertools
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import scenario as scenarios
import torch
import torch.distributed as dist
from auto_trials import timed
from gradferry import _native
from gradferry.checkpoint import merge
from gradferry.core.options import DEFAULTS, SHARDED_DEFAULTS, Options, ShardedOptions
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from scenario import Run, Scenario, Weight, assert_all_bit_equal, hooked, train_all
from stepping import slot
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import COLLECTIVE_SECONDS, World

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))
SCENARIO = Scenario(WEIGHTS, 2, error_feedback="both", ddp={"bucket_cap_mb": 0.02})


WAYS_IN = {
    "attach": (gradferry.attach, DEFAULTS),
    "HookState": (gradferry.HookState, DEFAULTS),
    "Reducer": (gradferry.Reducer, DEFAULTS),
    "fsdp": (gradferry.fsdp.attach, SHARDED_DEFAULTS),
}


@pytest.mark.parametrize(("way_in", "defaults"), WAYS_IN.values(), ids=WAYS_IN)
def test_every_way_in_shows_the_same_options(way_in: Any, defaults: dict[str, Any]) -> None:
    shown = {
        name: parameter.default
        for name, parameter in inspect.signature(way_in).parameters.items()
        if name in SHARDED_DEFAULTS
    }
    assert shown == defaults
    assert set(DEFAULTS) == set(Options.__annotations__)
    assert set(SHARDED_DEFAULTS) == set(ShardedOptions.__annotations__)
    for name in defaults:
        assert re.search(rf"^        {name}: .+", way_in.__doc__, re.M), name
    assert "**options" not in way_in.__doc__


@on_ranks()
def test_an_option_that_does_not_exist_is_one_error_on_all_ranks() -> None:
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    mine = {"momentun": 0.9} if dist.get_rank() == 0 else {}
    for make in (
        lambda: gradferry.attach(ddp, "q4", **mine),
        lambda: gradferry.Reducer([("a", torch.zeros(2000))], **mine),
        lambda: gradferry.HookState("q4", momentun=0.9),
    ):
        outcome = attempt(make)
        assert outcome.error == "ConfigError"
        assert "there is no option 'momentun' here; the options are rules, " in outcome.text
        assert outcome.text.endswith("; did you mean 'momentum'?")


def same(left: list[list[np.ndarray]], right: list[list[np.ndarray]]) -> bool:
    return all(
        a.tobytes() == b.tobytes()
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )


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
    scenario = dataclasses.replace(SCENARIO, native=native, codec=codec)
    with mock.patch.dict(os.environ, environment):
        run = Run(scenario)
    gradients = [run.step(step) for step in range(scenario.steps)]
    with mock.patch("scenario.attach"):
        plain = Run(scenario)
    assert same(gradients, [plain.step(step) for step in range(scenario.steps)])
    stats = run.state.stats()
    if environment:
        assert stats["wire_bytes"] == 0
    if codec == "auto":
        assert stats["choice"] == {"codec": "off", "exchange": "flat", "reason": why}
    assert f"passes through ({why})" in str(run.state)


# Looked up on two ranks.
ROWS = {"all": ([1, 2, 2], [1, 2, 3]), "one rank": ([1, 2, 2], []), "none": ([], [])}


class _Lookup(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.parts["table"](index).sum() + self.parts["out"](torch.ones(40)).sum()


@pytest.mark.torch_core
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_sparse_gradients_pass_through_averaged(native: bool, rows: str) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(50, 40, sparse=True), "out": nn.Linear(40, 60)})
    ddp = DistributedDataParallel(_Lookup(model))
    state = hooked(ddp, native=native)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor(ROWS[rows][dist.get_rank()], dtype=torch.int64)).sum().backward()
    expected = torch.zeros(50, 40)
    for row in itertools.chain(*ROWS[rows]):
        expected[row] += 0.5  # halves are exact
    gradient = model["table"].weight.grad
    assert gradient.is_sparse
    assert torch.equal(gradient.to_dense(), expected)
    assert state.stats()["buckets"] > 0  # the dense ones were compressed


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


PACKAGE = Path(gradferry.__file__).parent
# What runs in a user's process, where it may have set a default: not our own command lines.
IN_A_USERS_PROCESS = ("*.py", "core/*.py", "averaging/*.py", "residuals/*.py", "ddp/*.py")
FACTORIES = {"arange", "empty", "full", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"}


@contextlib.contextmanager
def other_defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


OTHER_DEFAULTS = pytest.mark.parametrize(
    ("dtype", "device_type"),
    [(torch.bfloat16, "cpu"), (torch.float32, "meta")],
    ids=["bfloat16", "meta"],
)


@OTHER_DEFAULTS
@on_ranks()
def test_state_of_another_world_size_loads_under_other_defaults(
    dtype: torch.dtype, device_type: str
) -> None:
    """It loads as it does without such defaults."""
    run = Run(SCENARIO)
    run.step(0)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, run.state.state_dict())
    nothing = {"owner": torch.zeros(0), "owner_tiles": torch.zeros(0, dtype=torch.int64)}
    worker = torch.zeros_like(states[0]["slot_0"]["worker"])
    # A state of three ranks, the last of which withheld nothing.
    merged = {**merge(states), "world_size": 3, "slot_2": {"worker": worker, **nothing}}
    slots = []
    for context in (contextlib.nullcontext(), other_defaults(dtype, device_type)):
        with context:
            for on_resize in ("drop", "mean"):
                run.state.load_state_dict(merged, on_resize=on_resize)
                slots.append(run.state.state_dict()[f"slot_{run.rank}"])
    assert slots[1]["owner"].any()
    for expected, got in zip(slots[:2], slots[2:], strict=True):
        assert all(torch.equal(got[field], expected[field]) for field in expected)


@OTHER_DEFAULTS
@on_ranks()
def test_auto_chooses_under_other_defaults(dtype: torch.dtype, device_type: str) -> None:
    """Each engine takes over residuals."""
    run = Run(Scenario(WEIGHTS, codec="auto", ddp=SCENARIO.ddp))
    codecs = []
    with timed(run.state, dict.fromkeys(("q4", "q8", "off"), 100.0)):
        for step in range(26):
            targets = run.targets(step)
            with other_defaults(dtype, device_type):
                run.ddp(targets).backward()
                codecs.append(run.state.stats()["choice"]["codec"])
    assert list(dict.fromkeys(codecs)) == ["q4", "q8", "off"]
    with other_defaults(dtype, device_type):
        assert slot(run.state)["worker"].dtype == torch.float32


@on_ranks()
def test_one_bit_adam_counts_its_steps_in_float32() -> None:
    run = Run(Scenario(WEIGHTS, codec="sign1", options={"momentum": 0.9, "warmup_steps": 2}))
    optimizer = gradferry.optim.OneBitAdam(
        run.model.parameters(), lr=0.1, freeze_step=2, state=run.state
    )
    run.step(0)
    with other_defaults(torch.bfloat16, "cpu"):
        optimizer.step()
    # In bfloat16, 256 + 1 is 256.
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Calls of functions of torch, with their names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch":
                yield node, node.func.attr


def test_every_tensor_that_is_made_names_its_dtype_and_device() -> None:
    files = [path for pattern in IN_A_USERS_PROCESS for path in PACKAGE.glob(pattern)]
    assert len(files) > 30
    wrong = [
        f"{path.name}:{call.lineno}: torch.{name}"
        for path in files
        for call, name in calls(ast.parse(path.read_text()))
        if name in FACTORIES and not {"dtype", "device"} <= {k.arg for k in call.keywords}
    ]
    assert wrong == []


def test_what_a_peer_sends_is_never_unpickled() -> None:
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    for path, text in texts.items():
        for collective in ("_gather_object", "gather_object(", "_object_list"):
            assert collective not in text, f"{path.name}: {collective}; use gather_records"


def case_in_inference_mode(inferring: bool) -> list[Any]:
    """Attaches, loads and scales in inference mode, or not, and trains between; the gradients."""
    mode = torch.inference_mode if inferring else contextlib.nullcontext
    attach = scenarios.attach

    def attach_in_mode(*arguments: Any) -> Any:
        with mode():
            return attach(*arguments)

    with mock.patch.object(scenarios, "attach", attach_in_mode):
        run = Run(SCENARIO)
    gradients = [run.step(0), run.step(1)]
    with mode():
        run.state.load_state_dict(run.state.state_dict())
        run.state.scale_residuals(0.5)
    return [*gradients, run.step(2), run.step(3)]


def test_attach_in_inference_mode_trains_as_without(world_of_2: World) -> None:
    expected = world_of_2.run(case_in_inference_mode, inferring=False)
    answers = world_of_2.run(case_in_inference_mode, inferring=True)
    for answer, plain in zip(answers, expected, strict=True):
        for one, other in zip(answer, plain, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def detail_world() -> Iterator[World]:
    world = World(2)
    world.run(case_enter_detail_mode)
    yield world
    world.stop()


def case_enter_detail_mode() -> None:
    """Sets what the variable sets, and begins a new group, which is when it is read."""
    # torch takes the wrapper for a ProcessGroupGloo here and reads beyond its end: whether that
    # crashes is luck, with or without a hook.
    dist.Logger.set_construction_data_and_log = lambda *_: None
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    seconds = timedelta(seconds=COLLECTIVE_SECONDS)
    store = dist.PrefixStore("detail mode", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=seconds)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(backend).__name__ == "_ProcessGroupWrapper"


@pytest.mark.torch_core
def test_gradients_equal_reference_in_detail_mode(detail_world: World) -> None:
    scenarios = [
        Scenario(WEIGHTS, error_feedback="both", native=native, unused=unused, ddp=ddp)
        for native in (True, False)
        for unused, ddp in (
            ({}, {"bucket_cap_mb": 0.02}),
            ({}, {"static_graph": True}),
            ({0: ("bias",)}, {"find_unused_parameters": True, "bucket_cap_mb": 0.02}),
        )
    ]
    answers = detail_world.run(train_all, scenarios=scenarios)
    assert_all_bit_equal(answers, scenarios)


def case_lanes_and_errors() -> tuple[float, list[Outcome]]:
    from gradferry.core.engine import make_lanes

    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    with mock.patch.object(_native, "connect_lanes", wraps=_native.connect_lanes) as connect:
        group = dist.group.WORLD
        make_lanes(group, "test of detail mode", {"0": list(range(group.size()))})
    timeout = connect.call_args.kwargs["timeout_seconds"]
    seed = dist.get_rank()
    differ = attempt(lambda: Run(Scenario(WEIGHTS, options={"seed": seed})))
    poisoned = Run(
        Scenario(WEIGHTS, poison={(0, 1, "first"): float("nan")}, options={"nonfinite": "raise"})
    )
    return timeout, [differ, attempt(lambda: poisoned.step(0))]


def test_timeout_and_errors_are_as_without(detail_world: World) -> None:
    for timeout, (differ, poisoned) in detail_world.run(case_lanes_and_errors):
        assert timeout == COLLECTIVE_SECONDS
        assert differ.error == "RankMismatchError"
        assert "rank 1 differs from rank 0 in seed: 1 instead of 0" in differ.text
        assert poisoned.error == "StateError"
        assert "the averaged gradient of 'first' is not finite at step 0" in poisoned.text
