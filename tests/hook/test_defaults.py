"""What a process may have set: another default dtype or device, inference mode, and
TORCH_DISTRIBUTED_DEBUG=DETAIL, in which torch wraps every process group.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
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
from gradferry import _native
from gradferry.checkpoint import merge
from outcomes import Outcome, attempt
from scenario import Run, Scenario, Weight, assert_all_bit_equal, train_all
from test_auto import RHT3, timed
from world import COLLECTIVE_SECONDS, World

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))
SCENARIO = Scenario(WEIGHTS, error_feedback="both", ddp={"bucket_cap_mb": 0.02})
PACKAGE = Path(gradferry.__file__).parent
# What runs in a user's process, where it may have set a default: not our own command lines.
IN_A_USERS_PROCESS = ("*.py", "core/*.py", "reduction/*.py", "ddp/*.py")
FACTORIES = {"arange", "empty", "full", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"}


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def case_resized(dtype: torch.dtype, device: str) -> bool:
    """Whether a state of another world size loads as it does without such defaults."""
    run = Run(SCENARIO)
    run.step(0)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, run.state.state_dict())
    nothing = {"owner": torch.zeros(0), "owner_tiles": torch.zeros(0, dtype=torch.int64)}
    worker = torch.zeros_like(states[0]["slot_0"]["worker"])
    # As if of three ranks, the last of which withheld nothing.
    merged = {**merge(states), "world_size": 3, "slot_2": {"worker": worker, **nothing}}
    slots = []
    for context in (contextlib.nullcontext(), defaults(dtype, device)):
        with context:
            for on_resize in ("drop", "mean"):
                run.state.load_state_dict(merged, on_resize=on_resize)
                slots.append(run.state.state_dict()[f"slot_{run.rank}"])
    assert slots[1]["owner"].any()
    return all(
        torch.equal(slot[field], expected[field])
        for expected, slot in zip(slots[:2], slots[2:], strict=True)
        for field in expected
    )


def case_chosen(dtype: torch.dtype, device: str) -> tuple[list[str], torch.dtype]:
    """The codecs of "auto", step by step; each engine takes over residuals."""
    run = Run(Scenario(WEIGHTS, codec="auto", ddp=SCENARIO.ddp))
    codecs = []
    with timed(run.state, dict.fromkeys((RHT3, "q4", "q8", "off"), 100.0)):
        for step in range(34):
            targets = run.targets(step)
            with defaults(dtype, device):
                run.ddp(targets).backward()
                codecs.append(run.state.stats()["choice"]["codec"])
    with defaults(dtype, device):
        return codecs, run.state.state_dict()[f"slot_{run.rank}"]["worker"].dtype


OTHER_DEFAULTS = pytest.mark.parametrize(
    ("dtype", "device"),
    [(torch.bfloat16, "cpu"), (torch.float32, "meta")],
    ids=["bfloat16", "meta"],
)


@OTHER_DEFAULTS
def test_state_of_another_world_size_loads_under_other_defaults(
    world_of_2: World, dtype: torch.dtype, device: str
) -> None:
    assert world_of_2.run(case_resized, dtype=dtype, device=device) == [True, True]


@OTHER_DEFAULTS
def test_auto_chooses_under_other_defaults(
    world_of_2: World, dtype: torch.dtype, device: str
) -> None:
    for codecs, empty in world_of_2.run(case_chosen, dtype=dtype, device=device):
        assert list(dict.fromkeys(codecs)) == ["q4", RHT3, "q8", "off"]
        assert empty == torch.float32


def case_adam_step() -> set[torch.dtype]:
    options = {"momentum": 0.9, "warmup_steps": 2}
    run = Run(Scenario(WEIGHTS, codec="sign1", options=options))
    optimizer = gradferry.optim.OneBitAdam(
        run.model.parameters(), lr=0.1, freeze_step=2, state=run.state
    )
    run.step(0)
    with defaults(torch.bfloat16, "cpu"):
        optimizer.step()
    return {state["step"].dtype for state in optimizer.state.values()}


def test_one_bit_adam_counts_its_steps_in_float32(world_of_2: World) -> None:
    # In bfloat16, 256 + 1 is 256.
    assert world_of_2.run(case_adam_step) == [{torch.float32}] * 2


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
        run = Run(dataclasses.replace(SCENARIO, options={"exact_skip": True}))
    gradients = [run.step(0), run.step(1)]
    run.state.skip_step()
    with mode():
        run.state.load_state_dict(run.state.state_dict())
        run.state.scale_residuals(0.5)
    gradients += [run.step(2), run.step(3)]
    run.state.skip_step()
    return [*gradients, run.step(4)]


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
    """As if the variable had been set from the start: it is read when a group begins."""
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
    from gradferry.core.engine import lanes_between_all, make_lanes

    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    with mock.patch.object(_native, "connect_lanes", wraps=_native.connect_lanes) as connect:
        group = dist.group.WORLD
        make_lanes(group, "test of detail mode", lanes_between_all(group, 1))
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
