"""What a hook on a device with streams survives, what it refuses before anything is lost, and
which errors come up on every rank.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from mixed import scenario_on
from on_ranks import on_ranks
from outcomes import attempt
from scenario import ChosenGradients, Run, Scenario, assert_bit_equal
from streaming import SCENARIO, small_chunks
from torch.nn.parallel import DistributedDataParallel
from watching import expect_no_race
from world import World, thread_names

Worlds = Callable[[int], World]


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
            expect_no_race()
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
            expect_no_race()
    return run.answer(gradients)


def _place_in(run: Run) -> Callable[[torch.Tensor], int]:
    """Minus the place of a parameter in the order of buckets: the least one comes last."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    order = [name for bucket in run.buckets[-1] for name in bucket]
    return lambda parameter: -order.index(names[id(parameter)])


@pytest.mark.torch_core
@pytest.mark.parametrize("device", ["streamed", "staged"])
def test_an_abandoned_backward_pass_leaves_no_work_on_freed_buckets(
    device_worlds: Worlds, device: str
) -> None:
    scenario = dataclasses.replace(SCENARIO, device=device)
    answers = device_worlds(2).run(case_abandon, scenario=scenario, seeds=[0, 1])
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
    expect_no_race()


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
    expect_no_race()


@pytest.mark.parametrize(
    ("case", "world_size", "options"),
    [(case_abandon_alone, 1, {"momentum": 0.9}), (case_loss_scale_goes_first, 2, {})],
)
def test_what_is_freed_with_work_enqueued_is_not_touched(
    device_worlds: Worlds, case: Callable[..., None], world_size: int, options: dict[str, Any]
) -> None:
    scenario = dataclasses.replace(
        SCENARIO, world_size=world_size, options=options, error_feedback="auto"
    )
    device_worlds(world_size).run(case, scenario=scenario)


# What uses residuals: on E where a pass begins, and on F.
ON_E, ON_F = re.compile("scale on"), re.compile("reduce on|decode on")


@pytest.mark.parametrize(("device", "options"), [("streamed", {}), ("streamed", {"momentum": 0.9})])
@on_ranks(2)
def test_residuals_are_not_rescaled_while_an_abandoned_pass_uses_them(
    device: str, options: dict[str, Any]
) -> None:
    """A pass whose Futures nobody waits for, and then the next one. Buckets themselves are then
    used while they are averaged.
    """
    from fake_device import DEVICE, machine

    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    hook, is_abandoned = gradferry.hook, False

    def watched(state, bucket):  # DDP looks at annotations
        future = hook(state, bucket)
        if not is_abandoned:
            return future
        given_up: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        given_up.set_result(bucket.buffer())
        return given_up

    feedback = "auto" if options else "both"
    changes = {"native": False, "options": {"grad_scaler": scaler, **options}}
    with small_chunks(), mock.patch.object(gradferry, "hook", watched):
        run = Run(dataclasses.replace(SCENARIO, device=device, error_feedback=feedback, **changes))
        run.step(0)
        run.step(1)
        expect_no_race()
        is_abandoned = True
        run.ddp(run.targets(2)).backward()
        is_abandoned = False
        scaler.update(512.0)
        run.ddp(run.targets(3)).backward()
        machine.synchronize()
        assert not [race for race in machine.races() if ON_E.search(race) and ON_F.search(race)]


@pytest.mark.parametrize("device", ["staged"])
@on_ranks(2)
def test_the_thread_of_a_staged_hook_ends_with_it(device: str) -> None:
    run = Run(dataclasses.replace(SCENARIO, device=device))
    run.step(0)
    assert "gf-staged" in thread_names()
    del run
    gc.collect()
    deadline = time.monotonic() + 60
    while "gf-staged" in thread_names():
        assert time.monotonic() < deadline


# --- errors ---------------------------------------------------------------------------------------


def case_damage(
    scenario: Scenario, among: str, collective: int, offset: int, value: int
) -> dict[str, Any]:
    """What rank 1 receives in one collective of step 0 is damaged."""
    import fake_device

    run = Run(scenario)
    if dist.get_rank() == 1:
        siblings, peers = (*fake_device.last_made, None, None)[:2]
        links = {"all": fake_device.backends["streamed"], "siblings": siblings, "peers": peers}
        links[among].damage(collective, offset, value)
    gradients = [run.step(0), run.step(1)]
    saved = None if scenario.nodes else attempt(run.state.state_dict)
    errors = [attempt(lambda: run.step(2)), attempt(run.state.state_dict)]
    expect_no_race()
    num_nan = [sum(int(np.isnan(g).sum()) for g in of_step) for of_step in gradients]
    return {"num_nan": num_nan, "saved": saved, "errors": errors}


STEP_9 = "step is 9, expected 0"


@pytest.mark.parametrize(
    ("among", "collective", "offset", "value", "message", "field", "nan_on"),
    [
        # In a scatter the owner of the tiles refuses, so that nobody gets them; of what is gathered
        # every rank has its own copy.
        pytest.param("all", 0, 64 + 5, 0xEE, "1 from 0, scatter", "checksum is ", 2, id="payload"),
        pytest.param("all", 0, 40, 7, "1 from 0, scatter", "chunk is 7, expected 0", 2, id="chunk"),
        pytest.param("all", 1, 32, 9, "1 from 0, gather", STEP_9, 1, id="step"),
        pytest.param("all", 1, 0, 0, "1 from 0, gather", "magic is ", 1, id="magic"),
        # Nodes (0, 1) and (2, 3). What comes first is of rank 0, or rank 1's own of the peers'.
        pytest.param("siblings", 0, 32, 9, "1 from 0, local scatter", STEP_9, 4, id="local"),
        pytest.param("peers", 0, 32, 9, "1 from 1, scatter", STEP_9, 4, id="peers, scatter"),
        # Rank 0 gets it as it came, and is the first that reports it.
        pytest.param("peers", 1, 32, 9, "0 from 1, gather", STEP_9, 2, id="peers, gather"),
        # Rank 0's header, behind which nothing is lost; then the first message behind it.
        pytest.param("siblings", 1, 32, 9, "1 from 0, forward", STEP_9, 0, id="forward"),
        pytest.param("siblings", 1, 64 + 32, 9, "1 from 0, gather", STEP_9, 1, id="forwarded"),
    ],
)
def test_damage_is_nan_at_once_and_an_error_two_steps_later(
    device_worlds: Worlds,
    among: str,
    collective: int,
    offset: int,
    value: int,
    message: str,
    field: str,
    nan_on: int,
) -> None:
    who, sender, phase = re.fullmatch("(.) from (.), (.*)", message).groups()
    scenario = dataclasses.replace(SCENARIO, ddp={})  # one bucket, of one chunk
    scenario = scenario if among == "all" else scenario_on("2x2", scenario)
    damage = {"among": among, "collective": collective, "offset": offset, "value": value}
    answers = device_worlds(scenario.world_size).run(case_damage, scenario=scenario, **damage)
    assert sum(answer["num_nan"][0] > 0 for answer in answers) == nan_on
    for rank, answer in enumerate(answers):
        # From then on rank 1's tiles are nobody's.
        assert answer["num_nan"][1] > 0
        if answer["saved"]:
            # Rank 0 has by now seen that rank 1 is in trouble.
            assert answer["saved"].error == "ProtocolError"
            assert (field in answer["saved"].text) == (rank == 1)
        for error in answer["errors"]:
            assert error.error == "ProtocolError"
            assert error.headline.startswith(f"rank {who} ")
            assert f" a message from rank {sender} (" in error.headline
            assert f"step 0, chunk 0, {phase}): {field}" in error.text
    # What follows the first line are the rank's last buckets.
    assert len({error.headline for answer in answers for error in answer["errors"]}) == 1


@pytest.mark.parametrize("device", ["streamed"])
@on_ranks(2)
def test_damaged_hashes_are_an_error_on_all_ranks_two_steps_later(device: str) -> None:
    """A byte of the hashes that rank 1 receives at step 2 is damaged."""
    import fake_device

    run = Run(dataclasses.replace(SCENARIO, device=device, options={"check_every": 1}, ddp={}))
    outcomes = [attempt(lambda step=step: run.step(step)) for step in (0, 1)]
    if dist.get_rank() == 1:
        # The commit of step 1 comes first.
        fake_device.backends["streamed"].damage(1, 64 + 2, 0xEE)
    outcomes += [attempt(lambda step=step: run.step(step)) for step in range(2, 5)]
    assert [o.error for o in outcomes] == [None] * 4 + ["ProtocolError"]
    assert outcomes[4].headline.startswith("rank 1 ")
    assert " a message from rank 0 (step 2" in outcomes[4].headline
    assert "check of parameters): checksum is " in outcomes[4].headline


@pytest.mark.parametrize("device", ["streamed"])
@on_ranks(2)
def test_nonfinite_raise_names_the_parameter_two_steps_later(device: str) -> None:
    poison = {(1, 0, "second"): np.inf}
    options = {"nonfinite": "raise"}
    run = Run(dataclasses.replace(SCENARIO, device=device, options=options, poison=poison))
    outcomes = [attempt(lambda step=step: run.step(step)) for step in range(4)]
    outcomes.append(attempt(run.state.state_dict))
    assert [outcome.error for outcome in outcomes] == [None] * 3 + ["StateError"] * 2
    assert all("'second' was not finite at step 1" in outcome.text for outcome in outcomes[3:])


# --- what torch sees ------------------------------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"),
    reason="this torch has no hooks that a collective could pass by",
)
@pytest.mark.parametrize(("device", "native"), [("streamed", True), ("streamed", False)])
@on_ranks(2)
def test_collectives_pass_by_the_hooks_of_the_process_group(device: str, native: bool) -> None:
    import fake_device

    group = fake_device.group(device)
    run = Run(dataclasses.replace(SCENARIO, device=device, native=native))
    run.step(0)
    run.step(1)
    before = run.state.stats()["chunks"]
    seen: list[str] = []
    group.register_pre_hook(17, lambda call: seen.append(str(call.name).rpartition(".")[2].lower()))
    try:
        run.step(2)
    finally:
        group.unregister_pre_hook(17)
    chunks = run.state.stats()["chunks"] - before
    assert chunks > 0
    exchanges = sum("all_to_all" in name or "alltoall" in name for name in seen)
    assert exchanges >= chunks  # a gather of messages of different sizes is one, too
    # And the commit of the step before.
    assert exchanges + sum("gather" in name for name in seen) == 2 * chunks + 1


# --- what is refused ------------------------------------------------------------------------------


def captured(native: bool) -> None:
    """A backward pass is captured into a graph."""
    from fake_device import machine

    run = Run(dataclasses.replace(SCENARIO, native=native))
    run.step(0)
    run.step(1)
    machine.set_capturing(True)
    try:
        run.step(2)
    finally:
        machine.set_capturing(False)
        machine.synchronize()
        expect_no_race()


def without_kernels() -> None:
    """Where every bucket passes through, kernels are not asked for."""
    from gradferry.core import device

    off = dataclasses.replace(SCENARIO, codec="off", error_feedback="auto", rules=())
    with (
        mock.patch.object(device, "_loaded", None),
        mock.patch.object(device, "LIBRARIES", {}),
    ):
        assert attempt(lambda: Run(off)).error is None
        Run(SCENARIO)


def moved() -> None:
    """As if the second parameter had moved; torch swaps no memory with the fake device's."""
    from gradferry import _native

    ddp = DistributedDataParallel(ChosenGradients(SCENARIO))
    assert _native.moved_since_buckets_were_made(ddp.reducer) == []
    away = [ddp.module.get_parameter("bias")]
    with mock.patch.object(_native, "moved_since_buckets_were_made", return_value=away):
        gradferry.attach(ddp, "q4")


def transport_of_group(backend: str, index: int | None = None) -> None:
    """A group of this backend, bound to the device of this index."""
    from fake_device import DEVICE
    from gradferry.core.device import transport_of

    group = dist.new_group(backend=backend)
    if index is not None:
        group.bound_device_id = torch.device("fake", index)
    transport_of(DEVICE, group)


def unused_parameters() -> None:
    """They need bucket views."""
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    assert attempt(lambda: Run(dataclasses.replace(SCENARIO, ddp=ddp))).error is None
    ddp["gradient_as_bucket_view"] = False
    Run(dataclasses.replace(SCENARIO, ddp=ddp))


STREAMS = "cpu:gloo,fake:fake_streamed"
CANNOT: dict[str, tuple[Callable[[], None], list[str]]] = {
    "captured": (lambda: captured(native=True), ["run backward() outside of torch.cuda.graph()"]),
    "captured by a hook of Python": (lambda: captured(native=False), ["captured into a graph"]),
    "no kernels": (without_kernels, ["no codecs for gradients on '"]),
    "moved": (moved, ["'bias' has moved to cpu", "move the whole model first"]),
    "no backend": (
        lambda: transport_of_group("cpu:gloo"),
        ["no backend for tensors on 'fake'", "start it with init_process_group("],
    ),
    "another device": (
        lambda: transport_of_group(STREAMS, 1),
        ["the model is on fake:0, the process group on fake:1", "device_id=torch.device('fake:0')"],
    ),
    "unused": (unused_parameters, ["build the DistributedDataParallel with gradient_as_"]),
}


@pytest.mark.parametrize(("device", "what"), [("streamed", what) for what in CANNOT])
@on_ranks(2)
def test_what_a_device_cannot_do_is_refused(device: str, what: str) -> None:
    import fake_device

    fake_device.group(device)
    call, says = CANNOT[what]
    outcome = attempt(call)
    assert outcome.error == "ConfigError"
    assert all(text in outcome.text for text in says), outcome
