"""`gradferry.fsdp.attach` on a device with streams: the fake device under FSDP2, gradients.

Averages over replicas and means of a reduce-scatter are those of the reference or of the host, to
the bit; the machine finds nothing unordered and no memory used after it was freed or held back, and
the exchange is beside the backward pass.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradferry.fsdp.hooks import ReduceScatterHook, ReplicaHook
from outcomes import attempt
from sharded_training import gradients_of
from sharding import SHAPES, Sharding, attached, local_gradients, same
from test_fsdp2 import IDLE, assert_equals_reference, assert_scales_change_no_bit, case_train
from test_fsdp2_reduce_scatter import STEPS, assert_means_equal_the_reference
from test_fsdp2_reduce_scatter import case_train as case_scatter
from watching import WatchedCalls, given_up, in_two_orders
from world import World

Worlds = Callable[[int], World]

Q4 = {"codec": "q4"}
MOMENTUM = {"codec": "sign1", "momentum": 0.9, "warmup_steps": 2}
MODULES = len(SHAPES)
TWO = Sharding(1, 2, device="streamed")
SIGN1 = {"codec": "sign1", "scatter_feedback": "worker", "warmup_steps": 1}


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


def case_scatter_twice(sharding: Sharding, attach: dict[str, Any]) -> list[dict[str, Any]]:
    return in_two_orders(lambda: case_scatter(sharding, attach))


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
def test_means_of_shards_equal_the_reference(
    device_worlds: Worlds, sharding: Sharding, attach: dict[str, Any]
) -> None:
    ranks = device_worlds(sharding.shards).run(case_scatter_twice, sharding=sharding, attach=attach)
    for answers in zip(*ranks, strict=True):
        assert_means_equal_the_reference(answers, sharding, attach)
        for answer in answers:
            assert answer["stats"]["host_waits"] == 0
            assert answer["stats"]["fallbacks"] == 0


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


@dataclasses.dataclass(frozen=True)
class Way:
    """What a hook does on the device.

    Attributes:
        waits: of a call after the first; all are on streams.
        last: the work of the engine that the stream that computes is not behind.
        of_the_engine: names of its work that begin so.
        held_back: how many streams freed memory waits for in a step.
    """

    hook: type
    waits: tuple[str, ...]
    last: str
    of_the_engine: str
    held_back: int

    @property
    def ranks(self) -> int:
        return 4 if self.hook is ReplicaHook else 2


# FSDP2's stream for all-reduces goes on with the average of replicas, and waits for the engine. Of
# a reduce-scatter it keeps what it hands over until its stream is behind the call: memory for the
# gradients of all ranks is free again at once.
WAYS = {
    "replicas": Way(
        ReplicaHook,
        ("ready", "slot", "scatter", "gather", "end"),
        "decode",
        "(encode|reduce|decode) on",
        MODULES,
    ),
    "scatter": Way(
        ReduceScatterHook, ("ready", "slot", "scatter", "end"), "accumulate",
        "(encode|accumulate) on", 0,
    ),
}  # fmt: skip


class Watched(WatchedCalls):
    def __init__(self, way: str, **options: Any) -> None:
        super().__init__()
        self.way = WAYS[way]
        if way == "replicas":
            self.sharding = Sharding(device="streamed")
            self.model, self.state = attached(self.sharding, **{**Q4, **options})
        else:
            self.sharding = TWO
            self.model = TWO.model(TWO.mesh()["shard"])
            options = {**Q4, "all_gather": "off", **options}
            self.state = gradferry.fsdp.attach(self.model, **options)

    def step(
        self, step: int, omitted: int = -1, read_early: int = -1, damages: bool = False
    ) -> list[str]:
        """What the machine finds. `damages`: what is received in the first call."""
        import fake_device

        def before(gradient: torch.Tensor) -> None:
            if self.way.hook is ReplicaHook:
                return
            # Of what FSDP2 does before, the fake device does nothing on its stream.
            gradient.copy_(gradient.clone())
            if damages and not self.calls:  # behind the commit of the step before
                fake_device.backends["streamed"].damage(1, 64 + 5, 0xEE)

        with self.counted(self.way.hook, omitted, read_early, before):
            self.sharding.backward(self.model, step)
        self.gradients = local_gradients(self.model)  # read where an optimizer would
        self.model.zero_grad()
        return self.found()


def case_watched(way: str, **options: Any) -> dict[str, Any]:
    run = Watched(way, **options)
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
        "after": run.step(5 + len(omitted)),
        "host_waits": run.state.stats()["host_waits"],
        "computes_on": run.computes_on.stream_id,
    }


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("replicas", Q4),
        ("replicas", MOMENTUM),
        ("scatter", {"all_gather": "off"}),
        ("scatter", {"all_gather": "q8"}),
    ],
    ids=["replicas", "momentum", "scatter", "scatter and gather"],
)
def test_the_exchange_is_beside_the_backward_pass_and_waits_for_what_it_needs(
    device_worlds: Worlds, way: str, options: dict[str, Any]
) -> None:
    expected = WAYS[way]
    for answer in device_worlds(expected.ranks).run(case_watched, way=way, **options):
        assert answer["found"] == [[], []]
        assert answer["after"] == []
        assert answer["host_waits"] == 0
        assert len(answer["calls"]) == MODULES
        for call in answer["calls"]:
            assert call["host_waits"] == 0
            assert call["allocations"] == 0
        assert answer["calls"][-1]["waits"] == len(expected.waits)
        # With a chunk per module there are as many slots: one is free since the step before.
        assert answer["omitted"] == [name != "slot" for name in expected.waits]
        # When the hook has returned, what computes is not behind the exchange, on another stream.
        computes_on = answer["computes_on"]
        for found in answer["early"]:
            assert found != []
            for race in found:
                copies = f"copy on stream {computes_on}"
                (other,) = {*race.split(" is not ordered with ")} - {copies}
                assert other.startswith(f"{expected.last} on stream ")
                assert other != f"{expected.last} on stream {computes_on}"


def case_memory(way: str) -> tuple[int, list[str]]:
    """How many streams freed memory waits for; and what the machine finds of a call whose gradients
    are freed while the engine works on them.
    """
    run = Watched(way)
    machine, held_back = run.machine, run.held_back(run.step)
    with given_up():
        run.sharding.backward(run.model, 3)
    del run
    gc.collect()
    machine.synchronize()
    # FSDP2's own collectives are given up, too.
    of_the_engine = re.compile(WAYS[way].of_the_engine)
    return held_back, [race for race in machine.races() if of_the_engine.search(race)]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_wait_for_streams_of_the_engine_only_in_a_call_that_is_given_up(
    device_worlds: Worlds, way: str
) -> None:
    expected = WAYS[way]
    answers = device_worlds(expected.ranks).run(case_memory, way=way)
    assert answers == [(expected.held_back, [])] * expected.ranks


# --- errors ---------------------------------------------------------------------------------------


def case_damaged() -> dict[str, Any]:
    """What rank 1 receives in the second step's first collective of gradients is damaged."""
    run: Watched | None = Watched("scatter")
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
