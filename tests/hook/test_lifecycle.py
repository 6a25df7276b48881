"""Attaching again and again, late, several at once, and in groups that overlap; and memory."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import scenario as scenarios
import torch
import torch.distributed as dist
from gradferry.core import agreement
from on_ranks import on_ranks
from residual_sums import reference_of
from scenario import Run, Scenario, Weight, assert_all_bit_equal, assert_bit_equal, hooked
from stepping import warned
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World, thread_names

WEIGHTS = (Weight("first", (60, 50)), Weight("bias", (50,)))


def engine_threads() -> int:
    return thread_names().count("gf-finish")


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


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
    collector knows of, stay as they are.
    """
    gc.collect()
    before = engine_threads()  # of models that other tests have left behind
    counts = []
    for seed in range(6):
        run = Run(Scenario(WEIGHTS, seed=seed, **change))
        run.step(0)
        run.step(1)
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
    assert len({c[2] for c in counts[1:]}) == 1, counts
    # What a life leaves behind, every life does; others fill a cache now and then.
    grown = [after[3] - before[3] for before, after in itertools.pairwise(counts)]
    assert min(grown) <= 0, counts


def run_steps(runs: list[Run]) -> list[dict]:
    """Steps of all models, interleaved."""
    gradients: list[list] = [[] for _ in runs]
    for step in range(runs[0].scenario.steps):
        for run, collected in zip(runs, gradients, strict=True):
            collected.append(run.step(step))
    return [run.answer(g) for run, g in zip(runs, gradients, strict=True)]


def case_many_attached(scenarios: list[Scenario]) -> list[dict]:
    return run_steps([Run(scenario) for scenario in scenarios])


@pytest.mark.parametrize("number", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_many_models_in_one_process_keep_apart(world_of_2: World, number: int) -> None:
    codecs = ("q4", "exact", "sign1")
    scenarios = [
        Scenario(WEIGHTS, steps=2, codec=codecs[seed % 3], seed=seed, native=seed % 2 == 0)
        for seed in range(number)
    ]
    answers = world_of_2.run(case_many_attached, scenarios=scenarios)
    assert_all_bit_equal(answers, scenarios)


def case_overlapping(left: Scenario, right: Scenario) -> dict[str, dict]:
    """Groups {0, 1} and {1, 2}: rank 1 is in both, and attaches to the left one first."""
    groups = {name: dist.new_group(ranks) for name, ranks in (("l", [0, 1]), ("r", [1, 2]))}
    scenarios = {"l": left, "r": right}
    mine = {0: "l", 1: "lr", 2: "r"}[dist.get_rank()]
    runs = [Run(scenarios[name], groups[name]) for name in mine]
    return dict(zip(mine, run_steps(runs), strict=True))


def test_overlapping_groups_each_get_their_own_average(world_of_3: World) -> None:
    left = Scenario(WEIGHTS, steps=3, error_feedback="both")
    right = Scenario(WEIGHTS, steps=3, seed=4)
    answers = world_of_3.run(case_overlapping, left=left, right=right)
    assert_bit_equal([answers[0]["l"], answers[1]["l"]], left)
    assert_bit_equal([answers[1]["r"], answers[2]["r"]], right)


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_copied_model_says_that_it_has_no_hook_and_takes_a_new_one(native: bool) -> None:
    run = Run(Scenario(WEIGHTS, native=native))
    for make in (copy.copy, copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))):
        with warned() as caught:
            copied = make(run.ddp)
            again = copy.deepcopy(copied)  # has no hook to lose
        (text,) = [str(w.message) for w in caught]
        assert "has no communication hook" in text
        assert "attach again" in text
        assert copied._comm_hooks == []
        assert again._get_ddp_logging_data().get("comm_hook", "") == ""
        state = hooked(copied)
        copied(run.targets(0)).backward()
        assert state.stats()["buckets"] > 0
    run.step(0)
    assert run.state.stats()["buckets"] > 0


def case_attach_after_destroy(times: int) -> dict:
    """The same process trains, leaves its group, joins a new one and trains again."""
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    for life in range(times):
        run = Run(Scenario(WEIGHTS))
        run.step(0)
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"life {life}", store), rank=rank, world_size=size
        )
    return run_steps([Run(LAST_LIFE)])[0]


LAST_LIFE = Scenario(WEIGHTS, steps=3, seed=2, error_feedback="both")


def test_attach_in_a_new_default_group_after_destroy() -> None:
    world = World(2)  # its first group ends with this case
    try:
        answers = world.run(case_attach_after_destroy, times=3)
    finally:
        world.stop()
    assert_bit_equal(answers, LAST_LIFE)


GROWN = (Weight("first", (300, 200)), Weight("bias", (200,)), Weight("last", (200, 150)))
WARM_UP, WINDOW, WINDOWS = 60, 25, 4


def anonymous_bytes() -> int:
    """Memory of this process that is not a file's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_no_growth_over_100_steps(native: bool) -> None:
    """Neither in bytes, by windows of steps, nor in the engine's allocations."""
    run = Run(Scenario(GROWN, native=native, ddp={"bucket_cap_mb": 0.1}))
    allocations, sizes = [], []
    for step in range(WARM_UP + WINDOW * WINDOWS + 1):
        if step >= WARM_UP and (step - WARM_UP) % WINDOW == 0:
            gc.collect()
            sizes.append(anonymous_bytes())
        run.step(step)
        allocations.append(run.state.stats()["workspace_allocations"])
    growth = [after - before for before, after in itertools.pairwise(sizes)]
    assert len(set(allocations[3:])) == 1
    # What leaks does so in every window; the allocator, filling up one arena per thread, does
    # not. Least to leak with every step: the smaller weight's q4 payload of 16 kB, or half.
    assert min(growth) < WINDOW * 16_000 / 2, growth


LATE_WEIGHTS = (
    Weight("first", (90, 70)),
    Weight("bias", (50,)),
    Weight("second", (120, 60)),
    Weight("third", (70, 64)),
)
DENSE_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Late(Scenario):
    """Steps below 0 go before the hook is there; step 0 is the first that it sees."""

    def gradient(self, step: int, turn: int, rank: int, index: int) -> np.ndarray:
        return super().gradient(step + DENSE_STEPS, turn, rank, index)


def case_late(variants: list[Late]) -> list[dict[str, Any]]:
    answers = []
    for variant in variants:
        with mock.patch.object(scenarios, "attach"):
            run = Run(variant)
        for step in range(-DENSE_STEPS, 0):
            run.step(step)
        run.hashes.clear()
        run.state = scenarios.attach(run.ddp, variant)
        gradients = [run.step(step) for step in range(variant.steps)]
        answers.append(
            {
                **run.answer(gradients),
                "buckets": run.buckets,
                "seen": (run.state.stats()["buckets"], run.state.stats()["steps"]),
            }
        )
    return answers


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_attach_after_buckets_were_rebuilt(world_of_2: World, native: bool) -> None:
    variants = [
        Late(
            LATE_WEIGHTS,
            error_feedback="both",
            native=native,
            ddp={"bucket_cap_mb": 0.02, **options},
        )
        for options in (
            {},
            {"static_graph": True},
            {"find_unused_parameters": True},
            {"gradient_as_bucket_view": True},
        )
    ]
    answers = world_of_2.run(case_late, variants=variants)
    assert_all_bit_equal(answers, variants)
    for index, variant in enumerate(variants):
        own = [answer[index] for answer in answers]
        for answer in own:
            # Rebuilt before, and never again; but never at all with find_unused_parameters.
            first, *later = answer["buckets"][:DENSE_STEPS], *answer["buckets"][DENSE_STEPS:]
            assert all(buckets == first[-1] for buckets in later)
            rebuilt = "find_unused_parameters" not in variant.ddp
            assert (first[0] != first[-1]) == rebuilt, variant.ddp
            assert answer["seen"] == (variant.steps * len(first[-1]), variant.steps)


def case_two_wrappers(scenario: Scenario) -> dict[str, Any]:
    """Steps in turn through one and the other; each hook has residuals and a count of its own."""
    run = Run(scenario)
    second = DistributedDataParallel(run.model, **scenario.ddp)
    wrappers = [(run.ddp, run.state), (second, scenarios.attach(second, scenario))]
    gradients = []
    for step in range(scenario.steps):
        run.ddp, run.state = wrappers[step % 2]
        gradients.append(run.step(step))
    return {
        "gradients": gradients,
        "hashes": run.hashes,
        "steps": [state.stats()["steps"] for _, state in wrappers],
    }


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_two_wrappers_of_one_module_keep_apart(world_of_2: World, native: bool) -> None:
    scenario = Scenario(
        LATE_WEIGHTS, steps=6, error_feedback="both", native=native, ddp={"bucket_cap_mb": 0.02}
    )
    answers = world_of_2.run(case_two_wrappers, scenario=scenario)
    assert answers[0]["hashes"] == answers[1]["hashes"]
    engines = [reference_of(scenario), reference_of(scenario)]
    for step in range(scenario.steps):
        count = range(len(LATE_WEIGHTS))
        given = [[scenario.accumulated(step, rank, i) for i in count] for rank in range(2)]
        expected = engines[step % 2].step(given)
        for rank, answer in enumerate(answers):
            assert answer["steps"] == [3, 3]
            got = answer["gradients"][step]
            assert [g.tobytes() for g in got] == [e.tobytes() for e in expected[rank]], step


groups: list[dist.ProcessGroup] = []  # are kept: the others would see that one is gone


def case_interrupted(reducer: bool, call: int) -> tuple[str, ...]:
    """What a rank of a new group raises if rank 1 is interrupted at one of its records."""
    groups.append(group := dist.new_group(timeout=timedelta(minutes=10)))
    calls = itertools.count()
    gather = agreement._gather_records

    def interrupt(*arguments: Any) -> Any:
        if dist.get_rank() == 1 and next(calls) == call:
            raise KeyboardInterrupt
        return gather(*arguments)

    with mock.patch.object(agreement, "_gather_records", interrupt):
        try:
            if reducer:
                gradferry.Reducer({"gradient": torch.ones(50, 50)}, "q4", group)
            else:
                ddp = DistributedDataParallel(nn.Linear(50, 50), process_group=group)
                gradferry.attach(ddp, "q4")
        except BaseException as error:
            return type(error).__name__, str(error)
    return ()


@pytest.mark.parametrize(("reducer", "call"), [(False, 0), (False, 1), (True, 0), (True, 1)])
def test_an_interrupt_at_attach_is_told_to_the_others(
    world_of_2: World, reducer: bool, call: int
) -> None:
    """They would wait for ten minutes otherwise."""
    other, interrupted = world_of_2.run(case_interrupted, reducer=reducer, call=call)
    assert interrupted[0] == "KeyboardInterrupt"
    assert other[0] == "PeerError"
    assert "rank 1" in other[1]
