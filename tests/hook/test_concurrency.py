"""Several threads of one process: two that train, one that looks on; and a forked child."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from outcomes import attempt
from scenario import Run, Scenario, Weight, assert_all_bit_equal, assert_bit_equal
from torch.nn.parallel import DistributedDataParallel
from world import World

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))
SECONDS = 60.0  # after which a thread that waits for another gives up


def case_two_threads(scenarios: list[Scenario]) -> list[dict]:
    """A model per thread; each step of one runs beside a step of the other."""
    # DDP itself communicates in its group when it rebuilds buckets, so that each takes its own.
    runs = [Run(scenario, dist.new_group()) for scenario in scenarios]
    together = threading.Barrier(len(runs), timeout=SECONDS)

    def train(run: Run) -> dict[str, Any]:
        gradients = []
        for step in range(run.scenario.steps):
            together.wait()
            gradients.append(run.step(step))
        return {**run.answer(gradients), "steps": run.state.stats()["steps"]}

    try:
        with ThreadPoolExecutor(len(runs)) as threads:
            return list(threads.map(train, runs))
    finally:
        # A forward sets this back to what it found, which between two threads may be the other's
        # module: it would live on, and torch.compile would split the next model by its buckets.
        DistributedDataParallel._active_ddp_module = None


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_two_models_train_in_two_threads_at_once(world_of_2: World, native: bool) -> None:
    ddp = {"bucket_cap_mb": 0.02}
    scenarios = [
        Scenario(WEIGHTS, steps=12, error_feedback="both", native=native, ddp=ddp),
        Scenario(WEIGHTS, steps=12, codec="rht:bits=2", seed=3, native=native, ddp=ddp),
    ]
    answers = world_of_2.run(case_two_threads, scenarios=scenarios)
    assert_all_bit_equal(answers, scenarios)
    assert {each["steps"] for answer in answers for each in answer} == {12}


class Onlooker:
    """A thread that asks a state for everything it tells, again and again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rounds = 0
        self._turned = threading.Condition()
        self._done = False
        self.saved: list[dict] = []  # every state that was given
        self.refused: set[tuple[str | None, str]] = set()
        self.counted: list[dict] = []

    def look(self) -> None:
        while not self._done:
            # Before the counters: what a step refused is in the same round.
            outcome = attempt(lambda: self.saved.append(self._run.state.state_dict()))
            if outcome.error:
                self.refused.add((outcome.error, outcome.text))
            stats, events = self._run.state.stats(), self._run.state.events()
            self.counted.append({**stats, "events": len(events)})
            with self._turned:
                self._rounds += 1
                self._turned.notify_all()

    def wait_for_a_whole_round(self, *_: Any) -> None:
        with self._turned:
            enough = self._rounds + 2  # the one that is under way may have begun earlier
            assert self._turned.wait_for(lambda: self._rounds >= enough, SECONDS)

    def end(self) -> None:
        self._done = True


def case_looked_on(scenario: Scenario) -> dict[str, Any]:
    run = Run(scenario)
    gradients = [run.step(step) for step in range(2)]
    onlooker = Onlooker(run)
    # Its gradient is the last one: buckets before its own were handed over.
    last = run.ddp.module.get_parameter(run.buckets[-1][-1][-1])
    turning = last.register_post_accumulate_grad_hook(onlooker.wait_for_a_whole_round)
    own = []
    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(onlooker.look)
        try:
            for step in range(2, scenario.steps):
                onlooker.wait_for_a_whole_round()
                gradients.append(run.step(step))
                own.append(run.state.state_dict())
            onlooker.wait_for_a_whole_round()
        finally:
            onlooker.end()
            turning.remove()  # nobody else sees that the hook leads back to the parameter
        looking.result()
    mine = {state["steps"]: state for state in own}
    looked = {state["steps"] for state in onlooker.saved}
    slot = f"slot_{run.rank}"
    return {
        **run.answer(gradients),
        "looked": sorted(looked),
        "equal": all(
            torch.equal(state[slot][name], mine[state["steps"]][slot][name])
            for state in onlooker.saved
            if state["steps"] in mine
            for name in ("worker", "owner")
        ),
        "refused": onlooker.refused,
        "counted": onlooker.counted,
    }


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_state_is_whole_or_refused_and_counters_grow_in_another_thread(
    world_of_2: World, native: bool
) -> None:
    scenario = Scenario(
        WEIGHTS, steps=8, error_feedback="both", native=native, ddp={"bucket_cap_mb": 0.02}
    )
    answers = world_of_2.run(case_looked_on, scenario=scenario)
    assert_bit_equal(answers, scenario)
    for answer in answers:
        assert answer["looked"] == list(range(2, scenario.steps + 1))
        assert answer["equal"]
        for step in range(2, scenario.steps):
            text = f"cannot save the state in the middle of step {step}"
            assert any(text in refusal for _, refusal in answer["refused"]), text
        assert {error for error, _ in answer["refused"]} == {"StateError"}
        for key in ("steps", "buckets", "wire_bytes", "encode_ms", "network_ms", "events"):
            values = [count[key] for count in answer["counted"]]
            assert values == sorted(values), key


def in_child(call: Callable[[], Any]) -> dict[str, Any]:
    """What a forked child makes of a call. Its value goes through a pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        values: list[Any] = []
        outcome = attempt(lambda: values.append(call()))
        with open(writing, "wb") as pipe:  # noqa: PTH123
            pickle.dump({"error": outcome.error, "text": outcome.text, "value": values}, pipe)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:  # noqa: PTH123
        said = pickle.load(pipe)
    os.waitpid(child, 0)
    return said


def case_state_in_child(scenario: Scenario) -> dict[str, Any]:
    """A child asks for all there is, and does what it likes with its copy."""
    run = Run(scenario)
    gradients = [run.step(step) for step in range(2)]
    state = run.state
    before = state.state_dict()

    def change() -> dict:
        state.scale_residuals(0.0)
        return state.state_dict()

    def put_back() -> dict:
        state.scale_residuals(0.0)
        state.load_state_dict(before)
        return state.state_dict()

    calls = {
        "stats": state.stats,
        "events": state.events,
        "state_dict": state.state_dict,
        "change": change,
        "put_back": put_back,
    }
    said = {name: in_child(call) for name, call in calls.items()}
    slot = f"slot_{run.rank}"

    def same(other: dict) -> bool:
        return all(torch.equal(before[slot][key], other[slot][key]) for key in before[slot])

    assert {answer["error"] for answer in said.values()} == {None}, said
    (changed,), (kept,), (put,) = (
        said[name]["value"] for name in ("change", "state_dict", "put_back")
    )
    assert said["stats"]["value"] == [state.stats()]
    assert said["events"]["value"] == [state.events()]
    assert same(kept)
    assert same(put)
    assert not changed[slot]["worker"].any()
    assert not changed[slot]["owner"].any()
    assert same(state.state_dict())
    gradients += [run.step(step) for step in range(2, scenario.steps)]
    return run.answer(gradients)


def test_a_forked_child_has_a_copy_of_the_state_and_the_parent_goes_on(world_of_2: World) -> None:
    scenario = Scenario(WEIGHTS, error_feedback="both")
    answers = world_of_2.run(case_state_in_child, scenario=scenario)
    assert_bit_equal(answers, scenario)


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_backward_in_a_forked_child_raises_and_the_parent_goes_on(native: bool) -> None:
    run = Run(Scenario(WEIGHTS, native=native))
    for step in range(3):  # DDP communicates by itself when it rebuilds its buckets
        run.step(step)
    said = in_child(lambda: run.step(3))
    run.step(3)  # the parent goes on
    assert said["error"] == "StateError", said
    assert "fork" in said["text"]
