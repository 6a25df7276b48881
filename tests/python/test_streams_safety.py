"""What a hook on a device with streams survives, and what it refuses before anything is lost."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
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
    return {
        "gradients": gradients,
        "hashes": run.hashes,
        "final_hash": run.parameter_hash(),
    }


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
    from fake_device import machine

    scaler = torch.amp.GradScaler("fake", init_scale=1024.0)
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
