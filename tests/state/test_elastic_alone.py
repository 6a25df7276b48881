"""A world of one delivers what a larger world has withheld, and keeps what it cannot deliver."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gradferry.checkpoint import merge
from gradferry.core.codec_spec import parse_codec
from gradferry.ddp.state import bound_to
from reducing import given, make_reducer, place_of, reduce
from reference import narrow, widen
from residual_sums import still_missing
from scenario import Run, Scenario, Weight
from test_elastic import residuals_of
from world import World

Worlds = Callable[[int], World]
WorldsOn = Callable[[str], Worlds]

WEIGHTS = (
    Weight("wide", (70, 64)),
    Weight("bias", (67,)),
    Weight("bf16", (90, 50), torch.bfloat16),
)
MODES: dict[str, dict[str, Any]] = {
    "q4": {"codec": "q4"},
    "q8": {"codec": "q8"},  # keeps the owner residual alone
    "worker": {"codec": "q4", "error_feedback": "worker"},
    "topk": {"codec": "topk:ratio=0.05"},
    "sign1": {"codec": "sign1"},
}


def scenario_of(mode: str, world_size: int, device: str = "cpu") -> Scenario:
    return Scenario(WEIGHTS, world_size, device=device, **MODES[mode])


def case_go_on(
    scenario: Scenario, saved: list[dict] | None, steps: range, on_resize: str = "mean"
) -> dict[str, Any]:
    """Loads, if there is something to load, and averages."""
    reducer = make_reducer(scenario)
    bytes_before = reducer.stats()["residual_bytes"]
    if saved is not None:
        reducer.load_state_dict(merge(saved), on_resize=on_resize)
    return {
        "bytes": (bytes_before, reducer.stats()["residual_bytes"]),
        "loaded": reducer.state_dict(),
        "gradients": reduce(scenario, reducer, steps),
        "saved": reducer.state_dict(),
    }


def average(
    worlds: Worlds,
    scenario: Scenario,
    steps: range,
    saved: list[dict] | None = None,
    on_resize: str = "mean",
) -> list[dict[str, Any]]:
    """`case_go_on` on all ranks of the scenario."""
    arguments = {"scenario": scenario, "saved": saved, "steps": steps, "on_resize": on_resize}
    return worlds(scenario.world_size).run(case_go_on, **arguments)


def missing(states: list[dict], scenario: Scenario) -> np.ndarray:
    return np.concatenate(still_missing(states, scenario))


# Every mode, and every device with what both kinds of residual hold.
DELIVERED = (*((mode, "cpu") for mode in MODES), ("q4", "streamed"), ("topk", "staged"))


@pytest.mark.parametrize(
    ("mode", "device"),
    [
        pytest.param(*row, marks=() if row in DELIVERED else pytest.mark.slow)
        for row in itertools.product(MODES, ("cpu", "streamed", "staged"))
    ],
)
def test_a_world_of_one_delivers_once_and_gives_back_what_it_has_not(
    worlds_on: WorldsOn, mode: str, device: str
) -> None:
    worlds = worlds_on(device)
    two, one = scenario_of(mode, 2, device), scenario_of(mode, 1, device)
    saved = residuals_of(average(worlds, two, range(3)), "saved")
    (alone,) = average(worlds, one, range(3, 6), saved)
    held = still_missing([alone["loaded"]], one)
    before, after = missing(saved, two), np.concatenate(held)
    # The mean of workers and its sum with what the owner has are rounded to fp32.
    assert np.abs(before).max() > 1e-3
    assert np.abs(after - before).max() <= 2 * np.abs(before).max() * 2.0**-23
    assert alone["loaded"]["steps"] == 3
    assert alone["bytes"][0] == 0
    assert alone["bytes"][1] >= 4 * sum(weight.num_elements for weight in WEIGHTS)

    for index, weight in enumerate(WEIGHTS):
        kept = held[index].astype(np.float32)
        for step, got in zip(range(3, 6), alone["gradients"], strict=True):
            wanted = widen(one.gradient(step, 0, 0, index), weight.real_dtype) + kept
            want = narrow(wanted, weight.real_dtype)
            kept = wanted - widen(want, weight.real_dtype)
            assert got[index].tobytes() == want.tobytes(), (weight.name, step)
        left = still_missing([alone["saved"]], one)[index]
        assert np.array_equal(left, kept)
        assert not left.any() or weight.dtype == torch.bfloat16

    for state in (alone["loaded"], alone["saved"]):
        back = average(worlds, two, range(0), [state])
        # Both ranks get what the one had, or the owner does: nothing is rounded.
        assert np.array_equal(missing(residuals_of(back, "loaded"), two), missing([state], one))


def withheld_by_two(worlds: Worlds, scenario: Scenario) -> list[dict]:
    two = dataclasses.replace(scenario, world_size=2, ddp={})
    return residuals_of(average(worlds, two, range(3)), "saved")


def case_unused(scenario: Scenario, saved: list[dict]) -> dict[str, Any]:
    """The first parameter is left out by a pass, with no .grad and, on the CPU, with an old one."""
    run = Run(scenario)
    run.state.load_state_dict(merge(saved), on_resize="mean")
    first = next(run.model.parameters())
    seen = [run.state.state_dict()]
    old = [None] if scenario.device != "cpu" else [None, torch.ones_like(first)]
    for step, grad in enumerate(old):
        run.ddp.zero_grad()
        first.grad = grad
        targets = run.targets(step)
        del targets["wide"]
        run.ddp(targets).backward()
        assert first.grad is grad
        assert grad is None or bool((grad == 1).all())
        seen.append(run.state.state_dict())
    return {"seen": seen, "gradients": run.step(7), "after": run.state.state_dict()}


@pytest.mark.parametrize("device", ["cpu", "streamed"])
def test_what_a_pass_leaves_out_stays_withheld(worlds_on: WorldsOn, device: str) -> None:
    worlds = worlds_on(device)
    # On a device that is where find_unused_parameters works; without an old .grad it drops as well.
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": device != "cpu"}
    scenario = dataclasses.replace(scenario_of("q4", 1, device), ddp=ddp)
    saved = withheld_by_two(worlds, scenario)
    (answer,) = worlds(1).run(case_unused, scenario=scenario, saved=saved)
    held = [still_missing([state], scenario)[0] for state in answer["seen"]]
    assert held[0].any()
    assert all(np.array_equal(held[0], each) for each in held)
    given = scenario.gradient(7, 0, 0, 0)
    assert answer["gradients"][0].tobytes() == (given + held[0].astype(np.float32)).tobytes()
    assert not still_missing([answer["after"]], scenario)[0].any()


def case_infinite(scenario: Scenario, saved: list[dict], scale: float) -> dict[str, Any]:
    """A call with infinities alone, and one that is finite."""
    scaler = torch.amp.GradScaler(place_of(scenario)[1].type, init_scale=scale)
    reducer = make_reducer(scenario, grad_scaler=scaler)
    reducer.load_state_dict(merge(saved), on_resize="mean")
    loaded = reducer.state_dict()
    reducer.all_reduce([torch.full_like(tensor, torch.inf) for tensor in given(scenario, 3)])
    kept = reducer.state_dict()
    gradients = reduce(scenario, reducer, range(4, 5))[0]
    return {
        "states": [loaded, kept],
        "gradients": gradients,
        "after": reducer.state_dict(),
    }


@pytest.mark.parametrize("device", ["cpu", "streamed"])
def test_infinite_steps_deliver_nothing_and_units_are_those_of_the_scale(
    worlds_on: WorldsOn, device: str
) -> None:
    worlds = worlds_on(device)
    scenario = scenario_of("q4", 1, device)
    saved = withheld_by_two(worlds, scenario)  # without a scale, which is 1
    (answer,) = worlds(1).run(case_infinite, scenario=scenario, saved=saved, scale=8.0)
    held = [still_missing([state], scenario) for state in answer["states"]]
    for state, values in zip(answer["states"], held, strict=True):
        for before, now in zip(held[0], values, strict=True):
            assert np.array_equal(before, now / max(state["loss_scale"], 1.0))
    for index in (0, 1):
        want = scenario.gradient(4, 0, 0, index) + 8 * held[0][index].astype(np.float32)
        assert answer["gradients"][index].tobytes() == want.tobytes()
        assert not still_missing([answer["after"]], scenario)[index].any()


def test_exact_warmup_steps_leave_what_is_withheld_alone(worlds: Worlds) -> None:
    options = {"warmup_steps": 5}
    two, one = (dataclasses.replace(scenario_of("q4", size), options=options) for size in (2, 1))
    saved = residuals_of(average(worlds, two, range(7)), "saved")
    for state in saved:
        state["steps"] = 4  # as if residuals were left from before
    (alone,) = average(worlds, one, range(4, 6), saved)
    held = still_missing([alone["loaded"]], one)[0].astype(np.float32)
    first, second = (one.gradient(step, 0, 0, 0) for step in (4, 5))
    assert alone["gradients"][0][0].tobytes() == first.tobytes()
    assert alone["gradients"][1][0].tobytes() == (second + held).tobytes()


@pytest.mark.parametrize("device", ["cpu", "streamed"])
def test_a_world_of_one_takes_no_memory_before_it_has_something_to_deliver(
    worlds_on: WorldsOn, device: str
) -> None:
    worlds = worlds_on(device)
    one = scenario_of("q4", 1, device)
    (first,) = average(worlds, one, range(2))
    (again,) = average(worlds, one, range(2, 3), [first["saved"]])
    assert first["bytes"] == again["bytes"] == (0, 0)
    assert again["saved"]["steps"] == 3
    assert len(again["saved"]["slot_0"]["worker"]) == 0
    for index in range(len(WEIGHTS)):
        assert again["gradients"][0][index].tobytes() == one.gradient(2, 0, 0, index).tobytes()
    saved = withheld_by_two(worlds, one)
    (dropped,) = average(worlds, one, range(0), saved, "drop")
    assert dropped["bytes"] == (0, 0)
    assert dropped["loaded"]["steps"] == 3


def case_auto(scenario: Scenario, saved: list[dict] | None) -> dict[str, Any]:
    """Trains with q4 chosen, or alone, and says what it has loaded."""
    run = Run(scenario)
    bound = bound_to(run.state)
    if saved is not None:
        run.state.load_state_dict(merge(saved), on_resize="mean")
    loaded = run.state.state_dict()
    if bound.chooser is not None and saved is None:
        bound.running.switch(bound.hook, parse_codec("q4"), 0)
        bound.chooser.choice = dataclasses.replace(
            bound.chooser.choice, codec=parse_codec("q4"), made=True, next_check=1000
        )
    gradients = run.step(0 if saved is None else 1)
    return {"loaded": loaded, "gradients": gradients, "saved": run.state.state_dict()}


def test_a_choice_passes_through_a_world_of_one(worlds: Worlds) -> None:
    auto = Scenario(WEIGHTS, 2, codec="auto")
    one = dataclasses.replace(auto, world_size=1)
    q4, q4_alone = (dataclasses.replace(each, codec="q4") for each in (auto, one))
    saved = residuals_of(worlds(2).run(case_auto, scenario=auto, saved=None), "saved")
    (alone,) = worlds(1).run(case_auto, scenario=one, saved=saved)
    held = still_missing([alone["loaded"]], q4_alone)
    assert np.abs(np.concatenate(held)).max() > 1e-3
    want = one.gradient(1, 0, 0, 0) + held[0].astype(np.float32)
    assert alone["gradients"][0].tobytes() == want.tobytes()
    for state in (alone["loaded"], alone["saved"]):
        assert state["choice"] == saved[0]["choice"]
        back = worlds(2).run(case_auto, scenario=auto, saved=[state])
        again = residuals_of(back, "loaded")
        assert again[0]["choice"]["codec"] == saved[0]["choice"]["codec"]
        assert np.array_equal(missing(again, q4), missing([state], q4_alone))
