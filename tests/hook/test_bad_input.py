"""Wrong use of attach, HookState and hook: the error is typed, and says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_options import engine_options, parameter
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from scenario import ChosenGradients, Run, Scenario, Weight, hooked
from torch._C._distributed_c10d import Backend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from world import World

SCENARIO = Scenario((Weight("first", (40, 40)), Weight("second", (9,))))


def plain_ddp(**options: object) -> DistributedDataParallel:
    return DistributedDataParallel(ChosenGradients(SCENARIO), **options)


def case_bad_options(rows: list[dict]) -> list[Outcome]:
    return [attempt(lambda row=row: gradferry.attach(plain_ddp(), **row)) for row in rows]


BAD_OPTIONS = (
    ({"codec": "q44"}, ("q44", "q4")),
    ({"codec": "exat"}, ("exat", "exact")),
    ({"codec": "q4:blok=3"}, ("q4", "blok")),
    ({"codec": ""}, ("codec",)),
    ({"codec": "aut"}, ("did you mean 'auto'?", ", off, auto")),
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
    ({"workspace_cap_mb": 0.01}, ("more than the 10485 that", "attach with workspace_cap_mb=1,")),
    *(
        ({"check_every": every}, ("must be a whole number, 0 or more",))
        for every in (-1, 1.5, True)
    ),
    ({"warmup": "q8"}, ("warmup='q8'", "there are none", "warmup_steps=")),
    ({"warmup_steps": 5, "warmup": "q4"}, ("warmup='q4' changes nothing", "momentum=")),
    (
        {"codec": "exact", "warmup_steps": 5, "warmup": "q8", "momentum": 0.9},
        ("warmup='q8' has nothing to compress",),
    ),
    ({"codec": "off", "warmup_steps": 5, "warmup": "q8"}, ("'off' passes gradients through",)),
)


def test_attach_names_the_wrong_value_and_the_closest_right_one(world_of_2: World) -> None:
    answers = world_of_2.run(case_bad_options, rows=[options for options, _ in BAD_OPTIONS])
    for (options, parts), one, other in zip(BAD_OPTIONS, *answers, strict=True):
        assert one.error == other.error == "ConfigError", options
        assert one.text == other.text, options
        for part in parts:
            assert part in one.text, (options, one.text)


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


def attach_twice() -> None:
    ddp = plain_ddp()
    hooked(ddp)
    hooked(ddp)


def attach_after_python_hook() -> None:
    ddp = plain_ddp()
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    hooked(ddp)


def attach_after_builtin_hook() -> None:
    ddp = plain_ddp()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    hooked(ddp)


def attach_to_mixed_precision() -> None:
    ddp = plain_ddp()
    # The argument would do this, but DDP itself takes it on accelerators only.
    ddp.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)
    hooked(ddp)


def attach_with_optimizer_in_backward() -> None:
    model = ChosenGradients(SCENARIO)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    hooked(DistributedDataParallel(model))


def attach_to_a_module() -> None:
    hooked(ChosenGradients(SCENARIO))


def attach_to_delayed_all_reduce() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    delayed = list(model.named_parameters())
    model.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    options = {"delay_all_reduce_named_params": delayed}
    hooked(DistributedDataParallel(model, param_to_hook_all_reduce=model[0].weight, **options))


def attach_with_other_buckets() -> None:
    hooked(plain_ddp(bucket_cap_mb=1 if dist.get_rank() == 0 else 25))


def bind_a_bound_state() -> None:
    gradferry.HookState("q4", plain_ddp()).bind(plain_ddp())


def register_for_another_model() -> None:
    registered(gradferry.HookState("q4", plain_ddp()), plain_ddp())


def register_for_the_same_model_wrapped_again() -> None:
    first = plain_ddp()
    registered(gradferry.HookState("q4", first), DistributedDataParallel(first.module))


def register_the_state_of_a_native_hook() -> None:
    first = plain_ddp()
    registered(hooked(first), DistributedDataParallel(first.module))


def register_for_two_models() -> None:
    first = plain_ddp()
    state = gradferry.HookState("q4", first)
    registered(state, first)
    registered(state, plain_ddp())


def register_in_a_compress_wrapper() -> None:
    ddp = plain_ddp()
    wrapped = default_hooks.fp16_compress_wrapper(gradferry.hook)
    registered(gradferry.HookState("q4", ddp), ddp, wrapped)


def change_the_group() -> None:
    ddp = plain_ddp()
    hooked(ddp)
    ddp._update_process_group(dist.group.WORLD)


def backward_unbound() -> None:
    registered(gradferry.HookState("q4"), plain_ddp())


def backward_without_state() -> None:
    registered(None, plain_ddp())


def pass_no_function() -> None:
    hooked(plain_ddp()).on_step(3)


def registered(state: Any, ddp: DistributedDataParallel, hook: Any = gradferry.hook) -> None:
    """Also runs a backward pass, which is what fails."""
    ddp.register_comm_hook(state, hook)
    ddp({w.name: torch.ones(w.shape) for w in SCENARIO.weights}).backward()


# What is done, how it fails, and parts of the text.
MISUSES = {
    attach_twice: ("ConfigError", "hook"),
    attach_after_python_hook: ("ConfigError", "hook"),
    attach_after_builtin_hook: ("ConfigError", "hook"),
    attach_to_mixed_precision: ("ConfigError", "mixed_precision"),
    attach_with_optimizer_in_backward: ("ConfigError", "optimizer", "backward"),
    attach_to_delayed_all_reduce: ("ConfigError", "delay_all_reduce_named_params"),
    attach_to_a_module: ("ConfigError", "DistributedDataParallel", "ChosenGradients"),
    attach_with_other_buckets: (
        "RankMismatchError", "rank 1 differs from rank 0 in bucket_cap_mb: 25.0 instead of 1.0",
    ),
    bind_a_bound_state: ("StateError", "bound"),
    register_for_another_model: ("StateError", "to another Distr", "HookState(codec, ddp)"),
    register_for_the_same_model_wrapped_again: ("StateError", "to another Distr"),
    register_the_state_of_a_native_hook: ("StateError", "to another Distr"),
    register_for_two_models: ("StateError", "to another Distr", "a HookState of its own"),
    register_in_a_compress_wrapper: (
        "StateError", "of Half on cpu", "do not wrap the hook in a compress wrapper",
    ),
    change_the_group: ("StateError", "build a new DistributedDataParallel"),
    backward_unbound: ("StateError", "bind", "GradferryCallback"),
    backward_without_state: ("ConfigError", "is None", "gradferry.HookState('q4', ddp)"),
    pass_no_function: ("ConfigError", "on_step(3): pass a function"),
}  # fmt: skip


@pytest.mark.torch_core
@pytest.mark.parametrize("misuse", MISUSES)
@on_ranks()
def test_wrong_use_raises_a_typed_error_with_advice(misuse: Callable[[], None]) -> None:
    error, *parts = MISUSES[misuse]
    outcome = attempt(misuse)
    assert outcome.error == error, outcome
    for part in parts:
        assert part in outcome.text, outcome


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
