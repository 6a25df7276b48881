"""What a step on a device with streams waits for, allocates and launches.

Without a wait the fake device finds operations that nothing orders, unless another wait covers it.
After warm-up nothing is allocated and the host never waits; a chunk is three launches, or five
between nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mixed import NODES, scenario_on
from scenario import Run, Scenario, Weight
from streaming import PATIENCE, SCENARIO, one_at_a_time, small_chunks
from watching import expect_no_race
from world import World

Worlds = Callable[[int], World]


class Watch:
    """What the calls of a hook add to the fake device's counters. DDP keeps the hook for as long as
    it lives, so the hook must not keep DDP: this knows nothing of the run.
    """

    def __init__(self) -> None:
        from fake_device import machine

        self.fake = machine
        self.omitted: int | None = None  # which wait of the next step's calls
        self.calls: list[dict[str, int]] = []  # of the last step: what each added

    def over(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(state, bucket):  # DDP looks at annotations
            if self.omitted is not None:
                self.fake.omit_wait(self.omitted - sum(call["waits"] for call in self.calls))
            before = {**self.fake.counters(), "chunks": state.stats()["chunks"]}
            future = hook(state, bucket)
            # A thread makes a staged exchange. Asking for its end orders nothing on the device.
            while not future.done():
                time.sleep(1e-4)
            after = {**self.fake.counters(), "chunks": state.stats()["chunks"]}
            self.calls.append({key: after[key] - before[key] for key in after})
            self.fake.omit_wait(-1)
            return future

        return watched


class WatchedRun(Run):
    """A run that looks at the fake device's counters before and after every call of the hook."""

    def __init__(self, scenario: Scenario) -> None:
        import gradferry

        self.watch = Watch()
        self.fake = self.watch.fake
        with mock.patch.object(gradferry, "hook", self.watch.over(gradferry.hook)):
            super().__init__(dataclasses.replace(scenario, native=False))

    @property
    def calls(self) -> list[dict[str, int]]:
        return self.watch.calls

    def step(self, step: int) -> Any:
        self.watch.calls = []
        return super().step(step)


# --- waits ----------------------------------------------------------------------------------------


def races_of(run: WatchedRun, step: int) -> list[str]:
    run.step(step)
    run.fake.synchronize()  # what nobody has waited for has run as well
    return run.fake.races()


def case_omit_waits(scenario: Scenario, steps_before: int) -> dict[str, Any]:
    """After `steps_before`, a step with all waits, and then one without each of them in turn: what
    a wait that is omitted would have ordered is reported, and happens in order all the same.
    Collectives proceed one at a time between nodes, where any two must be ordered.
    """
    from gradferry.ddp import model

    def accept(*_arguments: Any) -> None:
        """Keeps no DDP, as a Mock would."""

    # With every parameter used find_unused_parameters is right without bucket views, too.
    accepting = mock.patch.object(model, "_check_options", new=accept)
    ordered = one_at_a_time(PATIENCE) if scenario.nodes else contextlib.nullcontext()
    with ordered, small_chunks(), accepting:
        run = WatchedRun(scenario)
        for step in range(steps_before):
            run.step(step)
        races = [races_of(run, steps_before)]
        calls = run.calls
        counted = sum(call["waits"] for call in calls)
        # Ranks without peers wait less often, and step with the others.
        most = torch.tensor(counted)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        for number in range(int(most)):
            run.watch.omitted = number
            races.append(races_of(run, steps_before + 1 + number))
            assert [call["waits"] for call in run.calls] == [call["waits"] for call in calls]
    assert not any(races[1 + counted :])  # nothing was omitted there
    chunks = tuple(call["chunks"] for call in calls)
    return {"counted": counted, "chunks": chunks, "races": races[: 1 + counted]}


# Two buckets, of two or three chunks each: more than slots, so that some are used again.
LEAST = dataclasses.replace(
    SCENARIO,
    weights=(Weight("first", (18, 4096)), Weight("bias", (77,)), Weight("second", (11, 4096))),
    codec="bf16",
    rules=(),
    ddp={"bucket_cap_mb": 0.05},
)
# Until buckets are what they will be. In momentum mode decode looks at what was sent, so that slots
# are free later.
PLAIN: dict[str, Any] = {"ddp": {"find_unused_parameters": True, **LEAST.ddp}}
CHECKED = {"check_every": 1}
MOMENTUM: dict[str, Any] = {"options": {"momentum": 0.9, **CHECKED}, "error_feedback": "auto"}
STAGED = {**PLAIN, "device": "staged"}
# Between nodes: a bucket of fewer chunks than slots, and one whose last chunk gets the slot of its
# first. A tile of fp64 fills a message, and owners take turns, so that every chunk has one of each.
CHUNKS = (1, 6)
EXACT: dict[str, Any] = {"codec": "exact", "error_feedback": "auto"}
KINDS = {
    "plain": EXACT,
    "momentum": {**EXACT, "options": {"momentum": 0.9}},  # every chunk has a worker residual
    "staged": {**EXACT, "device": "staged"},
}
# Together they have every kind of rank and of wait: 2 + 1 has ranks without siblings or peers.
QUICK = {("2x2", "plain"), ("2+1", "staged"), ("2+1", "momentum")}


# Of a rank with siblings and peers, of one without peers, and of one without siblings: waits that
# others cover. Those are the one for the last pass, for slots, of collectives of one lane for each
# other, and those that the chain makes; of ranks without one of both most that end a local scatter.
COVERED = {"plain": (36, 28, 43), "momentum": (35, 28, 42), "staged": (8, 11, 8)}


def leaders_of(nodes: str) -> set[int]:
    rails = min(map(len, NODES[nodes]))
    return {rank for ranks in NODES[nodes] for rank in ranks[:rails]}


def between(nodes: str, kind: str) -> Any:
    owners = len(leaders_of(nodes))
    weights = [Weight(f"of_{n}", (n * owners, 4096), torch.float64) for n in CHUNKS]
    plain = Scenario(tuple(weights), device="streamed", ddp={"bucket_cap_mb": 0.01})
    marks = () if (nodes, kind) in QUICK else pytest.mark.slow
    scenario = scenario_on(nodes, plain, **KINDS[kind])
    return pytest.param(scenario, nodes, 2, COVERED[kind], id=f"{nodes}, {kind}", marks=marks)


def flat(
    name: str, steps_before: int, changes: dict[str, Any], covered: int, marks: Any = ()
) -> Any:
    scenario = dataclasses.replace(LEAST, **changes)
    return pytest.param(scenario, None, steps_before, (covered,), id=name, marks=marks)


def num_waits(scenario: Scenario, chunks: tuple[int, ...], peers: bool) -> int:
    """Of a step: for each bucket, once for the last pass, for each chunk's slot, and for each
    collective: on its stream; between nodes twice more, in the chain; on the host for a copy first.
    """
    each = 2 if scenario.device == "staged" else 3 if scenario.nodes else 1
    of_chunk = 4 if scenario.nodes and peers else 2
    all_say = 2 if "check_every" in scenario.options else 1  # commits, and hashes
    return len(chunks) + 1 + all_say * each + sum(chunks) * (1 + of_chunk * each)


@pytest.mark.parametrize(
    ("scenario", "nodes", "steps_before", "covered"),
    [
        flat("plain", 1, PLAIN, 4),
        flat("momentum and check_every", 2, MOMENTUM, 4),
        flat("staged, no residuals", 1, {**STAGED, "error_feedback": "none"}, 7),
        flat("staged, momentum and check_every", 2, {**STAGED, **MOMENTUM}, 6),
        flat("staged", 1, STAGED, 6, pytest.mark.slow),
        flat("check_every", 1, {**PLAIN, "options": CHECKED}, 4, pytest.mark.slow),
        *(between(*case) for case in itertools.product(("2x2", "2+1", "3x2"), KINDS)),
    ],
)
def test_every_wait_is_needed_or_covered(
    device_worlds: Worlds,
    scenario: Scenario,
    nodes: str | None,
    steps_before: int,
    covered: tuple[int, ...],
) -> None:
    arguments = {"scenario": scenario, "steps_before": steps_before}
    answers = device_worlds(scenario.world_size).run(case_omit_waits, **arguments, seconds=300)
    for rank, answer in enumerate(answers):
        peers = rank in leaders_of(nodes) if nodes else True
        siblings = any(len(ranks) > 1 for ranks in scenario.nodes or () if rank in ranks)
        if nodes:
            assert sorted(answer["chunks"]) == [*CHUNKS]
        else:
            assert len(answer["chunks"]) >= 2
            assert sum(answer["chunks"]) > 4
        nothing_omitted, *races = answer["races"]
        assert nothing_omitted == []
        assert answer["counted"] == num_waits(scenario, answer["chunks"], peers)
        place = 0 if not nodes or (peers and siblings) else 1 if siblings else 2
        assert sum(not found for found in races) == covered[place]


# --- allocations and launches ---------------------------------------------------------------------


def case_count(scenario: Scenario, steps: int) -> tuple[int, list[dict[str, int]]]:
    """Launches of the steps after two, and what every call of the hook adds in these. The host
    reads the gradients of each step, so that everything launched has run.
    """
    calls = []
    with small_chunks():
        run = WatchedRun(scenario)
        for step in range(2 + steps):
            if step == 2:
                before = run.fake.counters()["launches"]
            run.step(step)
            calls += run.calls if step >= 2 else []
    expect_no_race()
    assert run.state.stats()["host_waits"] == 0
    return run.fake.counters()["launches"] - before, calls


@pytest.mark.torch_core
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(dataclasses.replace(SCENARIO, codec="q4"), id="four codecs"),
        pytest.param(scenario_on("2+1", SCENARIO, codec="q4", rules=()), id="nodes"),
        pytest.param(
            dataclasses.replace(
                SCENARIO, codec="sign1", error_feedback="auto", options={"momentum": 0.9}
            ),
            id="momentum",
        ),
    ],
)
def test_a_step_allocates_nothing_never_waits_and_takes_three_launches_per_chunk(
    device_worlds: Worlds, scenario: Scenario
) -> None:
    steps = 2
    answers = device_worlds(scenario.world_size).run(case_count, scenario=scenario, steps=steps)
    for rank, (launches, calls) in enumerate(answers):
        assert len(calls) >= 2 * steps
        for call in calls:
            assert call["chunks"] > 0
            assert (call["allocations"], call["host_waits"]) == (0, 0)
        num_chunks = sum(call["chunks"] for call in calls)
        assert num_chunks > 3
        # Between nodes it takes five. Rank 1 has no peers, beside a node of one: it sums nothing.
        each = 5 if scenario.nodes and rank != 1 else 3
        assert launches == each * num_chunks + steps * 2  # the gain, and the last commit
