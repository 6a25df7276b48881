"""What a step on a device with streams waits for, allocates and launches: every wait is needed;
after warm-up nothing is allocated and the host never waits; a chunk is three launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from scenario import Run, Scenario
from test_streams import SCENARIO, small_chunks
from world import World

Worlds = Callable[[int], World]

SLOTS = 3


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


class WatchedRun(Run):
    """A run that looks at the fake device's counters before and after every call of the hook."""

    def __init__(self, scenario: Scenario) -> None:
        import gradferry
        from fake_device import machine

        self.fake = machine
        self.omitted: int | None = None  # which wait of the next step's calls
        self.calls: list[dict[str, int]] = []  # of the last step: what each added
        with mock.patch.object(gradferry, "hook", self.watch(gradferry.hook)):
            super().__init__(dataclasses.replace(scenario, native=False))

    def watch(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(state, bucket):  # DDP looks at annotations
            if self.omitted is not None:
                self.fake.omit_wait(self.omitted - sum(call["waits"] for call in self.calls))
            before = {**self.fake.counters(), "chunks": state.stats()["chunks"]}
            future = hook(state, bucket)
            after = {**self.fake.counters(), "chunks": state.stats()["chunks"]}
            self.calls.append({key: after[key] - before[key] for key in after})
            self.fake.omit_wait(-1)
            return future

        return watched

    def step(self, step: int) -> Any:
        self.calls = []
        return super().step(step)


def wait_names(calls: list[dict[str, int]]) -> list[str]:
    """What a step after the first waits for, in order."""
    names = []
    for number, call in enumerate(calls):
        names += ["ready", "commit"] if number == 0 else ["ready"]
        chunks = call["chunks"]
        for i in range(chunks + 2):
            names += (
                ["slot"] * (i < chunks) + ["scatter"] * (1 <= i <= chunks) + ["gather"] * (i >= 2)
            )
    return names


def case_omit_waits(scenario: Scenario, steps_before: int) -> dict[str, Any]:
    """A run for every wait of the step that comes after `steps_before`, without that wait."""
    from gradferry.ddp import model

    # With every parameter used find_unused_parameters is right without bucket views, too.
    with small_chunks(), mock.patch.object(model, "_check_options"):
        run = WatchedRun(scenario)
        for step in range(steps_before + 1):
            run.step(step)
        names = wait_names(run.calls)
        counted = sum(call["waits"] for call in run.calls)
        chunks = [call["chunks"] for call in run.calls]
        races = [run.fake.races()]
        for number in range(counted):
            run = WatchedRun(scenario)
            for step in range(steps_before):
                run.step(step)
            run.omitted = number
            run.step(steps_before)
            races.append(run.fake.races())
    return {"names": names, "counted": counted, "chunks": chunks, "races": races}


# Until buckets are what they will be. In momentum mode decode looks at what was sent, so that slots
# are free later.
PLAIN = {"ddp": {"find_unused_parameters": True, **SCENARIO.ddp}}
MOMENTUM = {"options": {"momentum": 0.9, "exact_skip": True}, "error_feedback": "auto"}


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("changes", "steps_before"), [(PLAIN, 1), (MOMENTUM, 2)], ids=["plain", "momentum"]
)
def test_every_wait_is_needed(worlds: Worlds, changes: dict[str, Any], steps_before: int) -> None:
    scenario = dataclasses.replace(SCENARIO, **changes)
    arguments = {"scenario": scenario, "steps_before": steps_before}
    for answer in worlds(2).run(case_omit_waits, **arguments, seconds=300):
        names = answer["names"]
        assert len(answer["chunks"]) >= 2
        assert sum(answer["chunks"]) > SLOTS + 1
        assert answer["counted"] == len(names)
        nothing_omitted, *races = answer["races"]
        assert nothing_omitted == []
        slots = 0
        for name, found in zip(names, races, strict=True):
            slots += name == "slot"
            # Behind a whole step, `ready` says that the first slots are free as well.
            if name == "slot" and slots <= SLOTS:
                assert found == []
            else:
                assert found, (name, slots)


def case_count(scenario: Scenario) -> list[dict[str, int]]:
    with small_chunks():
        run = WatchedRun(scenario)
        for step in range(4):
            run.step(step)
        calls = run.calls
        assert run.fake.races() == []
        assert run.state.stats()["host_waits"] == 0
    return calls


@pytest.mark.torch_core
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_step_allocates_nothing_and_never_waits_on_the_host(
    worlds: Worlds, momentum: float | None
) -> None:
    options = {"momentum": momentum, "exact_skip": momentum is not None}
    feedback = "auto" if momentum else "both"
    scenario = dataclasses.replace(SCENARIO, options=options, error_feedback=feedback)
    for calls in worlds(2).run(case_count, scenario=scenario):
        assert len(calls) >= 2
        for call in calls:
            assert call["chunks"] > 0
            assert call["allocations"] == 0
            assert call["host_waits"] == 0


def case_launches(scenario: Scenario, steps: int) -> dict[str, int]:
    """What the steps after the first one launch; the host reads the gradients of each."""
    from fake_device import machine

    with small_chunks():
        run = Run(scenario)
        run.step(0)
        before = {**machine.counters(), **run.state.stats()}
        for step in range(1, 1 + steps):
            run.step(step)
        after = {**machine.counters(), **run.state.stats()}
    assert machine.races() == []
    return {key: after[key] - before[key] for key in ("launches", "chunks")}


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("changes", "per_step"),
    [
        # The gain, and the commit of the step before.
        ({"codec": "q4", "rules": ()}, 2),
        ({"codec": "q4"}, 2),
        # And what takes a step back, for both residuals and their units.
        ({"codec": "sign1", "error_feedback": "auto", **MOMENTUM}, 2 + 3),
    ],
    ids=["q4 and exact", "four codecs", "momentum and exact_skip"],
)
def test_a_chunk_takes_three_launches(
    worlds: Worlds, changes: dict[str, Any], per_step: int
) -> None:
    steps = 3
    scenario = dataclasses.replace(SCENARIO, **changes)
    for counts in worlds(2).run(case_launches, scenario=scenario, steps=steps):
        assert counts["chunks"] > SLOTS
        launches = counts["launches"] - steps * per_step
        print(f"{changes['codec']}: {launches / counts['chunks']:g} launches per chunk")
        assert launches == 3 * counts["chunks"]
