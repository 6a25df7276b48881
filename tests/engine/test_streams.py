"""The hook on a device with streams: the fake device of tests/engine/streams, under real DDP.

The numbers are those of the reference, whatever order streams run in; what a device
finds comes up on every rank. test_stream_waits.py has the waits and launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from reducing import place_of
from reference import Layout, wire_bytes_per_step
from scenario import Run, Scenario, Weight, assert_bit_equal, train
from test_bit_equality_of_codecs import MIXED
from world import World

Worlds = Callable[[int], World]

# The least there can be: several chunks per bucket, and more than the four slots per step.
CHUNK_BYTES = 32768
WEIGHTS = (
    Weight("first", (200, 300)),
    Weight("bias", (77,)),
    Weight("second", (310, 211)),
    Weight("third", (100, 120)),
)
SCENARIO = Scenario(
    WEIGHTS,
    2,
    steps=4,
    codec="q8",
    error_feedback="both",
    rules=(("second", "exact"), ("third", "bf16")),
    device="streamed",
    ddp={"bucket_cap_mb": 0.2},
)


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


def small_chunks() -> Any:
    """Over either transport."""
    from gradferry.core import device

    def adapted(transport: Any, config: Any) -> Any:
        return dataclasses.replace(config, chunk_bytes=CHUNK_BYTES, equal_scatter=transport.streams)

    return mock.patch.object(device.Transport, "adapted", adapted)


def case_train(scenario: Scenario, seeds: list[int]) -> dict[str, Any]:
    """Trains once per seed of the streams' order; what they gave must be the same."""
    from fake_device import machine

    answers = []
    with small_chunks():
        for seed in seeds:
            machine.set_seed(seed * 100 + dist.get_rank())
            answers.append(train(scenario))
    first = answers[0]
    for answer in answers[1:]:
        assert answer["hashes"] == first["hashes"]
        for one, other in zip(answer["gradients"], first["gradients"], strict=True):
            for a, b in zip(one, other, strict=True):
                assert a.tobytes() == b.tobytes()
    assert machine.races() == []
    return first


@pytest.mark.torch_core
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("device", ["streamed", "staged"])
def test_every_codec_equals_the_reference(worlds: Worlds, device: str, world_size: int) -> None:
    scenario = dataclasses.replace(MIXED, world_size=world_size, device=device)
    answers = worlds(world_size).run(case_train, scenario=scenario, seeds=[1])
    assert_bit_equal(answers, scenario)


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_numbers_do_not_depend_on_the_order_of_streams(worlds: Worlds, native: bool) -> None:
    scenario = dataclasses.replace(SCENARIO, native=native)
    answers = worlds(2).run(case_train, scenario=scenario, seeds=list(range(10)))
    assert_bit_equal(answers, scenario)


def case_in_line(scenario: Scenario) -> dict[str, Any]:
    import fake_device

    fake_device.group("streamed")
    fake_device.backends["streamed"].set_in_line(True)
    try:
        return case_train(scenario, seeds=[1, 2])
    finally:
        fake_device.backends["streamed"].set_in_line(False)


def test_a_backend_without_works_is_waited_for(worlds: Worlds) -> None:
    # DDP's own collectives need a Work, so only the hook's are in line.
    assert_bit_equal(worlds(2).run(case_in_line, scenario=SCENARIO), SCENARIO)


# --- errors ---------------------------------------------------------------------------------------


def case_damage(scenario: Scenario, collective: int, offset: int, value: int) -> dict[str, Any]:
    """What rank 1 receives in one collective of step 0 is damaged."""
    import fake_device
    from outcomes import attempt

    run = Run(scenario)
    if dist.get_rank() == 1:
        fake_device.backends["streamed"].damage(collective, offset, value)
    gradients = [run.step(0), run.step(1)]
    saved = attempt(run.state.state_dict)
    errors = [attempt(lambda: run.step(2)), attempt(run.state.state_dict)]
    assert fake_device.machine.races() == []
    return {"gradients": gradients, "saved": saved, "errors": errors}


def nan_elements(gradients: list[np.ndarray]) -> list[int]:
    return [int(np.isnan(g).sum()) for g in gradients]


@pytest.mark.parametrize(
    ("offset", "value", "field"),
    [
        (64 + 5, 0xEE, "checksum is "),
        (32, 9, "step is 9, expected 0"),
        (40, 7, "chunk is 7, expected 0"),
        (0, 0, "magic is "),
    ],
)
@pytest.mark.parametrize("phase", ["scatter", "gather"])
def test_damage_is_nan_at_once_and_an_error_two_steps_later(
    worlds: Worlds, phase: str, offset: int, value: int, field: str
) -> None:
    scenario = dataclasses.replace(SCENARIO, ddp={})  # one bucket, of one chunk
    answers = worlds(2).run(
        case_damage,
        scenario=scenario,
        collective=0 if phase == "scatter" else 1,
        offset=offset,
        value=value,
    )
    for rank, answer in enumerate(answers):
        nans = nan_elements(answer["gradients"][0])
        # In a scatter the owner of the tiles refuses, so that nobody gets them; of what is gathered
        # every rank has its own copy.
        assert (sum(nans) > 0) == (phase == "scatter" or rank == 1)
        # From then on that rank's tiles are nobody's.
        assert sum(nan_elements(answer["gradients"][1])) > 0
        # Rank 0 has by now seen that rank 1 is in trouble.
        assert answer["saved"].error == "ProtocolError"
        assert (field in answer["saved"].text) == (rank == 1)
        for error in answer["errors"]:
            assert error.error == "ProtocolError"
            assert "rank 1 refused a message from rank 0 (step 0, chunk 0, " + phase in error.text
            assert field in error.text
    # What follows the first line are the rank's last buckets.
    lines = {error.text.splitlines()[0] for answer in answers for error in answer["errors"]}
    assert len(lines) == 1


def case_raise_nonfinite(scenario: Scenario) -> list[Any]:
    from outcomes import attempt

    run = Run(scenario)
    outcomes = [attempt(lambda step=step: run.step(step)) for step in range(4)]
    return [*outcomes, attempt(run.state.state_dict)]


def test_nonfinite_raise_names_the_parameter_one_step_later(worlds: Worlds) -> None:
    scenario = dataclasses.replace(
        SCENARIO, options={"nonfinite": "raise"}, poison={(1, 0, "second"): np.inf}
    )
    for outcomes in worlds(2).run(case_raise_nonfinite, scenario=scenario):
        assert [outcome.error for outcome in outcomes[:3]] == [None] * 3
        for outcome in outcomes[3:]:
            assert outcome.error == "StateError"
            assert "'second' was not finite at step 1" in outcome.text


# --- state ----------------------------------------------------------------------------------------


def case_move_state(scenario: Scenario) -> dict[str, Any]:
    """Three steps on the CPU, then three on the device, and the other way round."""
    on = {
        device: dataclasses.replace(scenario, device=device) for device in ("cpu", scenario.device)
    }
    runs = {device: Run(on[device]) for device in on}
    for run in runs.values():
        for step in range(3):
            run.step(step)
    states = {device: run.state.state_dict() for device, run in runs.items()}
    slot = f"slot_{dist.get_rank()}"
    residuals = [state.pop(slot) for state in states.values()]
    assert states["cpu"] == states[scenario.device]
    for name, residual in residuals[0].items():
        assert torch.equal(residual, residuals[1][name])
    states = {device: {**state, slot: residuals[0]} for device, state in states.items()}
    straight = [runs["cpu"].step(step) for step in range(3, 6)]
    gradients = []
    for device in on:
        run = Run(on[device])
        other = next(name for name in on if name != device)
        run.state.load_state_dict(states[other])
        gradients.append([run.step(step) for step in range(3, 6)])
    return {
        "equal": all(
            a.tobytes() == b.tobytes()
            for moved in gradients
            for one, other in zip(straight, moved, strict=True)
            for a, b in zip(one, other, strict=True)
        ),
        "residual": float(residuals[0]["worker"].abs().sum()),
    }


@pytest.mark.parametrize("device", ["streamed", "staged"])
def test_a_saved_state_moves_between_devices(worlds: Worlds, device: str) -> None:
    scenario = dataclasses.replace(SCENARIO, device=device)
    for answer in worlds(2).run(case_move_state, scenario=scenario):
        assert answer["residual"] > 0
        assert answer["equal"]


def case_loss_scale(scenario: Scenario) -> dict[str, Any]:
    """The same steps on the CPU and on the device, with a loss scale that changes."""
    runs = []
    for device in ("cpu", scenario.device):
        there = dataclasses.replace(scenario, device=device)
        scaler = torch.amp.GradScaler(place_of(there)[1].type, init_scale=1024.0)
        run = Run(dataclasses.replace(there, options={"grad_scaler": scaler}))
        gradients = []
        for step, scale in enumerate((1024.0, 512.0, 512.0, 3.0)):
            scaler._scale.fill_(scale)
            gradients += [gradient.tobytes() for gradient in run.step(step)]
        state = run.state.state_dict()
        runs.append((gradients, state["loss_scale"], state[f"slot_{dist.get_rank()}"]["worker"]))
    return {
        "gradients": runs[0][0] == runs[1][0],
        "residuals": torch.equal(runs[0][2], runs[1][2]),
        "scales": [run[1] for run in runs],
    }


@pytest.mark.parametrize("device", ["streamed", "staged"])
def test_residuals_follow_the_loss_scale_as_on_the_cpu(worlds: Worlds, device: str) -> None:
    scenario = dataclasses.replace(SCENARIO, device=device)
    for answer in worlds(2).run(case_loss_scale, scenario=scenario):
        assert answer == {"gradients": True, "residuals": True, "scales": [3.0, 3.0]}


# --- worlds of one, life and death ----------------------------------------------------------------


def case_alone(scenario: Scenario) -> dict[str, Any]:
    from gradferry.core import device

    plain = Run(scenario)
    untouched = plain.step(0)
    with mock.patch.object(device, "EXCHANGE_WHEN_ALONE", True):
        answer = case_train(scenario, seeds=[1])
    return {"untouched": untouched, "chunks": plain.state.stats()["chunks"], "alone": answer}


def test_a_world_of_one_passes_gradients_on_unless_told_to_exchange(worlds: Worlds) -> None:
    scenario = dataclasses.replace(SCENARIO, world_size=1)
    (answer,) = worlds(1).run(case_alone, scenario=scenario)
    assert answer["chunks"] == 0
    assert answer["alone"]["stats"]["chunks"] > 0
    for index, weight in enumerate(scenario.weights):
        given = scenario.gradient(0, 0, 0, index)
        assert answer["untouched"][index].tobytes() == given.tobytes()
        # Exact parameters survive the exchange; of the others something is withheld.
        exchanged = answer["alone"]["gradients"][0][index]
        assert np.allclose(exchanged, given, rtol=2**-8, atol=np.abs(given).max() / 100)
        lossless = weight.name in ("bias", "second")
        assert (exchanged.tobytes() == given.tobytes()) == lossless


def case_thread_ends(scenario: Scenario) -> dict[str, Any]:
    import gc
    import time

    from world import thread_names

    run = Run(scenario)
    run.step(0)
    before = thread_names()
    del run
    gc.collect()
    deadline = time.monotonic() + 60
    while "gf-staged" in thread_names() and time.monotonic() < deadline:
        pass
    return {"before": before, "after": thread_names()}


def test_the_thread_of_a_staged_hook_ends_with_it(worlds: Worlds) -> None:
    scenario = dataclasses.replace(SCENARIO, device="staged")
    for answer in worlds(2).run(case_thread_ends, scenario=scenario):
        assert "gf-staged" in answer["before"]
        assert "gf-staged" not in answer["after"]


@pytest.mark.parametrize("device", ["streamed", "staged"])
def test_wire_bytes_equal_the_formula_with_one_commit_per_step(worlds: Worlds, device: str) -> None:
    scenario = dataclasses.replace(SCENARIO, world_size=3, device=device)
    layout = Layout([w.describe() for w in WEIGHTS], scenario.codec, 3, scenario.rules)
    index = {weight.name: i for i, weight in enumerate(WEIGHTS)}
    if device == "streamed":
        chunk_bytes = CHUNK_BYTES
        answers = worlds(3).run(case_train, scenario=scenario, seeds=[1])
    else:
        chunk_bytes = 524288  # as on hosts
        answers = worlds(3).run(train, scenario=scenario)
    for rank, answer in enumerate(answers):
        expected = 0
        for step in answer["buckets"]:
            buckets = [[index[name] for name in bucket] for bucket in step]
            expected += wire_bytes_per_step(
                layout, buckets, rank, chunk_bytes, equal_scatter=device == "streamed"
            )
            expected -= 2 * 64 * len(buckets)  # no commit per bucket
        expected += 2 * 64 * (scenario.steps - 1)  # of every step, at the beginning of the next
        assert answer["stats"]["wire_bytes"] == expected


def case_equal_messages(scenario: Scenario) -> dict[str, Any]:
    import fake_device

    before = fake_device.backends["streamed"].num_equal
    answer = case_train(scenario, seeds=[1])
    answer["equal"] = fake_device.backends["streamed"].num_equal - before
    return answer


# 3 * 4096 + 272 elements on two ranks: tiles of 2 x 16384 bytes for one and 16384 + 1088 for the
# other. In chunks of 32768 bytes, the whole is one chunk with 15296 bytes of padding, too many; in
# a bucket of 4096 + 4000 elements, 384 bytes of padding are less than 1/32 of 32512.
@pytest.mark.parametrize(("num_elements", "padded"), [(3 * 4096 + 272, False), (8096, True)])
def test_messages_to_owners_are_padded_where_that_costs_little(
    worlds: Worlds, num_elements: int, padded: bool
) -> None:
    weights = (Weight("weight", (num_elements // 8, 8)),)
    scenario = dataclasses.replace(SCENARIO, weights=weights, codec="exact", rules=())
    answers = worlds(2).run(case_equal_messages, scenario=scenario)
    assert_bit_equal(answers, scenario)
    for answer in answers:
        assert answer["equal"] == (scenario.steps if padded else 0)


def case_unused_parameters(scenario: Scenario) -> Any:
    from outcomes import attempt

    return attempt(lambda: Run(scenario))


@pytest.mark.parametrize("views", [False, True])
def test_unused_parameters_need_bucket_views(worlds: Worlds, views: bool) -> None:
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    scenario = dataclasses.replace(SCENARIO, ddp=ddp)
    for outcome in worlds(2).run(case_unused_parameters, scenario=scenario):
        assert outcome.error == (None if views else "ConfigError")
        assert views or "build the DistributedDataParallel with gradient_as_" in outcome.text
