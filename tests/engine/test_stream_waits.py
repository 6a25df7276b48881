"""What a step on a device with streams waits for, allocates and launches: every wait is needed;
after warm-up nothing is allocated and the host never waits; a chunk is three launches, or five
between nodes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mixed import scenario_on
from scenario import Run, Scenario, Weight
from test_streams import SCENARIO, small_chunks
from watching import expect_no_race
from world import World

Worlds = Callable[[int], World]

SLOTS = 3


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


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


def wait_names(scenario: Scenario, calls: list[dict[str, int]]) -> list[str]:
    """What a step after the first waits for, in order.

    A staged exchange waits for collectives on the host, and first for the copy of what it sends.
    """
    staged = scenario.device == "staged"

    def posted(name: str) -> list[str]:
        return [f"{name} copied"] * staged

    names = []
    for number, call in enumerate(calls):
        names.append("ready")
        if number == 0:
            names += ["last pass", *posted("commit"), "commit"]
            if scenario.options.get("check_every"):
                names += [*posted("hashes"), "hashes"]
        for i in range(call["chunks"] + 2):
            if i < call["chunks"]:
                names += ["slot", *posted("scatter")]
            if 1 <= i <= call["chunks"]:
                names += ["scatter", *posted("gather")]
            if i >= 2:
                names.append("gather")
    return names


def needs(scenario: Scenario, names: list[str]) -> list[bool]:
    """Whether a wait of a step orders what nothing else does: all do, but for the last pass and
    some of the slots.

    * Where nothing was abandoned, the last pass is behind `ready`, too.
    * A slot of the step's first chunks is free behind the whole step before, and so says `ready`.
    * A later slot is free when F has decoded the chunk that had it or, without worker residuals,
      reduced it. One thread makes a staged exchange, and waits for F before each all-gather: what
      it enqueues afterwards comes behind all that it had enqueued on F by then. So a slot that is
      free by a reduce is so for certain, and one that is free by a decode if an all-gather was
      posted since: not within a bucket, where E takes the slot before the next chunk is reduced.
    """
    what_frees = "gather" if scenario.error_feedback != "none" else "scatter"
    taken = freed = known_to_host = 0
    needed = []
    for name in names:
        taken += name == "slot"
        freed += name == what_frees  # F has waited for it, and decode or reduce comes next
        if name in ("commit copied", "gather copied"):
            known_to_host = freed
        is_free = name == "slot" and taken - SLOTS <= known_to_host
        needed.append(not is_free and name != "last pass")
    return needed


def races_of(run: WatchedRun, step: int) -> list[str]:
    run.step(step)
    run.fake.synchronize()  # what nobody has waited for has run as well
    return run.fake.races()


def case_omit_waits(scenario: Scenario, steps_before: int) -> dict[str, Any]:
    """After `steps_before`, a step with all waits, and then one without each of them in turn: what
    a wait that is omitted would have ordered is reported, and happens in order all the same.
    """
    from gradferry.ddp import model

    def accept(*_arguments: Any) -> None:
        """Keeps no DDP, as a Mock would."""

    # With every parameter used find_unused_parameters is right without bucket views, too.
    with small_chunks(), mock.patch.object(model, "_check_options", new=accept):
        run = WatchedRun(scenario)
        for step in range(steps_before):
            run.step(step)
        races = [races_of(run, steps_before)]
        calls = run.calls
        counted = sum(call["waits"] for call in calls)
        most = torch.tensor(
            counted
        )  # ranks without peers wait less often, and step with the others
        dist.all_reduce(most, dist.ReduceOp.MAX)
        for number in range(int(most)):
            run.watch.omitted = number
            races.append(races_of(run, steps_before + 1 + number))
            assert [call["waits"] for call in run.calls] == [call["waits"] for call in calls]
    assert not any(races[1 + counted :])  # nothing was omitted there
    return {
        "names": wait_names(scenario, calls),
        "counted": counted,
        "chunks": [call["chunks"] for call in calls],
        "races": races[: 1 + counted],
    }


# Two buckets, of two or three chunks each: more than slots, so that some are used again.
LEAST = dataclasses.replace(
    SCENARIO,
    weights=(Weight("first", (18, 4096)), Weight("bias", (77,)), Weight("second", (11, 4096))),
    codec="bf16",
    rules=(("second", "exact"),),
    ddp={"bucket_cap_mb": 0.05},
)
# Until buckets are what they will be. In momentum mode decode looks at what was sent, so that slots
# are free later.
PLAIN = {"ddp": {"find_unused_parameters": True, **LEAST.ddp}}
CHECKED = {"check_every": 1}
MOMENTUM = {"options": {"momentum": 0.9, **CHECKED}, "error_feedback": "auto"}
# Every chunk has a worker residual, or none has.
STAGED = {**PLAIN, "device": "staged", "rules": ()}


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("changes", "steps_before"),
    [
        pytest.param(PLAIN, 1, id="plain"),
        pytest.param(MOMENTUM, 2, id="momentum and check_every"),
        pytest.param({**STAGED, "error_feedback": "none"}, 1, id="staged, no residuals"),
        pytest.param({**STAGED, **MOMENTUM}, 2, id="staged, momentum and check_every"),
        pytest.param(STAGED, 1, id="staged", marks=pytest.mark.slow),
        pytest.param(
            {**PLAIN, "options": CHECKED},
            1,
            id="check_every",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {**STAGED, "options": CHECKED},
            1,
            id="staged, check_every",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_wait_is_needed(worlds: Worlds, changes: dict[str, Any], steps_before: int) -> None:
    scenario = dataclasses.replace(LEAST, **changes)
    arguments = {"scenario": scenario, "steps_before": steps_before}
    for answer in worlds(2).run(case_omit_waits, **arguments, seconds=300):
        names = answer["names"]
        assert len(answer["chunks"]) >= 2
        assert sum(answer["chunks"]) > SLOTS + 1
        nothing_omitted, *races = answer["races"]
        assert nothing_omitted == []
        assert answer["counted"] == len(names)
        needed = needs(scenario, names)
        found = [bool(of_one) for of_one in races]
        wrong = [
            (number, name) for number, name in enumerate(names) if found[number] != needed[number]
        ]
        assert wrong == []


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
    ("scenario", "per_step"),
    [
        # The gain, and the commit of the step before.
        pytest.param(dataclasses.replace(SCENARIO, codec="q4"), 2, id="four codecs"),
        pytest.param(scenario_on("2+1", SCENARIO, codec="q4", rules=()), 2, id="nodes"),
        pytest.param(
            dataclasses.replace(
                SCENARIO, codec="sign1", error_feedback="auto", options={"momentum": 0.9}
            ),
            2,
            id="momentum",
        ),
    ],
)
def test_a_step_allocates_nothing_never_waits_and_takes_three_launches_per_chunk(
    worlds: Worlds, scenario: Scenario, per_step: int
) -> None:
    steps = 2
    answers = worlds(scenario.world_size).run(case_count, scenario=scenario, steps=steps)
    for rank, (launches, calls) in enumerate(answers):
        assert len(calls) >= 2 * steps
        for call in calls:
            assert call["chunks"] > 0
            assert call["allocations"] == 0
            assert call["host_waits"] == 0
        num_chunks = sum(call["chunks"] for call in calls)
        # Between nodes it takes five. Rank 1 has no peers, beside a node of one: it sums nothing.
        each = 5 if scenario.nodes and rank != 1 else 3
        assert num_chunks > SLOTS
        assert launches == each * num_chunks + steps * per_step
