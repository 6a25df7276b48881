"""`gradferry.fsdp.attach` on the fake device: what a hook waits for, what memory it
holds back, and errors. What it computes is in test_fsdp2.py and test_fsdp2_all_gather.py.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gathering import Watch
from gradferry.fsdp.hooks import GatherHook, ReduceScatterHook, ReplicaHook
from outcomes import attempt
from sharding import SHAPES, Sharding, attached, local_gradients
from watching import WatchedCalls, given_up
from world import Worlds

Q4 = {"codec": "q4"}
MODULES = len(SHAPES)


@dataclasses.dataclass(frozen=True)
class Way:
    """What a hook does on the device.

    Attributes:
        calls: of a step.
        waits: of a call after the first; all are on streams.
        last: the work of the engine that the stream that computes is not behind.
        of_the_engine: names of its work that begin so.
        held_back: how many streams freed memory waits for in a step.
    """

    hook: type
    sharding: Sharding
    calls: int
    waits: tuple[str, ...]
    last: str = ""
    of_the_engine: str = ""
    held_back: int = 0


TWO = Sharding(1, 2, device="streamed")
# FSDP2's stream for all-reduces goes on with the average of replicas, and waits for the engine. Of
# a reduce-scatter it keeps what it hands over until its stream is behind the call: memory for the
# gradients of all ranks is free again at once. It gathers the root once in a step.
WAYS = {
    "replicas": Way(
        ReplicaHook, Sharding(device="streamed"), MODULES,
        ("ready", "slot", "scatter", "gather", "end"), "decode",
        "(encode|reduce|decode) on", MODULES,
    ),
    "scatter": Way(
        ReduceScatterHook, TWO, MODULES, ("ready", "slot", "scatter", "end"), "accumulate",
        "(encode|accumulate) on",
    ),
    "gather": Way(GatherHook, TWO, 2 * MODULES - 1, ("ready", "slot", "gather", "end")),
    # A wait for the memory to fill, and one of FSDP2's stream for that.
    "kept": Way(GatherHook, TWO, 2 * MODULES - 1, ("ready", "end")),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "replicas": Q4,
    "scatter": Q4,
    "gather": {"reduce_scatter": "off", "all_gather": "q4"},
    "kept": {"reduce_scatter": "off", "all_gather": "q4", "keep_gathered": True},
}


class Watched(WatchedCalls):
    def __init__(self, way: str, **options: Any) -> None:
        super().__init__()
        self.way = WAYS[way]
        self.sharding = self.way.sharding
        self.model, self.state = attached(self.sharding, **{**OPTIONS[way], **options})
        self.watch = Watch(self.model)

    def step(
        self, step: int, omitted: int = -1, read_early: int = -1, damages: bool = False
    ) -> list[str]:
        """What the machine finds. `damages`: what is received in the first call."""
        import fake_device

        def before(gradient: torch.Tensor) -> None:
            if self.way.hook is not ReduceScatterHook:
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
    early = range(len(calls)) if run.way.last else ()
    return {
        "found": found,
        "calls": calls,
        "early": [run.step(2 + number, read_early=number) for number in early],
        "omitted": [
            bool(run.step(8 + number, omitted=each)) for number, each in enumerate(omitted)
        ],
        "after": run.step(20),
        "host_waits": run.state.stats()["host_waits"],
        "computes_on": run.computes_on.stream_id,
    }


# Several chunks per module, which take turns in one slot.
CHUNKS = {"codec": "exact", "workspace_cap_mb": 0.06}


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("replicas", {}),
        ("replicas", {"codec": "sign1", "momentum": 0.9, "warmup_steps": 2}),
        ("scatter", {}),
        ("scatter", CHUNKS),
        ("scatter", {"all_gather": "q8"}),
        ("gather", {}),
        ("kept", {}),
    ],
    ids=["replicas", "momentum", "scatter", "chunks", "scatter and gather", "gather", "kept"],
)
def test_the_exchange_is_beside_the_backward_pass_and_waits_for_what_it_needs(
    device_worlds: Worlds, way: str, options: dict[str, Any]
) -> None:
    expected = WAYS[way]
    for answer in device_worlds(expected.sharding.world_size).run(case_watched, way=way, **options):
        assert answer["found"] == [[], []]
        assert answer["after"] == []
        assert answer["host_waits"] == 0
        assert len(answer["calls"]) == expected.calls
        for call in answer["calls"]:
            assert (call["host_waits"], call["allocations"]) == (0, 0)
        omitted, waits = answer["omitted"], expected.waits
        assert (len(omitted) == len(waits)) == (options is not CHUNKS)
        # The first slot of a call is free since an earlier one.
        assert omitted == [not (n == 1 and waits[n] == "slot") for n in range(len(omitted))]
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


@pytest.mark.parametrize("way", ["replicas", "scatter"])
def test_gradients_wait_for_streams_of_the_engine_only_in_a_call_that_is_given_up(
    device_worlds: Worlds, way: str
) -> None:
    ranks = WAYS[way].sharding.world_size
    answers = device_worlds(ranks).run(case_memory, way=way)
    assert answers == [(WAYS[way].held_back, [])] * ranks


def case_damaged(way: str) -> dict[str, Any]:
    """What rank 1 receives first in the second step is damaged: gradients, or the root."""
    import fake_device

    run: Watched | None = Watched(way)
    machine = run.machine
    run.step(0)
    if dist.get_rank() == 1 and way != "scatter":
        # Where forward passes alone gather, the root begins a pass, and the commit comes first.
        fake_device.backends["streamed"].damage(int(way == "kept"), 64 + 5, 0xEE)
    damages = dist.get_rank() == 1 and way == "scatter"
    outcomes = [attempt(lambda: run.step(1, damages=damages))]
    names = [f"{module}.{name}".lstrip(".") for module, name in run.sharding.named()]
    seen = dict(zip(names, run.gradients, strict=True)) if way == "scatter" else run.watch.seen
    lost = [name for name, values in seen.items() if np.isnan(values).any()]
    whole = all(np.isnan(seen[name]).all() for name in lost)
    outcomes += [attempt(lambda step=step: run.step(step)) for step in range(2, 5)]
    run = None
    gc.collect()
    machine.synchronize()
    machine.races()  # FSDP2 frees at once what it still copies to in a pass that has failed
    return {"lost": lost, "whole": whole, "outcomes": outcomes}


# Where the error comes up: two passes of the engine after that of the fault. With kept messages
# each is a step; else the root's gather is part of the backward pass before it, which does not
# gather it.
@pytest.mark.parametrize(("way", "good_steps"), [("scatter", 2), ("gather", 0), ("kept", 2)])
def test_a_damaged_message_is_nan_at_once_and_one_error_later(
    device_worlds: Worlds, way: str, good_steps: int
) -> None:
    answers = device_worlds(2).run(case_damaged, way=way)
    for rank, answer in enumerate(answers):
        # All of the module that comes first, and nothing else; of gradients what rank 1 owns.
        assert set(answer["lost"]) == ({"table", "scale"} if rank == 1 else set())
        assert answer["whole"] == (rank == 0 or way == "scatter")
        none, error = answer["outcomes"][:good_steps], answer["outcomes"][good_steps]
        assert [outcome.error for outcome in none] == [None] * good_steps
        assert error.error == "ProtocolError"
        assert re.search(r"rank 1 \w+ a message from rank 0 \(step 1, chunk ", error.text)
        assert f", {'scatter' if way == 'scatter' else 'gather'})" in error.text
        later = answer["outcomes"][good_steps + 1 :]
        assert {outcome.headline for outcome in later} == {error.headline}
    assert len({answer["outcomes"][-1].headline for answer in answers}) == 1


def case_infinite() -> list[str | None]:
    """One rank has an infinity, of which another one owns the mean, in step 1."""
    model, _ = attached(TWO, nonfinite="raise")
    errors = []
    for step in range(4):
        targets = TWO.targets(step, 0, dist.get_rank())
        if step == 1 and dist.get_rank() == 0:
            targets["blocks.0"]["weight"][-1, 0] = float("inf")  # of rank 1's shard
        outcome = attempt(lambda: model(targets).backward())  # noqa: B023
        assert outcome.error is None or "blocks.0.weight" in outcome.text
        errors.append(outcome.error)
        model.zero_grad()
    return errors


def test_a_mean_that_is_not_finite_is_one_error_on_all_ranks(device_worlds: Worlds) -> None:
    # The commits of that step are read in step 3.
    assert device_worlds(2).run(case_infinite) == [[None] * 3 + ["StateError"]] * 2
