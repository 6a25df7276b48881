"""Wrong use of attach, HookState and hook: the error is typed, and says what to do instead."""

from __future__ import annotations

import os
from collections.abc import Callable

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_options import engine_options, parameter
from outcomes import Outcome, attempt
from scenario import ChosenGradients, Run, Scenario, Weight
from torch._C._distributed_c10d import Backend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from world import World

SCENARIO = Scenario((Weight("first", (40, 40)), Weight("second", (9,))))


def plain_ddp(**options: object) -> DistributedDataParallel:
    return DistributedDataParallel(ChosenGradients(SCENARIO), **options)


def case_bad_option(options: dict) -> Outcome:
    return attempt(lambda: gradferry.attach(plain_ddp(), **options))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"codec": "q44"}, ("q44", "q4")),
        ({"codec": "exat"}, ("exat", "exact")),
        ({"codec": "q4:blok=3"}, ("q4", "blok")),
        ({"codec": ""}, ("codec",)),
        ({"codec": "aut"}, ("did you mean 'auto'?", "topk, off, auto")),
        ({"codec": "of"}, ("did you mean 'off'?",)),
        ({"codec": "Q4"}, ("did you mean 'q4'?",)),
        ({"codec": "torch:fp16"}, ("'torch:fp16'", "PyTorch's own", "'bf16'")),
        ({"codec": "topk:0.01"}, ("Did you mean 'ratio=0.01'?",)),
        ({"codec": "q8:8"}, ("'q8' has no options",)),
        ({"rules": [{"codec": "auto"}]}, ("rules[0]", "'auto'", "whole models")),
        ({"rules": [{"codec": "torch:bf16"}]}, ("PyTorch's own",)),
        ({"error_feedback": "booth"}, ("error_feedback", "booth", "both")),
        ({"nonfinite": "rise"}, ("nonfinite", "rise", "raise")),
        ({"rules": [{"name": "first", "codec": "q44"}]}, ("q44", "q4")),
        ({"rules": [{"nam": "first", "codec": "exact"}]}, ("nam", "name")),
        ({"rules": {"first": "exact"}}, ("rules", "name", "codec")),
        ({"rules": [{"name": "first"}]}, ("rules[0]", "codec")),
        ({"momentum": 1.5}, ("momentum", "1.5")),
        ({"momentum": np.float32(1)}, ("momentum", "1.0")),
        ({"momentum": True}, ("momentum", "True")),
        ({"seed": -1}, ("seed", "-1")),
        ({"seed": np.int64(-1)}, ("seed", "-1")),
        ({"seed": True}, ("seed", "True")),
        ({"seed": 1.0}, ("seed", "1.0")),
        ({"warmup_steps": -2}, ("warmup_steps", "-2")),
        ({"warmup_steps": 5, "warmup": "q88"}, ("q88", "did you mean 'q8'?")),
        ({"warmup_steps": 5, "warmup": "off"}, ("warmup='off'", "whole trainings", "'exact'")),
        ({"warmup_steps": 5, "warmup": "auto"}, ("warmup='auto'", "whole trainings")),
        ({"warmup_steps": 5, "warmup": "torch:fp16"}, ("'torch:fp16'", "PyTorch's own")),
        ({"warmup_steps": 5, "warmup": None}, ("must be a string",)),
        ({"workspace_cap_mb": 0}, ("workspace_cap_mb=0", "such as 96")),
        ({"workspace_cap_mb": "96"}, ("workspace_cap_mb='96'", "number of MiB")),
        (
            {"workspace_cap_mb": 0.01},
            ("more than the 10485 that", "attach with workspace_cap_mb=1,"),
        ),
        ({"warmup": "q8"}, ("warmup='q8'", "there are none", "warmup_steps=")),
        ({"warmup_steps": 5, "warmup": "q4"}, ("warmup='q4' changes nothing", "momentum=")),
        (
            {"codec": "exact", "warmup_steps": 5, "warmup": "q8", "momentum": 0.9},
            ("warmup='q8' has nothing to compress",),
        ),
        ({"codec": "off", "warmup_steps": 5, "warmup": "q8"}, ("'off' passes gradients through",)),
    ],
)
def test_attach_names_the_wrong_value_and_the_closest_right_one(
    world_of_2: World, options: dict, parts: tuple[str, ...]
) -> None:
    outcomes = world_of_2.run(case_bad_option, options=options)
    assert [o.error for o in outcomes] == ["ConfigError"] * 2, outcomes
    assert outcomes[0].text == outcomes[1].text
    for part in parts:
        assert part in outcomes[0].text, outcomes[0].text


def case_numpy_numbers() -> tuple[float, int, int]:
    state = gradferry.attach(
        plain_ddp(),
        momentum=np.float64(0.9),
        seed=np.int64(3),
        rules=[{"min_size": np.int32(8), "codec": "q8"}],
    )
    config = state.config
    return config.momentum, config.seed, config.rules[0].min_size


def test_numbers_of_numpy_are_numbers(world_of_2: World) -> None:
    assert world_of_2.run(case_numpy_numbers) == [(0.9, 3, 8)] * 2


def attach_twice() -> Outcome:
    ddp = plain_ddp()
    gradferry.attach(ddp, "q4")
    return attempt(lambda: gradferry.attach(ddp, "q4"))


def attach_after_python_hook() -> Outcome:
    ddp = plain_ddp()
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return attempt(lambda: gradferry.attach(ddp, "q4"))


def attach_after_builtin_hook() -> Outcome:
    ddp = plain_ddp()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return attempt(lambda: gradferry.attach(ddp, "q4"))


def attach_to_mixed_precision() -> Outcome:
    from torch.nn.parallel.distributed import _MixedPrecision

    ddp = plain_ddp()
    # As the argument would, but DDP itself takes that on accelerators only.
    ddp.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)
    return attempt(lambda: gradferry.attach(ddp, "q4"))


def attach_with_optimizer_in_backward() -> Outcome:
    model = ChosenGradients(SCENARIO)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(model)
    return attempt(lambda: gradferry.attach(ddp, "q4"))


def attach_to_a_module() -> Outcome:
    return attempt(lambda: gradferry.attach(ChosenGradients(SCENARIO), "q4"))


def attach_to_delayed_all_reduce() -> Outcome:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    delayed = list(model.named_parameters())
    model.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    ddp = DistributedDataParallel(
        model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model[0].weight
    )
    return attempt(lambda: gradferry.attach(ddp, "q4"))


def bind_a_bound_state() -> Outcome:
    state = gradferry.HookState("q4", plain_ddp())
    return attempt(lambda: state.bind(plain_ddp()))


def register_for_another_model() -> Outcome:
    state = gradferry.HookState("q4", plain_ddp())
    other = plain_ddp()
    other.register_comm_hook(state, gradferry.hook)
    return attempt(lambda: backward(other))


def register_for_the_same_model_wrapped_again() -> Outcome:
    first = plain_ddp()
    state = gradferry.HookState("q4", first)
    second = DistributedDataParallel(first.module)
    second.register_comm_hook(state, gradferry.hook)
    return attempt(lambda: backward(second))


def register_the_state_of_a_native_hook() -> Outcome:
    first = plain_ddp()
    state = gradferry.attach(first, "q4")
    second = DistributedDataParallel(first.module)
    second.register_comm_hook(state, gradferry.hook)
    return attempt(lambda: backward(second))


def register_for_two_models() -> Outcome:
    first, second = plain_ddp(), plain_ddp()
    state = gradferry.HookState("q4", first)
    for ddp in (first, second):
        ddp.register_comm_hook(state, gradferry.hook)
    backward(first)
    return attempt(lambda: backward(second))


def backward_unbound() -> Outcome:
    ddp = plain_ddp()
    ddp.register_comm_hook(gradferry.HookState("q4"), gradferry.hook)
    return attempt(lambda: backward(ddp))


def backward_without_state() -> Outcome:
    ddp = plain_ddp()
    ddp.register_comm_hook(None, gradferry.hook)
    return attempt(lambda: backward(ddp))


def stats_unbound() -> Outcome:
    return attempt(lambda: gradferry.HookState("q4").stats())


def backward(ddp: DistributedDataParallel) -> None:
    gradients = {w.name: torch.ones(w.shape) for w in SCENARIO.weights}
    ddp(gradients).backward()


@pytest.mark.parametrize(
    ("case", "errors", "parts"),
    [
        (attach_twice, ("StateError", "ConfigError"), ("hook",)),
        (attach_after_python_hook, ("StateError", "ConfigError"), ("hook",)),
        (attach_after_builtin_hook, ("StateError", "ConfigError"), ("hook",)),
        (attach_to_mixed_precision, ("ConfigError",), ("mixed_precision",)),
        (attach_with_optimizer_in_backward, ("ConfigError",), ("optimizer", "backward")),
        (attach_to_delayed_all_reduce, ("ConfigError",), ("delay_all_reduce_named_params",)),
        (attach_to_a_module, ("ConfigError",), ("DistributedDataParallel", "ChosenGradients")),
        (bind_a_bound_state, ("StateError",), ("bound",)),
        (
            register_for_another_model,
            ("StateError",),
            ("to another Distr", "HookState(codec, ddp)"),
        ),
        (register_for_the_same_model_wrapped_again, ("StateError",), ("to another Distr",)),
        (register_the_state_of_a_native_hook, ("StateError",), ("to another Distr",)),
        (register_for_two_models, ("StateError",), ("to another Distr", "a HookState of its own")),
        (backward_unbound, ("StateError",), ("bind", "GradferryCallback")),
        (backward_without_state, ("ConfigError",), ("is None", "gradferry.HookState('q4', ddp)")),
        (stats_unbound, ("StateError",), ("bind",)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_use_raises_a_typed_error_with_advice(
    world_of_2: World, case: Callable[[], Outcome], errors: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    outcomes = world_of_2.run(case)
    for outcome in outcomes:
        assert outcome.error in errors, outcomes
        for part in parts:
            assert part in outcome.text, outcome.text


def case_use_after_destroy(native: bool) -> Outcome:
    run = Run(Scenario(SCENARIO.weights, native=native))
    run.step(0)
    dist.destroy_process_group()
    return attempt(lambda: run.step(1))


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_backward_after_destroy_process_group_raises_state_error(native: bool) -> None:
    world = World(2)  # its group ends with this case
    try:
        outcomes = world.run(case_use_after_destroy, native=native)
    finally:
        world.stop()
    for outcome in outcomes:
        assert outcome.error == "StateError", outcomes
        assert "process group" in outcome.text
        assert "destroyed" in outcome.text


def test_world_too_large_for_offsets_of_32_bits_is_told_the_largest_that_would_do() -> None:
    from gradferry import _native as native

    world_size, chunk_bytes = 4, 2**30
    shards_as_large_as_a_chunk = world_size * chunk_bytes // 8
    options = engine_options(
        parameters=[parameter("weight", shards_as_large_as_a_chunk, "exact", torch.float64)],
        nodes=[[rank] for rank in range(world_size)],
        chunk_bytes=chunk_bytes,
        workspace_cap_bytes=2**40,
    )
    lanes = {name: native.Lane(Backend(0, world_size)) for name in ("scatter", "gather", "commit")}
    with pytest.raises(gradferry.ConfigError, match="between 3 ranks at most, not 4"):
        native.HostEngine(options, tensors=[], lanes=lanes, memory=None, local_stage="")


def case_backward_in_fork(native: bool) -> tuple[str, bytes]:
    run = Run(Scenario(SCENARIO.weights, native=native))
    for step in range(3):  # DDP communicates by itself when it rebuilds its buckets
        run.step(step)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = attempt(lambda: run.step(3))
        os.write(writing, f"{outcome.error}: {outcome.text}".encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:  # noqa: PTH123
        said = pipe.read()
    os.waitpid(child, 0)
    run.step(3)  # the parent goes on
    return said.decode()


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_backward_in_a_forked_child_raises_and_the_parent_goes_on(
    world_of_2: World, native: bool
) -> None:
    for said in world_of_2.run(case_backward_in_fork, native=native):
        assert said.startswith("StateError"), said
        assert "fork" in said
