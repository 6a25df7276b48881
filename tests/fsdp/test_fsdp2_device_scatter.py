"""The reduce-scatter of `gradferry.fsdp.attach` on a device with streams: the fake device under
FSDP2. Means are those of the reference or of the host, to the bit; nothing is unordered, freed too
early or held back.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradferry.fsdp.hooks import ReduceScatterHook
from outcomes import attempt
from sharded_training import case_native, gradients_of
from sharding import SHAPES, Sharding, local_gradients, same
from test_fsdp2_reduce_scatter import STEPS, assert_means_equal_the_reference, case_train
from watching import WatchedCalls, given_up, in_two_orders
from world import World

Worlds = Callable[[int], World]

MODULES = len(SHAPES)
TWO = Sharding(1, 2, device="streamed")
SIGN1 = {"codec": "sign1", "scatter_feedback": "worker", "warmup_steps": 1}


def case_train_twice(sharding: Sharding, attach: dict[str, Any]) -> list[dict[str, Any]]:
    return in_two_orders(lambda: case_train(sharding, attach))


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("sharding", "attach"),
    [
        (Sharding(1, 4, device="streamed"), {"codec": "q4"}),
        (Sharding(1, 4, device="streamed"), SIGN1),
        (
            Sharding(1, 2, passes=2, device="streamed"),
            {"codec": "topk:ratio=0.05", "scatter_feedback": "worker"},
        ),
        (Sharding(1, 2, reduce_dtype=torch.bfloat16, device="streamed"), {"codec": "q8"}),
        (Sharding(1, 2, dtype=torch.bfloat16, device="streamed"), {"codec": "rht:bits=3"}),
        (Sharding(1, 2, device="staged"), {"codec": "q4"}),
    ],
    ids=["q4", "sign1", "topk accumulated", "bf16 reduced", "bf16", "staged"],
)
def test_means_equal_the_reference(
    device_worlds: Worlds, sharding: Sharding, attach: dict[str, Any]
) -> None:
    ranks = device_worlds(sharding.shards).run(case_train_twice, sharding=sharding, attach=attach)
    for answers in zip(*ranks, strict=True):
        assert_means_equal_the_reference(answers, sharding, attach)
        for answer in answers:
            assert answer["stats"]["host_waits"] == 0
            assert answer["stats"]["fallbacks"] == 0


@pytest.mark.torch_core
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["average", "sum"])
def test_exact_is_what_fsdp2_reduces_itself(device_worlds: Worlds, dtype: torch.dtype) -> None:
    reduced = None if dtype == torch.float32 else dtype
    sharding = Sharding(1, 4, reduce_dtype=reduced, whole=True, device="streamed")
    native = device_worlds(4).run(case_native, sharding=sharding, steps=STEPS)
    ours = device_worlds(4).run(case_train, sharding=sharding, attach={"codec": "exact"})
    for one, other in zip(native, ours, strict=True):
        assert same(one, other["gradients"])


ALL_THREE = {"reduce_scatter": "q4", "all_gather": "q8"}


def case_hybrid(device: str, **options: Any) -> dict[str, Any]:
    """Parameters and gradients after steps of hybrid sharding with all three exchanges compressed,
    whose state goes on in another model.
    """
    sharding = Sharding(device=device)
    mesh = sharding.mesh()

    def attached() -> tuple[Any, Any]:
        model = sharding.model(mesh["shard"])
        given = {**ALL_THREE, **options}
        return model, gradferry.fsdp.attach(model, "q4", mesh["replica"], **given)

    model, state = attached()
    gradients = gradients_of(model, sharding, STEPS)
    saved = state.state_dict()
    exchanges = {
        name: (each["chunks"] > 0, each["fallbacks"])
        for name, each in state.stats()["exchanges"].items()
    }
    again, other = attached()
    other.load_state_dict(saved)
    sharding.backward(again, STEPS)
    return {"gradients": gradients, "next": local_gradients(again), "exchanges": exchanges}


def case_hybrid_on_a_device(device: str, **options: Any) -> list[dict[str, Any]]:
    return in_two_orders(lambda: case_hybrid(device, **options))


@pytest.mark.torch_core
@pytest.mark.parametrize("device", ["streamed", "staged"])
def test_hybrid_sharding_with_all_three_is_that_of_the_host(
    worlds: Worlds, device_worlds: Worlds, device: str
) -> None:
    options = {"scatter_feedback": "worker", "error_feedback": "worker"}
    host = worlds(4).run(case_hybrid, device="cpu", **options)
    on_device = device_worlds(4).run(case_hybrid_on_a_device, device=device, **options)
    for one, answers in zip(host, on_device, strict=True):
        for other in answers:
            assert same(one["gradients"], other["gradients"])
            assert same(one["next"], other["next"])
            assert other["exchanges"] == dict.fromkeys(
                ("replicas", "reduce_scatter", "all_gather"), (True, 0)
            )


# --- waits and memory -----------------------------------------------------------------------------


class Watched(WatchedCalls):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = TWO.model(TWO.mesh()["shard"])
        options = {"all_gather": "off", **options}
        self.state = gradferry.fsdp.attach(self.model, "q4", **options)

    def step(
        self, step: int, omitted: int = -1, read_early: int = -1, damages: bool = False
    ) -> list[str]:
        """What the machine finds. `damages`: what is received in the first call."""
        import fake_device

        def before(gradient: torch.Tensor) -> None:
            # Of what FSDP2 does before, the fake device does nothing on its stream.
            gradient.copy_(gradient.clone())
            if damages and not self.calls:  # behind the commit of the step before
                fake_device.backends["streamed"].damage(1, 64 + 5, 0xEE)

        with self.counted(ReduceScatterHook, omitted, read_early, before):
            TWO.backward(self.model, step)
        self.gradients = local_gradients(self.model)  # read where an optimizer would
        self.model.zero_grad()
        return self.found()


# The waits of a call after the first. All of them are on streams.
WAITS = ("ready", "slot", "scatter", "end")


def case_watched(**options: Any) -> dict[str, Any]:
    run = Watched(**options)
    found = [run.step(step) for step in range(2)]
    calls = run.calls
    omitted = range(sum(call["waits"] for call in calls[:-1]), sum(call["waits"] for call in calls))
    return {
        "found": found,
        "calls": calls,
        "early": [run.step(2 + number, read_early=number) for number in range(MODULES)],
        "omitted": [
            bool(run.step(5 + number, omitted=each)) for number, each in enumerate(omitted)
        ],
        "after": run.step(9),
        "host_waits": run.state.stats()["host_waits"],
        "computes_on": run.computes_on.stream_id,
    }


@pytest.mark.torch_core
@pytest.mark.parametrize("gather", ["off", "q8"])
def test_the_exchange_is_beside_the_backward_pass_and_waits_for_what_it_needs(
    device_worlds: Worlds, gather: str
) -> None:
    for answer in device_worlds(2).run(case_watched, all_gather=gather):
        assert answer["found"] == [[], []]
        assert answer["after"] == []
        assert answer["host_waits"] == 0
        assert len(answer["calls"]) == MODULES
        for call in answer["calls"]:
            assert call["host_waits"] == 0
            assert call["allocations"] == 0
        assert answer["calls"][-1]["waits"] == len(WAITS)
        # With a chunk per module there are as many slots: one is free since the step before.
        assert answer["omitted"] == [name != "slot" for name in WAITS]
        # When the hook has returned, what computes is not behind the exchange, on another stream.
        computes_on = answer["computes_on"]
        for found in answer["early"]:
            assert found != []
            for race in found:
                both = sorted(race.split(" is not ordered with "))
                assert both[0].startswith("accumulate on stream ")
                assert both[0] != f"accumulate on stream {computes_on}"
                assert both[1] == f"copy on stream {computes_on}"


OF_THE_ENGINE = re.compile("(encode|accumulate) on")


def case_memory() -> tuple[int, list[str]]:
    """How many streams freed memory waits for; and what the machine finds of a call whose gradients
    are freed while the engine works on them.
    """
    run = Watched()
    machine, held_back = run.machine, run.held_back(run.step)
    with given_up():
        TWO.backward(run.model, 3)
    del run
    gc.collect()
    machine.synchronize()
    return held_back, [race for race in machine.races() if OF_THE_ENGINE.search(race)]


def test_gradients_wait_for_streams_of_the_engine_only_in_a_call_that_is_given_up(
    device_worlds: Worlds,
) -> None:
    # FSDP2 keeps what it hands over until its stream for reduce-scatters is behind the call, as
    # with its own: memory for the gradients of all ranks is free again at once.
    assert device_worlds(2).run(case_memory) == [(0, [])] * 2


# --- errors ---------------------------------------------------------------------------------------


def case_damaged() -> dict[str, Any]:
    """What rank 1 receives in the second step's first collective of gradients is damaged."""
    run: Watched | None = Watched()
    machine = run.machine
    run.step(0)
    run.step(1, damages=dist.get_rank() == 1)
    num_nan = [int(np.isnan(gradient).sum()) for gradient in run.gradients]
    sizes = [gradient.size for gradient in run.gradients]
    errors = [attempt(lambda step=step: run.step(step)) for step in (2, 3)]
    run = None
    gc.collect()
    machine.synchronize()
    machine.races()  # FSDP2 frees at once what it still copies to in a pass that has failed
    return {"num_nan": num_nan, "sizes": sizes, "errors": errors}


def test_a_damaged_message_is_nan_at_once_and_one_error_two_steps_later(
    device_worlds: Worlds,
) -> None:
    answers = device_worlds(2).run(case_damaged)
    for rank, answer in enumerate(answers):
        # All that rank 1 owns of the module that comes first, and nothing else.
        lost = [rank == 1 and module == "" for module, _ in TWO.named()]
        sizes = answer["sizes"]
        assert answer["num_nan"] == [
            size if is_lost else 0 for size, is_lost in zip(sizes, lost, strict=True)
        ]
        none, later = answer["errors"]
        assert none.error is None
        assert later.error == "ProtocolError"
        assert "rank 1 refused a message from rank 0 (step 1, chunk 3, scatter)" in later.text
    assert len({answer["errors"][1].headline for answer in answers}) == 1
