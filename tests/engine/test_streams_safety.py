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
from outcomes import Outcome, attempt
from scenario import ChosenGradients, Run, Scenario, assert_bit_equal
from test_streams import SCENARIO, small_chunks
from test_streams_training import check_scenario
from torch.nn.parallel import DistributedDataParallel
from watching import expect_no_race
from world import World, thread_names

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
    worlds: Worlds, device: str
) -> None:
    scenario = dataclasses.replace(SCENARIO, device=device)
    answers = worlds(2).run(case_abandon, scenario=scenario, seeds=[0, 1])
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
    worlds: Worlds, case: Callable[..., None], world_size: int, options: dict[str, Any]
) -> None:
    scenario = dataclasses.replace(
        SCENARIO, world_size=world_size, options=options, error_feedback="auto"
    )
    worlds(world_size).run(case, scenario=scenario)


def case_abandoned_then_next(scenario: Scenario, options: dict[str, Any]) -> list[str]:
    """A pass whose Futures nobody waits for, and then the next one; what the machine finds of it
    that concerns residuals. Buckets themselves are then used while they are averaged.
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

    changes = {"native": False, "options": {"grad_scaler": scaler, **options}}
    with small_chunks(), mock.patch.object(gradferry, "hook", watched):
        run = Run(dataclasses.replace(scenario, **changes))
        run.step(0)
        run.step(1)
        expect_no_race()
        is_abandoned = True
        run.ddp(run.targets(2)).backward()
        is_abandoned = False
        scaler.update(512.0)
        run.ddp(run.targets(3)).backward()
        machine.synchronize()
        return [race for race in machine.races() if ON_E.search(race) and ON_F.search(race)]


# What uses residuals: on E where a pass begins, and on F.
ON_E, ON_F = re.compile("scale on"), re.compile("reduce on|decode on")


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
def test_residuals_are_not_rescaled_while_an_abandoned_pass_uses_them(
    worlds: Worlds, options: dict[str, Any]
) -> None:
    scenario = dataclasses.replace(SCENARIO, error_feedback="auto" if options else "both")
    answers = worlds(2).run(case_abandoned_then_next, scenario=scenario, options=options)
    assert answers == [[], []]


def case_thread_ends(scenario: Scenario) -> bool:
    run = Run(scenario)
    run.step(0)
    assert "gf-staged" in thread_names()
    del run
    gc.collect()
    deadline = time.monotonic() + 60
    while "gf-staged" in thread_names() and time.monotonic() < deadline:
        pass
    return "gf-staged" not in thread_names()


def test_the_thread_of_a_staged_hook_ends_with_it(worlds: Worlds) -> None:
    scenario = dataclasses.replace(SCENARIO, device="staged")
    assert worlds(2).run(case_thread_ends, scenario=scenario) == [True] * 2


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
    worlds: Worlds,
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
    answers = worlds(scenario.world_size).run(case_damage, scenario=scenario, **damage)
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
            assert f"rank {who} refused a message from rank {sender} (" in error.text
            assert f"step 0, chunk 0, {phase}): {field}" in error.text
    # What follows the first line are the rank's last buckets.
    assert len({error.headline for answer in answers for error in answer["errors"]}) == 1


def case_damaged_check(scenario: Scenario) -> list[Outcome]:
    """A byte of the hashes that rank 1 receives at step 2 is damaged."""
    import fake_device

    run = Run(scenario)
    outcomes = [attempt(lambda step=step: run.step(step)) for step in (0, 1)]
    if dist.get_rank() == 1:
        # The commit of step 1 comes first.
        fake_device.backends["streamed"].damage(1, 64 + 2, 0xEE)
    return outcomes + [attempt(lambda step=step: run.step(step)) for step in range(2, 5)]


def test_damaged_hashes_are_an_error_on_all_ranks_two_steps_later(worlds: Worlds) -> None:
    scenario = check_scenario("streamed", 1, world_size=2, ddp={})
    answers = worlds(2).run(case_damaged_check, scenario=scenario)
    for outcomes in answers:
        assert [o.error for o in outcomes] == [None] * 4 + ["ProtocolError"]
        assert "rank 1 refused a message from rank 0 (step 2" in outcomes[4].text
        assert "check of parameters): checksum is " in outcomes[4].text
    assert len({outcomes[4].headline for outcomes in answers}) == 1


def case_raise_nonfinite(scenario: Scenario) -> list[Outcome]:
    run = Run(scenario)
    outcomes = [attempt(lambda step=step: run.step(step)) for step in range(4)]
    return [*outcomes, attempt(run.state.state_dict)]


def test_nonfinite_raise_names_the_parameter_one_step_later(worlds: Worlds) -> None:
    scenario = dataclasses.replace(
        SCENARIO, options={"nonfinite": "raise"}, poison={(1, 0, "second"): np.inf}
    )
    for outcomes in worlds(2).run(case_raise_nonfinite, scenario=scenario):
        assert [outcome.error for outcome in outcomes] == [None] * 3 + ["StateError"] * 2
        for outcome in outcomes[3:]:
            assert "'second' was not finite at step 1" in outcome.text


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


def case_capture(native: bool) -> Outcome:
    """A backward pass is captured into a graph."""
    from fake_device import machine

    run = Run(dataclasses.replace(SCENARIO, native=native))
    run.step(0)
    run.step(1)
    machine.set_capturing(True)
    try:
        outcome = attempt(lambda: run.step(2))
    finally:
        machine.set_capturing(False)
    machine.synchronize()
    expect_no_race()
    return outcome


def case_without_kernels() -> Outcome:
    """Where every bucket passes through, kernels are not asked for."""
    from gradferry.core import device

    off = dataclasses.replace(SCENARIO, codec="off", error_feedback="auto", rules=())
    with (
        mock.patch.object(device, "_loaded", None),
        mock.patch.object(device, "LIBRARIES", {}),
    ):
        assert attempt(lambda: Run(off)).error is None
        return attempt(lambda: Run(SCENARIO))


def case_moved() -> Outcome:
    """As if the second parameter had moved; torch swaps no memory with the fake device's."""
    import gradferry
    from gradferry import _native

    ddp = DistributedDataParallel(ChosenGradients(SCENARIO))
    assert _native.moved_since_buckets_were_made(ddp.reducer) == []
    moved = [ddp.module.get_parameter("bias")]
    with mock.patch.object(_native, "moved_since_buckets_were_made", return_value=moved):
        return attempt(lambda: gradferry.attach(ddp, "q4"))


def case_group(backend: str, index: int | None = None) -> Outcome:
    """A group of this backend, bound to the device of this index, is asked for its transport."""
    from fake_device import DEVICE
    from gradferry.core.device import transport_of

    group = dist.new_group(backend=backend)
    if index is not None:
        group.bound_device_id = torch.device("fake", index)
    return attempt(lambda: transport_of(DEVICE, group))


def case_unused_parameters() -> Outcome:
    """Unused parameters need bucket views."""
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    assert attempt(lambda: Run(dataclasses.replace(SCENARIO, ddp=ddp))).error is None
    ddp["gradient_as_bucket_view"] = False
    return attempt(lambda: Run(dataclasses.replace(SCENARIO, ddp=ddp)))


CAPTURED = ["being captured into a graph", "run backward() outside of torch.cuda.graph()"]


@pytest.mark.parametrize(
    ("case", "arguments", "says"),
    [
        (case_capture, {"native": True}, CAPTURED),
        (case_capture, {"native": False}, CAPTURED),
        (case_without_kernels, {}, ["no codecs for gradients on '"]),
        (
            case_moved,
            {},
            [
                "parameter 'bias' has moved to cpu",
                "move the whole model first, then wrap it",
            ],
        ),
        (
            case_group,
            {"backend": "cpu:gloo"},
            ["no backend for tensors on 'fake'", "start it with init_process_group("],
        ),
        (
            case_group,
            {"backend": "cpu:gloo,fake:fake_streamed", "index": 1},
            [
                "the model is on fake:0, the process group on fake:1",
                "device_id=torch.device('fake:0')",
            ],
        ),
        (case_unused_parameters, {}, ["build the DistributedDataParallel with gradient_as_"]),
    ],
)
def test_what_a_device_cannot_do_is_refused(
    worlds: Worlds, case: Callable[..., Outcome], arguments: dict[str, Any], says: list[str]
) -> None:
    for outcome in worlds(2).run(case, **arguments):
        assert outcome.error == "ConfigError"
        for text in says:
            assert text in outcome.text
