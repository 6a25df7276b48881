"""Attaching again and again, several at once, and in groups that overlap; threads, forked children
and memory; and what a process may have set: inference mode, defaults, and
TORCH_DISTRIBUTED_DEBUG=DETAIL, in which torch wraps every process group.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import scenario as scenarios
import torch
import torch.distributed as dist
from gradferry import _native
from gradferry.averaging.saved_state import signed
from gradferry.checkpoint import merge
from gradferry.core import agreement
from gradferry.core.engine import make_lanes
from on_ranks import of_all, on_ranks
from outcomes import attempt
from saved import same
from scenario import Run, Scenario, Weight, assert_bit_equal, group_of, hooked, train
from stepping import slot, warned
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import COLLECTIVE_SECONDS, World, Worlds, open_files, thread_names

WEIGHTS = (
    Weight("first", (90, 70)),
    Weight("bias", (50,)),
    Weight("second", (120, 60)),
    Weight("third", (70, 64)),
)
SCENARIO = Scenario(WEIGHTS, error_feedback="both", ddp={"bucket_cap_mb": 0.02})
HOOKS = pytest.mark.parametrize("native", [True, False], ids=["native", "python"])

# --- lives ----------------------------------------------------------------------------------------


def engine_threads() -> int:
    return thread_names().count("gf-finish")


@pytest.mark.torch_core
@pytest.mark.parametrize(
    "change",
    [
        {"native": True},
        {"native": False},
        {"options": {"check_every": 1}},
        {"options": {"momentum": 0.5, "warmup_steps": 1}},
        {"codec": "auto"},
    ],
    ids=str,
)
@on_ranks()
def test_six_lives_in_one_process_leave_nothing_behind(change: dict[str, Any]) -> None:
    """Engine threads of its own are those of a model's life; open files, and what the garbage
    collector knows of, do not grow. An engine allocates nothing after its first steps.
    """
    gc.collect()
    before = engine_threads()  # of models that other tests have left behind
    counts = []
    for seed in range(6):
        run = Run(Scenario(WEIGHTS, seed=seed, **change))
        allocations = []
        for step in range(5):
            run.step(step)
            allocations.append(run.state.stats()["workspace_allocations"])
        assert len(set(allocations[2:])) == 1 or "native" not in change
        threads = engine_threads() - before
        del run
        gc.collect()
        # The thread ends by itself. No collective here: ranks may wait a different number of times.
        deadline = time.monotonic() + 60
        while engine_threads() > before and time.monotonic() < deadline:
            time.sleep(0.001)
        gc.collect()
        objects = len(gc.get_objects())
        counts.append((threads, engine_threads() - before, open_files(), objects))
    assert [c[:2] for c in counts] == [(1, 0)] * 6
    # Files that other tests have left open may close meanwhile.
    assert all(after[2] <= before[2] for before, after in itertools.pairwise(counts[1:])), counts
    # What a life leaves behind, every life does; others fill a cache now and then.
    grown = [after[3] - before[3] for before, after in itertools.pairwise(counts)]
    assert min(grown) <= 0, counts


Steps = list[list[np.ndarray]]  # gradients of a step by model


def in_turn(runs: list[Run], step: int) -> Steps:
    return [run.step(step) for run in runs]


def in_one_backward(runs: list[Run], step: int) -> Steps:
    """Two backward passes before any gradient is looked at."""
    losses = [run.ddp(run.targets(step)) for run in runs]
    for run in runs:
        run.ddp.zero_grad()
    sum(losses).backward()
    pairs = [zip(run.scenario.weights, run.model.parameters(), strict=True) for run in runs]
    return [[w.to_flat(p.grad) for w, p in own] for own in pairs]


def in_threads(runs: list[Run], step: int) -> Steps:
    try:
        with ThreadPoolExecutor(len(runs)) as threads:
            return list(threads.map(lambda run: run.step(step), runs))
    finally:
        # A forward sets this back to what it found, which between two threads may be the other's
        # module: it would live on, and torch.compile would split the next model by its buckets.
        DistributedDataParallel._active_ddp_module = None


def case_several(scenarios: list[Scenario], how: Callable[[list[Run], int], Steps]) -> dict:
    """Answers by the number of a scenario, of those that this rank is in."""
    # DDP itself communicates in its group when it rebuilds buckets: threads take one each.
    groups = [dist.new_group() if how is in_threads else group_of(one) for one in scenarios]
    rank = dist.get_rank()
    runs = {
        number: Run(scenario, group)
        for number, (scenario, group) in enumerate(zip(scenarios, groups, strict=True))
        if rank in (scenario.group_ranks or (rank,))
    }
    steps = [how(list(runs.values()), step) for step in range(scenarios[0].steps)]
    gradients = zip(*steps, strict=True)
    return {
        number: runs[number].answer(list(own)) for number, own in zip(runs, gradients, strict=True)
    }


def many(number: int) -> list[Scenario]:
    codecs = ("q4", "exact", "sign1")
    return [
        Scenario(WEIGHTS, steps=2, codec=codecs[seed % 3], seed=seed, native=seed % 2 == 0)
        for seed in range(number)
    ]


def two(**changes: Any) -> list[Scenario]:
    return [
        dataclasses.replace(SCENARIO, **changes),
        dataclasses.replace(SCENARIO, codec="rht:bits=2", seed=3, **changes),
    ]


LEFT, RIGHT = two()


@pytest.mark.parametrize(
    ("scenarios", "how"),
    [
        pytest.param(many(12), in_turn, id="12"),
        pytest.param(
            [
                dataclasses.replace(LEFT, group_ranks=(0, 1)),
                dataclasses.replace(RIGHT, group_ranks=(1, 2)),
            ],
            in_turn,
            id="overlapping groups",
        ),
        pytest.param(two(), in_one_backward, id="one backward pass"),
        pytest.param(two(steps=12), in_threads, id="threads"),
        pytest.param(two(steps=12, native=False), in_threads, id="threads, python"),
    ],
)
def test_several_models_of_a_process_keep_apart(
    worlds: Worlds, scenarios: list[Scenario], how: Any
) -> None:
    size = 3 if scenarios[0].group_ranks else 2
    answers = worlds(size).run(case_several, scenarios=scenarios, how=how)
    for number, scenario in enumerate(scenarios):
        assert_bit_equal([answer.get(number) for answer in answers], scenario)


@HOOKS
@on_ranks()
def test_copied_model_takes_a_new_hook(native: bool) -> None:
    """A copied state says that it has none."""
    run = Run(Scenario(WEIGHTS, native=native))
    for make in (copy.copy, copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))):
        with warned() as caught:
            copied = make(run.ddp)
        said = [str(w.message) for w in caught]
        assert bool(said) == (not native and make is not copy.copy)
        assert all("has no communication hook: attach again" in text for text in said)
        with copied.join():
            copied(run.targets(0)).backward()
        state = hooked(copied)
        copied(run.targets(0)).backward()
        assert state.stats()["buckets"] > 0
    run.step(0)
    assert run.state.stats()["buckets"] > 0


@HOOKS
@on_ranks()
def test_two_wrappers_of_one_module_keep_apart(native: bool) -> None:
    """Each hook has residuals and a count of its own, as those of two models."""
    scenario = dataclasses.replace(SCENARIO, native=native)
    run, *models = (Run(scenario) for _ in range(3))
    second = DistributedDataParallel(run.model, **scenario.ddp)
    wrappers = [(run.ddp, run.state), (second, scenarios.attach(second, scenario))]
    for step in range(6):
        run.ddp, run.state = wrappers[step % 2]
        pairs = zip(run.step(step), models[step % 2].step(step), strict=True)
        assert all(one.tobytes() == other.tobytes() for one, other in pairs), step
    assert [state.stats()["steps"] for _, state in wrappers] == [3, 3]


groups: list[dist.ProcessGroup] = []  # are kept: the others would see that one is gone


@pytest.mark.parametrize("call", [0, 1])
@on_ranks()
def test_an_interrupt_at_attach_is_told_to_the_others(call: int) -> None:
    """Rank 1 is interrupted at one of its records. Others would wait for ten minutes otherwise."""
    groups.append(group := dist.new_group(timeout=timedelta(minutes=10)))
    calls = itertools.count()
    gather = agreement._gather_records

    def interrupt(*arguments: Any) -> Any:
        if dist.get_rank() == 1 and next(calls) == call:
            raise KeyboardInterrupt
        return gather(*arguments)

    ddp = DistributedDataParallel(nn.Linear(50, 50), process_group=group)
    with mock.patch.object(agreement, "_gather_records", interrupt):
        if dist.get_rank() == 1:
            with pytest.raises(KeyboardInterrupt):
                hooked(ddp)
        else:
            with pytest.raises(gradferry.PeerError, match="rank 1"):
                hooked(ddp)


# --- threads and children -------------------------------------------------------------------------


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


@HOOKS
@on_ranks()
def test_a_forked_child_has_a_copy_of_the_state_and_no_backward_pass(native: bool) -> None:
    run = Run(Scenario(WEIGHTS, native=native))
    for step in range(3):  # DDP communicates by itself when it rebuilds its buckets
        run.step(step)
    kept, stats = in_child(lambda: (slot(run.state), run.state.stats()))["value"][0]
    assert same(kept, slot(run.state))
    assert stats == run.state.stats()
    said = in_child(lambda: run.step(3))
    run.step(3)  # the parent goes on
    # torch's own where a device of an earlier test has given autograd threads.
    assert said["error"] in ("StateError", "RuntimeError"), said
    assert "fork" in said["text"]


# --- what a process may have set ------------------------------------------------------------------


def trained(mode: Callable[[], Any]) -> list[bytes]:
    """Attaches, saves, loads and scales in a mode, and trains between. Also loads a state of three
    ranks, the last of which withheld nothing.
    """
    attach = scenarios.attach

    def attach_in_mode(*arguments: Any) -> Any:
        with mode():
            return attach(*arguments)

    with mock.patch.object(scenarios, "attach", attach_in_mode):
        run = Run(SCENARIO)
    gradients = [run.step(0), run.step(1)]
    states = of_all(run.state.state_dict())
    nothing = {"owner": torch.zeros(0), "owner_tiles": torch.zeros(0, dtype=torch.int64)}
    first = states[0]["slot_0"]
    last = {**first, "worker": torch.zeros_like(first["worker"]), **nothing}
    of_three = {"world_size": 3, "nodes": "[[0], [1], [2]]", "slot_2": last}
    merged = signed({**merge(states), **of_three})
    for on_resize in ("drop", "mean"):
        with mode():
            run.state.load_state_dict(merged, on_resize=on_resize)
            run.state.scale_residuals(0.5)
            run.state.load_state_dict(run.state.state_dict())
        gradients.append(run.step(2))
    return [each.tobytes() for step in gradients for each in step]


@contextlib.contextmanager
def other_defaults() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("mode", [torch.inference_mode, other_defaults])
@on_ranks()
def test_what_a_process_may_have_set_changes_no_bit(mode: Callable[[], Any]) -> None:
    assert trained(mode) == trained(contextlib.nullcontext)


@pytest.fixture(scope="module")
def detail_world() -> Iterator[World]:
    world = World(2)
    world.run(case_enter_detail_mode)
    yield world
    world.stop()


def case_enter_detail_mode() -> None:
    """Sets what the variable sets, and begins a new group, which is when it is read."""
    # torch takes the wrapper for a ProcessGroupGloo here and reads beyond its end: whether that
    # crashes is luck, with or without a hook.
    dist.Logger.set_construction_data_and_log = lambda *_: None
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    seconds = timedelta(seconds=COLLECTIVE_SECONDS)
    store = dist.PrefixStore("detail mode", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=seconds)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(backend).__name__ == "_ProcessGroupWrapper"


@pytest.mark.torch_core
@HOOKS
def test_gradients_equal_reference_in_detail_mode(detail_world: World, native: bool) -> None:
    ddp = {"find_unused_parameters": True, "bucket_cap_mb": 0.02}
    scenario = dataclasses.replace(SCENARIO, native=native, unused={0: ("bias",)}, ddp=ddp)
    assert_bit_equal(detail_world.run(train, scenario=scenario), scenario)


def case_lanes() -> None:
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    with mock.patch.object(_native, "connect_lanes", wraps=_native.connect_lanes) as connect:
        group = dist.group.WORLD
        make_lanes(group, "test of detail mode", {"0": list(range(group.size()))})
    assert connect.call_args.kwargs["timeout_seconds"] == COLLECTIVE_SECONDS


def test_timeout_is_as_without(detail_world: World) -> None:
    detail_world.run(case_lanes)
