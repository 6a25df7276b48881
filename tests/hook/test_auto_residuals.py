"""codec="auto": a change loses nothing that was withheld, and a checkpoint holds the choice."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from auto_trials import (
    AUTO,
    CUT,
    FOUND,
    TRIAL,
    equal,
    residuals_by_element,
    run_on,
    timed,
    try_all,
)
from gradferry.averaging.saved_state import signed
from gradferry.core.codec_spec import parse_codec
from gradferry.ddp.auto import FIRST_TRIAL, Choice
from gradferry.ddp.state import bound_to
from on_ranks import on_ranks
from outcomes import attempt
from priced_device import group_without_cpu
from reference import widen
from scenario import Run, Scenario, Weight, on_nodes
from stepping import logged, slot
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import WorldsOn

# What residuals hold of a momentum of 0.5 behind topk:ratio=0.05, of which m / (1 - m) is
# 0.5 / (1 - 0.5) / (1 + (1 / 0.05 - 1) / 4) = 1 / 5.75: (1 - m) / (1 - 0.5).
SHARE = 2 / (1 + 1 / 5.75)
WEIGHT = (Weight("only", (90, 70)),)
ALL_ALIKE = {"q4": 100.0, "q8": 100.0, "exact": 100.0, "off": 100.0}


# --- what is delivered before a change


@pytest.mark.parametrize(
    ("last", "dtype", "device"),
    [
        ("off", torch.float32, "cpu"),
        ("exact", torch.float32, "streamed"),
        ("q8", torch.float32, "cpu"),
        ("off", torch.bfloat16, "cpu"),
    ],
    ids=["off", "exact", "q8", "bfloat16"],
)
def test_what_was_applied_and_is_withheld_is_the_sum_of_the_gradients(
    worlds_on: WorldsOn, last: str, dtype: torch.dtype, device: str
) -> None:
    weights = (dataclasses.replace(WEIGHT[0], dtype=dtype),)
    options = {"nonfinite": "raise"} if last == "exact" else {}
    changes = {"weights": weights, "options": options, "device": device}
    scenario = dataclasses.replace(AUTO, error_feedback="both", **changes)
    ms = dict(ALL_ALIKE)
    if last == "q8":
        scenario = dataclasses.replace(scenario, error_feedback="auto")  # q8 has no worker residual
        ms["off"] = 900.0
    steps = 2 + 3 * TRIAL + 5
    answers = try_all(worlds_on(device)(2), scenario, ms, steps=steps)
    assert answers[0]["codecs"][-1] == last
    kind = str(dtype).removeprefix("torch.")
    applied, given, largest = np.zeros(6300), np.zeros(6300), 0.0
    for step in range(steps):
        applied += wide(answers[0]["gradients"][step][0], kind)
        gradients = [wide(scenario.gradient(step, 0, rank, 0), kind) for rank in range(2)]
        given += (gradients[0] + gradients[1]) / 2
        largest = max(largest, *(np.abs(each).max() for each in gradients))
    if last == "q8":  # its own rounding: what owners withhold now, and workers lost since
        bound = largest / 127 * (TRIAL + 5 + 1) + largest / 127
    else:
        # Each step rounds its mean once, and what a step delivers besides is rounded with it; the
        # sum of all is off by less than one rounding of the largest number per step.
        bound = largest * (2.0**-8 if kind == "bfloat16" else 2.0**-23) * 2 * steps
    assert np.abs(applied - given).max() <= bound
    if last != "q8":
        for rank, answer in enumerate(answers):
            mine = answer["states"][-1][f"slot_{rank}"]
            assert not mine["worker"].numel()
            assert not mine["owner"].numel()


def wide(values: np.ndarray, kind: str) -> np.ndarray:
    return widen(values.ravel(), kind).astype(np.float64)


@on_ranks()
def test_a_candidate_that_would_drop_a_residual_for_good_is_left_out() -> None:
    """No rank uses a parameter from the eighth step on."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
            return sum(half(x).sum() for half in self.halves[:used])

    torch.manual_seed(0)
    ddp = DistributedDataParallel(Halves(), find_unused_parameters=True)
    state = gradferry.attach(ddp, "auto")
    codecs, withheld = [], []
    generator = torch.Generator().manual_seed(dist.get_rank())
    with logged() as messages, timed(state, ALL_ALIKE):
        for step in range(30):
            ddp(torch.randn(4, 64, generator=generator), 2 if step < 8 else 1).backward()
            codecs.append(state.stats()["choice"]["codec"])
            _, worker, _, _ = bound_to(state).running.engine.state()
            withheld.append(float(worker[4096:].abs().sum()))
    assert codecs[-1] == "q4"
    left_out = [text for text in messages if "leaves out" in text]
    assert [text.split()[3] for text in left_out] == ["q8:", "off:"]
    assert "the residuals of 1 parameters could not be delivered in 10 steps" in left_out[0]
    assert withheld[8] > 0
    assert withheld[-1] == withheld[8]


@on_ranks()
def test_what_engines_count_goes_on_in_those_after_them() -> None:
    run = Run(AUTO)
    bound = bound_to(run.state)
    count = type(bound.running.engine).stats
    counts = {"host_waits": 2, "workspace_allocations": 3}
    with mock.patch.object(
        type(bound.running.engine), "stats", lambda engine: {**count(engine), **counts}
    ):
        seen = []
        for number, codec in enumerate(("q4", "q8", "off", "q4")):
            bound.running.switch(bound.hook, parse_codec(codec), number)
            stats = run.state.stats()
            seen.append(tuple(stats[key] for key in counts))
    # One engine came before; `off` has none.
    assert seen == [(4, 6), (6, 9), (6, 9), (8, 12)]


def case_withheld(scenario: Scenario) -> list[tuple[np.ndarray, np.ndarray]]:
    """What of the mean residuals of workers and owners hold, by parameter element, under q4 with
    two levels, flat, and as at first, without a step between them.
    """
    with group_without_cpu() if scenario.device != "cpu" else contextlib.nullcontext():
        run = run_on(scenario, FOUND)
    bound = bound_to(run.state)
    seen = []
    for number, name in enumerate(("two-level", "flat", "two-level")):
        exchange = bound.chooser._exchange_named(name)
        bound.running.switch(bound.hook, parse_codec("q4"), min(number, 1) * 3, exchange)
        if number == 0:
            for step in range(3):
                run.step(step)
        worker, owner = (
            residuals_by_element(bound.running.engine, kind) for kind in ("worker", "owner")
        )
        seen.append((worker / len(exchange.nodes.members), owner))
    return seen


@pytest.mark.parametrize("device", ["cpu", "streamed"])
def test_what_was_withheld_stays_when_the_exchange_changes(
    worlds_on: WorldsOn, device: str
) -> None:
    """On a device without a backend for the CPU."""
    scenario = dataclasses.replace(AUTO, world_size=3, error_feedback="both", device=device)
    answers = worlds_on(device)(3).run(case_withheld, scenario=scenario)
    # From two nodes to three and back.
    (worker, owner), *later = (
        [sum(kept) for kept in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*answers, strict=True)
    )
    assert worker.any()
    assert owner.any()
    for workers, owners in later:
        # The means of 2 and of 3 equal numbers, and the sums of these, are rounded 5 times at most.
        np.testing.assert_allclose(workers, worker, rtol=5 * 2.0**-24)
        assert np.array_equal(owners, owner)


@pytest.mark.parametrize(
    ("warmup", "share"),
    # The warm-up's residuals are those of every codec.
    [({}, SHARE), ({"warmup_steps": 2, "warmup": "q4"}, 1.0)],
    ids=["momentum", "warm-up"],
)
@on_ranks()
def test_residuals_hold_more_of_a_momentum_of_which_less_stays(
    warmup: dict[str, Any], share: float
) -> None:
    """Worker residuals under sign1, then topk, then sign1 again."""
    weights, options = (Weight("only", (64, 64)),), {"momentum": 0.5, **warmup}
    run = Run(dataclasses.replace(AUTO, weights=weights, options=options))
    bound = bound_to(run.state)
    seen = []
    for number, codec in enumerate(("sign1", "topk:ratio=0.05", "sign1")):
        bound.running.switch(bound.hook, parse_codec(codec), min(number, 1))
        if number == 0:
            run.step(0)
        seen.append(bound.running.engine.state()[1])
    sign1, topk, again = seen
    rounding = 0 if share == 1 else 2.0**-22
    assert sign1.any()
    torch.testing.assert_close(topk, sign1 * share, rtol=rounding, atol=0)
    torch.testing.assert_close(again, sign1, rtol=2 * rounding, atol=0)


# --- checkpoints


@pytest.mark.parametrize("codec", ["q4", "off"])
@on_ranks()
def test_a_checkpoint_holds_the_choice(codec: str) -> None:
    """Six steps at a stretch, and three, saved, and three more in a new model."""
    spec = parse_codec(codec)

    def chosen() -> Run:
        run = Run(AUTO)
        bound = bound_to(run.state)
        bound.running.switch(bound.hook, spec, 0)
        bound.chooser.choice = Choice(codec=spec, made=True, next_check=1000)
        bound.chooser.start(bound.hook)
        return run

    straight, before = chosen(), chosen()
    expected = [straight.step(step) for step in range(6)]
    for step in range(3):
        before.step(step)
    after = before.saved_and_loaded()
    assert equal(expected[3:], [after.step(step) for step in range(3, 6)])
    stats = after.state.stats()
    choice = stats["choice"]
    assert (choice["codec"], choice["exchange"]) == (codec, "flat")
    assert choice["reason"] == "restored from a checkpoint"
    assert choice["next_check"] >= 3 + FIRST_TRIAL
    assert stats["total_steps"] == 6


def case_resumed(scenario: Scenario, chosen: int, steps: int) -> dict[str, Any]:
    """Steps at a stretch, and with a new model in the trial and another one behind it."""
    answers = {}
    for name, saves in {"straight": (), "trial": (5,), "behind": (chosen + 1,)}.items():
        run, gradients = run_on(scenario, FOUND), []
        for step in range(steps):
            with timed(run.state, {"q8 two-level": 100.0, "q8 flat": 200.0}), on_nodes(FOUND):
                run = run.saved_and_loaded() if step in saves else run
                gradients.append(run.step(step))
        answers[name] = {"gradients": gradients, **run.state.stats()["choice"]}
    saved = signed({**run.state.state_dict(), "world_size": 4, "nodes": "[[0, 1], [2, 3]]"})
    other = run_on(scenario, FOUND)
    other.state.load_state_dict(saved, on_resize="drop")
    return {**answers, "elsewhere": other.state.stats()["choice"]}


def test_the_exchange_of_a_named_codec_is_saved_and_not_tried_again(worlds_on: WorldsOn) -> None:
    scenario = dataclasses.replace(AUTO, codec="q8", world_size=3, device="streamed")
    chosen = FIRST_TRIAL + TRIAL + CUT
    for answer in worlds_on("streamed")(3).run(
        case_resumed, scenario=scenario, chosen=chosen, steps=chosen + 8
    ):
        straight, trial, behind = (answer[name] for name in ("straight", "trial", "behind"))
        assert (straight["exchange"], straight["step"]) == ("two-level", chosen)
        assert equal(straight["gradients"], behind["gradients"])
        assert (behind["exchange"], behind["reason"]) == ("two-level", "restored from a checkpoint")
        assert behind["next_check"] == straight["next_check"] == 0
        # Nothing was chosen yet when it was saved; nor was anything of another world.
        assert trial["step"] == 5 + chosen
        elsewhere = answer["elsewhere"]
        assert (elsewhere["codec"], elsewhere["next_check"]) == ("q8", chosen + 8 + FIRST_TRIAL)


@on_ranks()
def test_ranks_that_load_unlike_choices_all_get_the_same_error() -> None:
    run = Run(AUTO)
    run.step(0)
    saved = run.state.state_dict()
    if run.rank == 1:
        saved = signed({**saved, "choice": {**saved["choice"], "codec": "q8"}})
    outcome = attempt(lambda: Run(AUTO).state.load_state_dict(saved))
    assert outcome.error == "RankMismatchError"
    assert "rank 1 differs from rank 0 in choice: " in outcome.text
    assert "'codec': 'q8'" in outcome.text


@pytest.mark.parametrize(
    ("step", "codec"),
    [(2 + 3, "q4"), (2 + TRIAL + 1, "q4"), (2 + 3 * TRIAL + 3, "off")],
    ids=["trial", "delivered", "chosen"],
)
@on_ranks()
def test_a_state_saved_in_a_trial_has_no_choice_but_its_residuals(step: int, codec: str) -> None:
    run = Run(AUTO)
    generator = torch.get_rng_state()
    with timed(run.state, ALL_ALIKE):
        for each in range(step):
            run.step(each)
    assert torch.equal(torch.get_rng_state(), generator)
    saved = run.state.state_dict()
    again = Run(AUTO)
    again.state.load_state_dict(saved)
    mine, loaded = saved[f"slot_{run.rank}"], slot(again.state)
    assert all(torch.equal(mine[key], loaded[key]) for key in ("worker", "owner"))
    assert bool(mine["worker"].numel()) == (codec != "off")
    choice = bound_to(again.state).chooser.choice
    assert (str(choice.codec), choice.made) == (codec, codec == "off")
    assert choice.next_check >= step + FIRST_TRIAL
