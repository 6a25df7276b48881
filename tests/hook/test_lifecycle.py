"""Attaching again and again, several at once, and in groups that overlap."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import time
import warnings
from pathlib import Path
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from scenario import Run, Scenario, Weight, assert_bit_equal
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from world import World, thread_names

WEIGHTS = (Weight("first", (60, 50)), Weight("bias", (50,)))


def engine_threads() -> int:
    return thread_names().count("gf-finish")


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def case_attach_again(times: int, native: bool) -> list[tuple[int, int, int, int]]:
    """In and after every life of a model: engine threads of its own; after it open files, and what
    the garbage collector knows of.
    """
    gc.collect()
    before = engine_threads()  # of models that other tests have left behind
    counts = []
    for seed in range(times):
        run = Run(Scenario(WEIGHTS, native=native, seed=seed))
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
    return counts


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_ten_lives_in_one_process_leave_nothing_behind(world_of_2: World, native: bool) -> None:
    for counts in world_of_2.run(case_attach_again, times=10, native=native):
        assert [c[:2] for c in counts] == [(1, 0)] * 10
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


def case_two_attached(scenarios: list[Scenario]) -> list[dict]:
    return run_steps([Run(scenario) for scenario in scenarios])


def test_two_attached_models_train_in_turns(world_of_2: World) -> None:
    scenarios = [
        Scenario(WEIGHTS, steps=3, error_feedback="both"),
        Scenario(WEIGHTS, steps=3, codec="bf16", seed=1, native=False),
    ]
    answers = world_of_2.run(case_two_attached, scenarios=scenarios)
    for index, scenario in enumerate(scenarios):
        assert_bit_equal([answer[index] for answer in answers], scenario)


def test_sixty_models_in_one_process_keep_apart(world_of_2: World) -> None:
    codecs = ("q4", "exact", "sign1")
    scenarios = [
        Scenario(WEIGHTS, steps=2, codec=codecs[seed % 3], seed=seed, native=seed % 2 == 0)
        for seed in range(60)
    ]
    answers = world_of_2.run(case_two_attached, scenarios=scenarios)
    for index, scenario in enumerate(scenarios):
        assert_bit_equal([answer[index] for answer in answers], scenario)


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


def case_copied(native: bool) -> dict[str, Any]:
    """What is said of every kind of copy, and whether it can be attached to."""
    run = Run(Scenario(WEIGHTS, native=native))
    kinds = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda ddp: pickle.loads(pickle.dumps(ddp)),
    }
    said, comm_hooks = {}, []
    for kind, make in kinds.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            copied = make(run.ddp)
            again = copy.deepcopy(copied)  # has no hook to lose
        said[kind] = [str(w.message) for w in caught]
        comm_hooks += [copied._comm_hooks, again._get_ddp_logging_data().get("comm_hook", "")]
        state = gradferry.attach(copied, "q4")
        copied(run.targets(0)).backward()
        assert state.stats()["buckets"] > 0
    run.step(0)
    return {"said": said, "comm_hooks": comm_hooks, "buckets": run.state.stats()["buckets"]}


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_copied_model_says_that_it_has_no_hook_and_takes_a_new_one(
    world_of_2: World, native: bool
) -> None:
    for answer in world_of_2.run(case_copied, native=native):
        for texts in answer["said"].values():
            (text,) = texts
            assert "has no communication hook" in text
            assert "attach again" in text
        assert answer["comm_hooks"] == [[], ""] * 3
        assert answer["buckets"] > 0


def case_averaged(scenario: Scenario) -> dict[str, Any]:
    """A training with moving averages of DDP's module, and of DDP itself."""
    run = Run(scenario)
    average = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        averages = [AveragedModel(run.model, **average), AveragedModel(run.ddp, **average)]
    by_hand: list[torch.Tensor] = []
    gradients = []
    for step in range(scenario.steps):
        gradients.append(run.step(step))
        now = [p.detach().clone() for p in run.model.parameters()]
        by_hand = [torch.lerp(old, p, 0.5) for old, p in zip(by_hand or now, now, strict=True)]
        for averaged in averages:
            averaged.update_parameters(run.ddp if averaged is averages[1] else run.model)
    with torch.no_grad():
        losses = [averaged(run.targets(0)) for averaged in averages]
    for averaged in averages:
        averaged.load_state_dict(averaged.state_dict())
    return {
        **run.answer(gradients),
        "said": [str(w.message) for w in caught],
        "averages": [[p.detach() for p in averaged.parameters()] for averaged in averages],
        "by_hand": by_hand,
        "losses": losses,
    }


def test_averages_of_a_model_follow_its_training(world_of_2: World) -> None:
    scenario = Scenario(WEIGHTS, error_feedback="both")
    answers = world_of_2.run(case_averaged, scenario=scenario)
    assert_bit_equal(answers, scenario)
    for answer in answers:
        (text,) = answer["said"]  # of the copy of DDP
        assert "has no communication hook" in text
        assert answer["losses"][0] == answer["losses"][1]
        for averaged in answer["averages"]:
            assert all(map(torch.equal, averaged, answer["by_hand"]))


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
        answers = world.run(case_attach_after_destroy, times=5)
    finally:
        world.stop()
    assert_bit_equal(answers, LAST_LIFE)
