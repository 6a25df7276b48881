"""`gradferry.fsdp.attach` on a device with streams: the fake device under FSDP2.

The averages are those of the reference, the machine finds nothing unordered and no memory used
after it was freed, and the exchange is beside the backward pass.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradferry.fsdp.hooks import ReplicaHook
from sharding import SHAPES, Sharding, attached, local_gradients
from test_fsdp2 import IDLE, assert_equals_reference, assert_scales_change_no_bit, case_train
from watching import WatchedCalls, given_up, in_two_orders
from world import World

Worlds = Callable[[int], World]

Q4 = {"codec": "q4"}
MOMENTUM = {"codec": "sign1", "momentum": 0.9, "warmup_steps": 2}
MODULES = len(SHAPES)


def case_train_twice(sharding: Sharding, attach: dict[str, Any]) -> list[dict[str, Any]]:
    return in_two_orders(lambda: case_train(sharding, attach))


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("device", "attach", "reduce_dtype"),
    [
        ("streamed", Q4, None),
        ("streamed", MOMENTUM, None),
        ("streamed", Q4, torch.bfloat16),
        ("staged", Q4, None),
        ("staged", MOMENTUM, None),
    ],
    ids=["q4", "momentum", "bf16 reduced", "staged q4", "staged momentum"],
)
def test_averages_equal_the_reference(
    device_worlds: Worlds, device: str, attach: dict[str, Any], reduce_dtype: torch.dtype | None
) -> None:
    sharding = Sharding(reduce_dtype=reduce_dtype, device=device)
    answers = device_worlds(4).run(case_train_twice, sharding=sharding, attach=attach)
    for shard in range(2):
        members = [*answers[shard], *answers[2 + shard]]
        assert_equals_reference(members, shard, sharding, attach)
        assert all(answer["stats"]["chunks"] > 0 for answer in members)
        assert not any(answer["warned"] for answer in members)


@pytest.mark.torch_core
def test_residuals_follow_the_loss_scale_while_a_module_has_no_gradient(
    device_worlds: Worlds,
) -> None:
    assert_scales_change_no_bit(device_worlds(4), hook="replicas", without=IDLE, device="streamed")


def case_resumed_without_a_scaler(device: str) -> list[np.ndarray]:
    """What comes after a state of another loss scale, if a module has no gradient at first."""
    sharding = Sharding(device=device)
    scaler = torch.amp.GradScaler(sharding.place.type, init_scale=2.0**10)
    model, saved = attached(sharding, error_feedback="both", grad_scaler=scaler)
    scaler.scale(model(sharding.targets(0, 0, dist.get_rank()))).backward()
    model, state = attached(sharding, error_feedback="both")
    state.load_state_dict(saved.state_dict())
    dataclasses.replace(sharding, without=IDLE).backward(model, 1)
    model.zero_grad()
    sharding.backward(model, 2)
    return local_gradients(model)


@pytest.mark.torch_core
def test_a_state_with_a_loss_scale_goes_on_without_one_as_on_the_host(
    worlds: Worlds, device_worlds: Worlds
) -> None:
    host = worlds(4).run(case_resumed_without_a_scaler, device="cpu")
    device = device_worlds(4).run(case_resumed_without_a_scaler, device="streamed")
    for one, other in zip(host, device, strict=True):
        assert all(map(np.array_equal, one, other))
        # Not 2^10 times what was withheld: gradients are below 2^4 in size.
        assert max(np.abs(gradient).max(initial=0.0) for gradient in one) < 2**5


class Watched(WatchedCalls):
    def __init__(self, attach: dict[str, Any]) -> None:
        super().__init__()
        self.sharding = Sharding(device="streamed")
        self.model, self.state = attached(self.sharding, **attach)

    def step(self, step: int, omitted: int = -1, read_early: int = -1) -> list[str]:
        with self.counted(ReplicaHook, omitted, read_early):
            self.sharding.backward(self.model, step)
        local_gradients(self.model)  # read where an optimizer would
        self.model.zero_grad()
        return self.found()


def case_overlap(attach: dict[str, Any]) -> dict[str, Any]:
    run = Watched(attach)
    found = [run.step(step) for step in range(2)]
    calls = run.calls
    early = [run.step(2 + number, read_early=number) for number in range(MODULES)]
    return {
        "found": found,
        "calls": calls,
        "early": early,
        "after": run.step(2 + MODULES),
        "host_waits": run.state.stats()["host_waits"],
        "computes_on": run.computes_on.stream_id,
    }


@pytest.mark.torch_core
@pytest.mark.parametrize("attach", [Q4, MOMENTUM], ids=["q4", "momentum"])
def test_the_exchange_is_beside_the_backward_pass(
    device_worlds: Worlds, attach: dict[str, Any]
) -> None:
    for answer in device_worlds(4).run(case_overlap, attach=attach):
        assert answer["found"] == [[], []]
        assert answer["after"] == []
        assert answer["host_waits"] == 0
        assert len(answer["calls"]) == MODULES
        for call in answer["calls"]:
            assert call["host_waits"] == 0
            assert call["allocations"] == 0
        # When the hook has returned, what computes is not behind the exchange, on another stream.
        computes_on = answer["computes_on"]
        for found in answer["early"]:
            assert found != []
            for race in found:
                both = sorted(race.split(" is not ordered with "))
                assert both[0] == f"copy on stream {computes_on}"
                assert both[1].startswith("decode on stream ")
                assert both[1] != f"decode on stream {computes_on}"


# The waits of a call after the first. All of them are on streams.
WAITS = ("ready", "slot", "scatter", "gather", "end")


def case_omit_waits(attach: dict[str, Any]) -> dict[str, Any]:
    """Steps whose last call omits each of its waits in turn."""
    run = Watched(attach)
    found = [run.step(step) for step in range(2)]
    waits = [call["waits"] for call in run.calls]
    omitted = range(sum(waits[:-1]), sum(waits))
    return {
        "found": found,
        "waits": waits[-1],
        "omitted": [bool(run.step(2 + number, omitted=number)) for number in omitted],
    }


def test_every_wait_is_needed(device_worlds: Worlds) -> None:
    for answer in device_worlds(4).run(case_omit_waits, attach=Q4):
        assert answer["found"] == [[], []]
        assert answer["waits"] == len(WAITS)
        # With a chunk per module there are as many slots: one is free since the step before.
        assert answer["omitted"] == [name != "slot" for name in WAITS]


def case_memory(attach: dict[str, Any]) -> tuple[int, list[str]]:
    """How many streams freed memory waits for; and what the machine finds of a call whose gradient
    is freed while the engine works on it.
    """
    run = Watched(attach)
    machine, held_back = run.machine, run.held_back(run.step)
    with given_up():
        run.sharding.backward(run.model, 3)
    del run
    gc.collect()
    machine.synchronize()
    # FSDP2's own reduce-scatter is given up, too.
    return held_back, [race for race in machine.races() if OF_THE_ENGINE.search(race)]


OF_THE_ENGINE = re.compile("(encode|reduce|decode) on")


@pytest.mark.parametrize("attach", [Q4, MOMENTUM], ids=["q4", "momentum"])
def test_a_gradient_waits_for_the_streams_of_the_engine_only_in_a_call_that_is_given_up(
    device_worlds: Worlds, attach: dict[str, Any]
) -> None:
    # FSDP2's stream for all-reduces goes on with the average; it waits for the engine.
    assert device_worlds(4).run(case_memory, attach=attach) == [(MODULES, [])] * 4
