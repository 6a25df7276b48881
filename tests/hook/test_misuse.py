"""Wrong options, and wrong use of attach, HookState and hook: the error is typed, and says what to
do instead.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_options import engine_options, parameter
from gradferry import _native
from gradferry.core.options import DEFAULTS, SHARDED_DEFAULTS, Options, ShardedOptions
from on_ranks import of_all, on_ranks
from outcomes import attempt
from scenario import ChosenGradients, Run, Scenario, Weight, hooked
from torch import nn
from torch._C._distributed_c10d import Backend
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_wrapper,
)
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

SCENARIO = Scenario((Weight("first", (40, 40)), Weight("second", (9,))))


def plain_ddp(**options: object) -> DistributedDataParallel:
    return DistributedDataParallel(ChosenGradients(SCENARIO), **options)


# --- options --------------------------------------------------------------------------------------

# Options of attach, and what the error must name.
BAD_OPTIONS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"codec": "q44"}, ("q44", "q4")),
    ({"codec": ""}, ("codec",)),
    ({"codec": "aut"}, ("did you mean 'auto'?", ", off, auto")),
    ({"codec": "of"}, ("did you mean 'off'?",)),
    ({"codec": "Q4"}, ("did you mean 'q4'?",)),
    ({"codec": "torch:fp16"}, ("'torch:fp16'", "PyTorch's own", "'bf16'")),
    ({"momentun": 0.9}, ("no option 'momentun' here", "rules, ", "did you mean 'momentum'?")),
    ({"rules": [{"codec": "auto"}]}, ("rules[0]", "'auto'", "whole models")),
    ({"rules": [{"codec": "torch:bf16"}]}, ("PyTorch's own",)),
    ({"rules": [{"name": "first", "codec": "q44"}]}, ("q44", "q4")),
    ({"rules": [{"nam": "first", "codec": "exact"}]}, ("nam", "name")),
    ({"rules": {"first": "exact"}}, ("rules", "name", "codec")),
    ({"rules": [{"name": "first"}]}, ("rules[0]", "codec")),
    ({"error_feedback": "booth"}, ("error_feedback", "booth", "both")),
    ({"nonfinite": "rise"}, ("nonfinite", "rise", "raise")),
    *(
        ({"momentum": momentum}, (f"momentum={momentum!r} must be a number between 0 and 1",))
        for momentum in (1.0, 0.0, "0.9", True, np.float32(1))
    ),
    ({"momentum": 0.9, "codec": "off"}, ("'off' passes gradients through",)),
    ({"momentum": 0.9, "error_feedback": "owner"}, ("lives in the worker residual",)),
    ({"momentum": 0.9, "error_feedback": "none"}, ("lives in the worker residual",)),
    ({"grad_scaler": 2.0}, ("must be a torch.amp.GradScaler, not float",)),
    *(({"seed": seed}, ("seed", repr(seed))) for seed in (-1, np.int64(-1), True, 1.0)),
    ({"warmup_steps": -2}, ("warmup_steps", "-2")),
    ({"warmup_steps": 5, "warmup": "q88"}, ("q88", "did you mean 'q8'?")),
    ({"warmup_steps": 5, "warmup": "off"}, ("warmup='off'", "whole trainings", "'exact'")),
    ({"warmup_steps": 5, "warmup": "auto"}, ("warmup='auto'", "whole trainings")),
    ({"warmup_steps": 5, "warmup": "torch:fp16"}, ("'torch:fp16'", "PyTorch's own")),
    ({"warmup_steps": 5, "warmup": None}, ("must be a string",)),
    ({"warmup": "q8"}, ("warmup='q8'", "there are none", "warmup_steps=")),
    ({"warmup_steps": 5, "warmup": "q4"}, ("warmup='q4' changes nothing", "momentum=")),
    (
        {"codec": "exact", "warmup_steps": 5, "warmup": "q8", "momentum": 0.9},
        ("warmup='q8' has nothing to compress",),
    ),
    ({"codec": "off", "warmup_steps": 5, "warmup": "q8"}, ("'off' passes gradients through",)),
    ({"workspace_cap_mb": 0}, ("workspace_cap_mb=0", "such as 96")),
    ({"workspace_cap_mb": "96"}, ("workspace_cap_mb='96'", "number of MiB")),
    ({"workspace_cap_mb": 0.01}, ("more than the 10485 that", "attach with workspace_cap_mb=1,")),
    *(
        ({"check_every": every}, ("must be a whole number, 0 or more",))
        for every in (-1, 1.5, True)
    ),
)


@on_ranks()
def test_attach_names_the_wrong_value_and_the_closest_right_one() -> None:
    ddp = plain_ddp()
    for options, parts in BAD_OPTIONS:
        outcome = attempt(lambda: gradferry.attach(ddp, **options))  # noqa: B023
        assert outcome.error == "ConfigError", options
        assert of_all(outcome) == [outcome] * 2, options
        for part in parts:
            assert part in outcome.text, (options, outcome.text)


@on_ranks()
def test_numbers_of_numpy_are_numbers() -> None:
    rules = [{"min_size": np.int32(8), "codec": "q8"}]
    options = {
        "momentum": np.float64(0.9),
        "seed": np.int64(3),
        "check_every": torch.tensor(4),
        "nodes": np.uint8(1),
        "rules": rules,
    }
    config = hooked(plain_ddp(), **options).config
    assert (config.momentum, config.seed, config.rules[0].min_size) == (0.9, 3, 8)
    assert (config.check_every, config.nodes) == (4, 1)


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


# --- use ------------------------------------------------------------------------------------------


COMPRESSED = fp16_compress_wrapper(gradferry.hook)
BUILT_IN, HALF = dist.BuiltinCommHookType.ALLREDUCE, _MixedPrecision(torch.bfloat16)


def changed(*changes: Callable[[DistributedDataParallel], Any]) -> None:
    """A model to which all of this is done, one after the other."""
    ddp = plain_ddp()
    for change in changes:
        change(ddp)


def registered(state: Any, ddp: DistributedDataParallel, hook: Any = gradferry.hook) -> None:
    """Also runs a backward pass, which is what fails."""
    ddp.register_comm_hook(state, hook)
    ddp({w.name: torch.ones(w.shape) for w in SCENARIO.weights}).backward()


def attach_with_optimizer_in_backward() -> None:
    model = ChosenGradients(SCENARIO)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    hooked(DistributedDataParallel(model))


def attach_to_delayed_all_reduce() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    delayed = list(model.named_parameters())
    model.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    options = {"delay_all_reduce_named_params": delayed}
    hooked(DistributedDataParallel(model, param_to_hook_all_reduce=model[0].weight, **options))


def sparse(*, native: bool) -> None:
    ddp = DistributedDataParallel(nn.Embedding(40, 40, sparse=True))
    hooked(ddp, native=native, momentum=0.9)
    ddp(torch.tensor([1, 2])).sum().backward()


def register_for_two_models() -> None:
    first = plain_ddp()
    state = gradferry.HookState("q4", first)
    registered(state, first)
    registered(state, plain_ddp())


def join_over_the_effective_world_size() -> None:
    ddp = plain_ddp()
    hooked(ddp)
    optimizer = torch.optim.SGD(ddp.parameters())
    with ddp.join(divide_by_initial_world_size=False):
        ddp({w.name: torch.ones(w.shape) for w in SCENARIO.weights}).backward()
        optimizer.step()


def scale_a_loss_by_infinity() -> None:
    scaler = torch.amp.GradScaler("cpu")
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    hooked(ddp, grad_scaler=scaler)
    scaler.update(new_scale=math.inf)
    ddp(torch.ones(2, 40)).sum().backward()


def state_of(ddp: DistributedDataParallel) -> gradferry.HookState:
    return gradferry.HookState("q4", ddp)


ANOTHER = "to another Distr"
JOINS = "divide_by_initial_world_size"
SPARSE = "a sparse gradient came"
# By the class of the error and what is done: it, and what the error must name.
MISUSES: dict[str, dict[str, tuple[Any, ...]]] = {
    "ConfigError": {
        "attach twice": (lambda: changed(hooked, hooked), "hook"),
        "attach after a Python hook": (
            lambda: changed(lambda ddp: ddp.register_comm_hook(None, allreduce_hook), hooked),
            "hook",
        ),
        "attach after a built-in hook": (
            lambda: changed(lambda ddp: ddp._register_builtin_comm_hook(BUILT_IN), hooked), "hook",
        ),
        # The argument would do this, but DDP itself takes it on accelerators only.
        "mixed precision": (
            lambda: changed(lambda ddp: setattr(ddp, "mixed_precision", HALF), hooked),
            "mixed_precision",
        ),
        "optimizer in backward": (attach_with_optimizer_in_backward, "optimizer", "backward"),
        "delayed all-reduce": (attach_to_delayed_all_reduce, "delay_all_reduce_named_params"),
        "a module": (lambda: hooked(nn.Linear(4, 4)), "DistributedDataParallel", "not Linear"),
        "momentum of what is unused": (
            lambda: hooked(plain_ddp(find_unused_parameters=True), momentum=0.9),
            "make every parameter take part",
        ),
        "backward without a state": (
            lambda: registered(None, plain_ddp()), "is None", "gradferry.HookState('q4', ddp)",
        ),
        "no function": (lambda: hooked(plain_ddp()).on_step(3), "on_step(3): pass a function"),
        **{
            f"scale residuals by {factor}": (
                lambda factor=factor: hooked(plain_ddp()).scale_residuals(factor),
                f"factor={factor} must be a number that is finite",
            )
            for factor in (math.nan, math.inf, -math.inf, 1e39)
        },
    },
    "StateError": {
        "sparse": (lambda: sparse(native=True), SPARSE),
        "sparse, python": (lambda: sparse(native=False), SPARSE),
        "join": (join_over_the_effective_world_size, JOINS),
        "bind a bound state": (lambda: state_of(plain_ddp()).bind(plain_ddp()), "bound"),
        "register for another model": (
            lambda: registered(state_of(plain_ddp()), plain_ddp()),
            ANOTHER, "a HookState of its own",
        ),
        "register for two models": (register_for_two_models, ANOTHER, "a HookState of its own"),
        "register in a compress wrapper": (
            lambda: changed(lambda ddp: registered(state_of(ddp), ddp, COMPRESSED)),
            "of Half on cpu", "do not wrap the hook in a compress wrapper",
        ),
        "backward, unbound": (
            lambda: registered(gradferry.HookState("q4"), plain_ddp()), "bind", "GradferryCallback",
        ),
        "scale a loss by infinity": (scale_a_loss_by_infinity, "the GradScaler's scale is inf"),
    },
    "RankMismatchError": {
        "other buckets": (
            lambda: hooked(plain_ddp(bucket_cap_mb=1 if dist.get_rank() == 0 else 25)),
            "rank 1 differs from rank 0 in bucket_cap_mb: 25.0 instead of 1.0",
        ),
    },
}  # fmt: skip


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("error", "name"), [(error, name) for error, rows in MISUSES.items() for name in rows]
)
@on_ranks()
def test_wrong_use_raises_a_typed_error_with_advice(error: str, name: str) -> None:
    done, *parts = MISUSES[error][name]
    outcome = attempt(done)
    assert outcome.error == error, outcome
    for part in parts:
        assert part in outcome.text, outcome


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_backward_after_its_group_was_destroyed_raises_state_error(native: bool) -> None:
    group = dist.new_group()
    run = Run(Scenario(SCENARIO.weights, native=native), group)
    run.step(0)
    dist.destroy_process_group(group)
    outcome = attempt(lambda: run.step(1))
    assert outcome.error == "StateError", outcome
    assert "process group" in outcome.text
    assert "destroyed" in outcome.text


def test_world_too_large_for_offsets_of_32_bits_is_told_the_largest_that_would_do() -> None:
    world_size, chunk_bytes = 4, 2**30
    shards_as_large_as_a_chunk = world_size * chunk_bytes // 8
    options = engine_options(
        parameters=[parameter("weight", shards_as_large_as_a_chunk, "exact", torch.float64)],
        nodes=[[rank] for rank in range(world_size)],
        chunk_bytes=chunk_bytes,
        workspace_cap_bytes=2**40,
    )
    lanes = {name: _native.Lane(Backend(0, world_size)) for name in ("scatter", "gather", "commit")}
    with pytest.raises(gradferry.ConfigError, match="between 3 ranks at most, not 4"):
        _native.HostEngine(options, tensors=[], lanes=lanes, memory=None, local_stage="")


# --- what the library itself must not do ----------------------------------------------------------

PACKAGE = Path(gradferry.__file__).parent


def test_what_a_peer_sends_is_never_unpickled() -> None:
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    for path, text in texts.items():
        for collective in ("_gather_object", "gather_object(", "_object_list"):
            assert collective not in text, f"{path.name}: {collective}; use gather_records"
