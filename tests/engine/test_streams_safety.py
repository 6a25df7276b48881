"""What a hook on a device with streams survives, and what it refuses before anything is lost."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outcomes import attempt
from scenario import Run, assert_bit_equal
from test_streams import SCENARIO, small_chunks
from world import World

Worlds = Callable[[int], World]


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


class _OutOfMemoryError(RuntimeError):
    """What a backward pass is abandoned for."""


def case_abandon(scenario: Any, seeds: list[int]) -> dict[str, Any]:
    """Abandons a backward pass on every rank at the same place, then builds DDP anew and trains."""
    from fake_device import machine

    def fail(_: torch.Tensor) -> None:
        raise _OutOfMemoryError

    with small_chunks():
        for seed in seeds:
            machine.set_seed(seed)
            run = Run(scenario)
            run.step(0)
            run.step(1)  # its buckets are those of all later steps
            assert machine.races() == []
            last = min(run.ddp.parameters(), key=_place_in(run))
            handle = last.register_hook(fail)
            before = run.state.stats()["buckets"]
            outcome = attempt(lambda run=run: run.step(2))
            assert outcome.error == "_OutOfMemoryError"
            assert run.state.stats()["buckets"] > before
            handle.remove()
            del run, last, handle
            gc.collect()
            run = Run(scenario)
            gradients = [run.step(step) for step in range(scenario.steps)]
            assert machine.races() == []
    return run.answer(gradients)


def _place_in(run: Run) -> Callable[[torch.Tensor], int]:
    """Minus the place of a parameter in the order of buckets: the least one comes last."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    order = [name for bucket in run.buckets[-1] for name in bucket]
    return lambda parameter: -order.index(names[id(parameter)])


@pytest.mark.torch_core
@pytest.mark.parametrize("device", ["streamed", "staged"])
def test_an_abandoned_backward_pass_leaves_no_work_on_freed_buckets(
    worlds: Worlds, device: str
) -> None:
    scenario = dataclasses.replace(SCENARIO, device=device)
    answers = worlds(2).run(case_abandon, scenario=scenario, seeds=list(range(5)))
    assert_bit_equal(answers, scenario)


def case_abandon_alone(scenario: Any) -> None:
    """In a world of one, momentum mode works on the bucket as well."""
    from fake_device import machine

    run = Run(scenario)
    run.step(0)
    run.step(1)
    targets = run.targets(2)
    run.ddp(targets).backward()
    run.ddp.zero_grad(set_to_none=True)
    del run
    gc.collect()
    machine.synchronize()
    assert machine.races() == []


def case_loss_scale_goes_first(scenario: Any) -> None:
    """The scale of a GradScaler is read on E when its last owner is gone."""
    from fake_device import DEVICE, machine

    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    run = Run(dataclasses.replace(scenario, options={"grad_scaler": scaler}))
    run.step(0)
    run.ddp(run.targets(1)).backward()
    del run, scaler
    gc.collect()
    machine.synchronize()
    assert machine.races() == []


@pytest.mark.parametrize("case", [case_abandon_alone, case_loss_scale_goes_first])
def test_what_is_freed_with_work_enqueued_is_not_touched(
    worlds: Worlds, case: Callable[..., None]
) -> None:
    alone = case is case_abandon_alone
    options = {"momentum": 0.9} if alone else {}
    world_size = 1 if alone else 2
    scenario = dataclasses.replace(
        SCENARIO, world_size=world_size, options=options, error_feedback="auto"
    )
    worlds(world_size).run(case, scenario=scenario)


# --- what torch sees ------------------------------------------------------------------------------


def case_hooks_of_the_group(scenario: Any) -> dict[str, Any]:
    """Which operations pass by the hooks of DDP's group in a step, and how many chunks it had."""
    import fake_device

    group = fake_device.group("streamed")
    run = Run(scenario)
    run.step(0)
    run.step(1)
    before = run.state.stats()["chunks"]
    seen: list[str] = []
    group.register_pre_hook(17, lambda call: seen.append(str(call.name)))
    try:
        run.step(2)
    finally:
        group.unregister_pre_hook(17)
    return {"seen": seen, "chunks": run.state.stats()["chunks"] - before}


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"),
    reason="this torch has no hooks that a collective could pass by",
)
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_collectives_pass_by_the_hooks_of_the_process_group(worlds: Worlds, native: bool) -> None:
    scenario = dataclasses.replace(SCENARIO, native=native)
    for answer in worlds(2).run(case_hooks_of_the_group, scenario=scenario):
        assert answer["chunks"] > 0
        seen = [name.rpartition(".")[2].lower() for name in answer["seen"]]
        assert sum("all_to_all" in name or "alltoall" in name for name in seen) == answer["chunks"]
        # And the commit of the step before.
        gathers = sum("gather" in name for name in seen)
        assert gathers == answer["chunks"] + 1


# --- what is refused ------------------------------------------------------------------------------


def case_capture(scenario: Any) -> Any:
    from fake_device import machine

    run = Run(scenario)
    run.step(0)
    run.step(1)
    machine.set_capturing(True)
    try:
        outcome = attempt(lambda: run.step(2))
    finally:
        machine.set_capturing(False)
    machine.synchronize()
    assert machine.races() == []
    return outcome


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_a_backward_pass_that_is_captured_into_a_graph_is_refused(
    worlds: Worlds, native: bool
) -> None:
    scenario = dataclasses.replace(SCENARIO, native=native)
    for outcome in worlds(2).run(case_capture, scenario=scenario):
        assert outcome.error == "ConfigError"
        assert "being captured into a graph" in outcome.text
        assert "run backward() outside of torch.cuda.graph()" in outcome.text


def case_off_without_kernels(scenario: Any) -> list[Any]:
    """Where every bucket passes through, kernels are not asked for."""
    from unittest import mock

    from fake_device import DEVICE
    from gradferry.core import device

    off = dataclasses.replace(scenario, codec="off", error_feedback="auto", rules=())
    with (
        mock.patch.object(device, "_loaded", None),
        mock.patch.object(device, "LIBRARIES", {}),
    ):
        return [attempt(lambda: Run(off)), attempt(lambda: Run(scenario)), DEVICE.type]


def test_codec_off_needs_no_kernels(worlds: Worlds) -> None:
    for off, compressed, kind in worlds(2).run(case_off_without_kernels, scenario=SCENARIO):
        assert off.error is None
        assert compressed.error == "ConfigError"
        assert f"no codecs for gradients on {kind!r}" in compressed.text


def case_moved() -> tuple[int, Any]:
    """As if the second parameter had moved; torch swaps no memory with the fake device's."""
    from unittest import mock

    import gradferry
    from gradferry import _native
    from scenario import ChosenGradients
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(ChosenGradients(SCENARIO))
    none = _native.moved_since_buckets_were_made(ddp.reducer)
    moved = [ddp.module.get_parameter("bias")]
    with mock.patch.object(_native, "moved_since_buckets_were_made", return_value=moved):
        return len(none), attempt(lambda: gradferry.attach(ddp, "q4"))


def test_a_model_moved_after_it_was_wrapped_is_refused(world_of_2: World) -> None:
    for none, outcome in world_of_2.run(case_moved):
        assert none == 0
        assert outcome.error == "ConfigError"
        assert "parameter 'bias' has moved to cpu" in outcome.text
        assert "move the whole model first, then wrap it" in outcome.text


def case_no_backend() -> Any:
    from fake_device import DEVICE
    from gradferry.core.device import transport_of

    group = dist.new_group(backend="cpu:gloo")
    return attempt(lambda: transport_of(DEVICE, group))


def case_bound_elsewhere() -> Any:
    from fake_device import DEVICE
    from gradferry.core.device import transport_of

    group = dist.new_group(backend="cpu:gloo,fake:fake_streamed")
    group.bound_device_id = torch.device("fake", 1)
    return attempt(lambda: transport_of(DEVICE, group))


@pytest.mark.parametrize(
    ("case", "says", "advises"),
    [
        (case_no_backend, "no backend for tensors on 'fake'", "start it with init_process_group("),
        (
            case_bound_elsewhere,
            "the model is on fake:0, the process group on fake:1",
            "device_id=torch.device('fake:0')",
        ),
    ],
)
def test_a_group_that_cannot_serve_the_device_is_refused(
    worlds: Worlds, case: Callable[[], Any], says: str, advises: str
) -> None:
    for outcome in worlds(2).run(case):
        assert outcome.error == "ConfigError"
        assert says in outcome.text
        assert advises in outcome.text
