"""Warm-up steps that are compressed, and the change from them to momentum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradferry.core.codec_spec import parse_codec
from gradferry.errors import ConfigError
from gradferry_lab.workloads.hooks import hook_config
from mixed import EVERY_DTYPE
from momentum_training import one_bit_adam
from on_ranks import on_ranks
from outcomes import attempt
from products import rows
from reference.engine import momentum_behind
from residual_sums import reference_of, still_missing
from scenario import ChosenGradients, Run, Scenario, assert_bit_equal, train
from stepping import slot
from test_momentum import BETA, WEIGHTS, scenario_of
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]

WARMUP_STEPS = 3
STEPS = 7
CODECS = ("sign1", "topk:ratio=0.05", "q4")
CHOSEN = Scenario(WEIGHTS)


def warming_up(codec: str, world_size: int, warmup: str, **changes: Any) -> Scenario:
    """In momentum mode, unless `options` among the changes say `"momentum": None`."""
    common = {"momentum": BETA, "warmup_steps": WARMUP_STEPS, "warmup": warmup}
    options = {**common, **changes.get("options", {})}
    changes["options"] = {name: value for name, value in options.items() if value is not None}
    return scenario_of(codec, world_size, **{"steps": STEPS, **changes})


def check(worlds: Worlds, scenario: Scenario) -> None:
    answers = worlds(scenario.world_size).run(train, scenario=scenario)
    # The first step has one bucket, all others several.
    assert scenario.world_size == 1 or len(answers[0]["buckets"][-1]) > 1
    assert_bit_equal(answers, scenario)


# --- the same bits as the reference ---------------------------------------------------------------


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("codec", "warmup", "world_size"), rows(CODECS, ("q8", "q4"), (1, 2, 3), turns=2)
)
def test_warmup_change_and_momentum_equal_reference(
    worlds: Worlds, codec: str, warmup: str, world_size: int
) -> None:
    check(worlds, warming_up(codec, world_size, warmup))


@pytest.mark.parametrize(("codec", "feedback"), rows(CODECS, ("owner", "both", "auto")))
def test_warmup_without_momentum_equals_reference(
    worlds: Worlds, codec: str, feedback: str
) -> None:
    options = {"momentum": None}
    check(worlds, warming_up(codec, 2, "q8", error_feedback=feedback, options=options))


@pytest.mark.parametrize(("wide", "embedding"), [("exact", "bf16"), ("q8", "rht:bits=2")])
def test_warmup_may_be_coarser_and_what_is_exact_stays_so(
    worlds: Worlds, wide: str, embedding: str
) -> None:
    rules = (("wide", wide), ("embedding", embedding), ("just*", "sign1"), ("bias", "q4"))
    check(worlds, warming_up("topk:ratio=0.02", 2, "rht:bits=3", rules=rules))


@pytest.mark.parametrize("world_size", [1, 2])
def test_warmup_equals_reference_with_every_dtype(worlds: Worlds, world_size: int) -> None:
    check(worlds, warming_up("sign1", world_size, "q8", weights=EVERY_DTYPE))


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_warmup_equals_reference_around_what_is_not_finite(worlds: Worlds, poison: float) -> None:
    places = {(1, 1, "wide"): poison, (2, 0, "embedding"): poison, (3, 2, "wide"): poison}
    check(worlds, warming_up("sign1", 3, "q8", poison=places))


def test_warmup_equals_reference_with_uneven_inputs(worlds: Worlds) -> None:
    check(worlds, warming_up("sign1", 3, "q8", steps_by_rank=(2, 7, 4)))


def test_warmup_equals_reference_with_the_standard_signature(worlds: Worlds) -> None:
    options = {"error_feedback": "worker", "native": False, "passes": 2}
    check(worlds, warming_up("topk:ratio=0.02", 2, "q4", **options))


@on_ranks()
def test_a_hook_says_how_it_warms_up() -> None:
    assert "warm-up: 3 steps with q8" in str(Run(warming_up("sign1", 2, "q8")).state)


def test_a_hook_by_name_has_a_warmup() -> None:
    config = hook_config("sign1+momentum=0.9+warmup_steps=100+warmup=topk:ratio=0.25")
    assert config.warmup == parse_codec("topk:ratio=0.25")
    with pytest.raises(ConfigError, match="warmup_steps="):
        hook_config("sign1+momentum=0.9+warmup=q8")


# --- nothing is lost ------------------------------------------------------------------------------


def case_sums(scenario: Scenario) -> dict[str, Any]:
    """After every step what was given and applied so far, and the saved state."""
    run = Run(scenario)
    count = range(len(scenario.weights))
    given = [np.zeros(w.num_elements) for w in scenario.weights]
    applied = [np.zeros(w.num_elements) for w in scenario.weights]
    steps, largest = [], 0.0
    for step in range(scenario.steps):
        arrived = run.step(step)
        for index in count:
            given[index] += scenario.gradient(step, 0, run.rank, index)
            applied[index] += arrived[index]
            largest = max(largest, float(np.abs(arrived[index]).max()))
        saved = run.state.state_dict()
        slot = saved[f"slot_{run.rank}"]
        largest = max([largest, *(float(slot[n].abs().max()) for n in ("worker", "owner"))])
        sums = {"given": np.concatenate(given), "applied": np.concatenate(applied)}
        steps.append({**sums, "saved": saved})
    return {"steps": steps, "largest": largest}


@pytest.mark.parametrize(("codec", "momentum"), rows(CODECS, (BETA, None)))
def test_what_warmup_withholds_comes_once(
    world_of_2: World, codec: str, momentum: float | None
) -> None:
    options = {"error_feedback": "both", "options": {"momentum": momentum}}
    scenario = warming_up(codec, 2, "rht:bits=2", **options)
    answers = world_of_2.run(case_sums, scenario=scenario)
    layout = reference_of(scenario).layout
    sizes = [weight.num_elements for weight in WEIGHTS]
    # A residual in momentum mode delivers 1 - m of itself next, then (1 - m) m, and so on.
    share = np.repeat([1 - momentum_behind(c, momentum or 0.0) for c in layout.codecs], sizes)
    largest = 64.0
    assert max(answer["largest"] for answer in answers) < largest / 2
    for step in range(STEPS):
        of_ranks = [answer["steps"][step] for answer in answers]
        missing = np.concatenate(still_missing([rank["saved"] for rank in of_ranks], scenario))
        if step + 1 >= WARMUP_STEPS:
            missing /= share
        given = np.mean([rank["given"] for rank in of_ranks], axis=0)
        lost = np.abs(given - of_ranks[0]["applied"] - missing)
        # Per step and rank at most: alpha g, its sum, v - D, m D and its sum; the sum over ranks;
        # then the mean, 1 / W, the owner's sum and its v - D; at the change one product for each.
        # All of numbers below `largest`, and residuals count 1 / (1 - m) times.
        assert (lost <= (step + 1) * (2 * 7 + 5) * largest * 2.0**-24 / share).all(), step
    # The end of the warm-up leaves behind what the bound would not hide.
    held = answers[0]["steps"][WARMUP_STEPS - 2]["saved"]["slot_0"]["worker"]
    assert held.abs().max() > 1


# --- saved and loaded -----------------------------------------------------------------------------


def all_bytes(gradients: list[list[np.ndarray]]) -> list[list[bytes]]:
    return [[g.tobytes() for g in step] for step in gradients]


@pytest.mark.parametrize("at", [2, 3, 4])
@on_ranks()
def test_saving_and_resuming_change_no_bit(at: int) -> None:
    """Steps at a stretch, and the same ones saved at `at`, in the same run and in a new one."""
    scenario = warming_up("sign1", 2, "q8")
    straight, before = Run(scenario), Run(scenario)
    expected = [straight.step(step) for step in range(STEPS)]
    gone_on = [before.step(step) for step in range(at)]
    after = before.saved_and_loaded()
    resumed = gone_on + [after.step(step) for step in range(at, STEPS)]
    gone_on += [before.step(step) for step in range(at, STEPS)]
    assert all_bytes(expected) == all_bytes(gone_on) == all_bytes(resumed)
    end = slot(straight.state)
    for other in (before, after):
        for name in ("worker", "owner"):
            assert torch.equal(end[name], slot(other.state)[name])


@pytest.mark.parametrize("at", [WARMUP_STEPS - 1, WARMUP_STEPS])
@on_ranks()
def test_residuals_of_a_compressed_warmup_are_not_taken_for_momentum(at: int) -> None:
    """A state of step `at` is loaded under other options, and back."""
    scenario = warming_up("sign1", 2, "q8")
    dense = {"momentum": BETA, "warmup_steps": WARMUP_STEPS}
    for options in ({"momentum": BETA}, dense, {**dense, "warmup": "q4"}):
        one, other = Run(scenario), Run(dataclasses.replace(scenario, options=options))
        for step in range(at):
            one.step(step)
            other.step(step)
        saved = one.state.state_dict(), other.state.state_dict()
        fits = at == WARMUP_STEPS or "warmup" in options
        for run, theirs in zip((other, one), saved, strict=True):
            outcome = attempt(lambda run=run, theirs=theirs: run.state.load_state_dict(theirs))
            assert outcome.error == (None if fits else "StateError")
            assert fits or "load it with the arguments it was saved with" in outcome.text


# --- momentum that an optimizer hands over --------------------------------------------------------


def case_hand_over(codec: str, warmup: str, skipped: tuple[int, ...]) -> list[list[np.ndarray]]:
    """What OneBitAdam gets, unscaled, in the steps that a GradScaler does not skip.

    All gradients of the others are infinite, so that they leave every residual as it was.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    model = ChosenGradients(CHOSEN)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    options = {"warmup": warmup, "grad_scaler": scaler}
    _, optimizer = one_bit_adam(ddp, codec, freeze=WARMUP_STEPS, attach=options, lr=0.01)
    kept = []
    for step in range(STEPS):
        optimizer.zero_grad()
        targets = CHOSEN.targets(step, dist.get_rank())
        if step in skipped:
            targets = {name: torch.full_like(each, math.inf) for name, each in targets.items()}
        scaler.scale(ddp(targets)).backward()
        if step not in skipped:
            kept.append([p.grad.div(scaler.get_scale()).numpy() for p in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
    return kept


@pytest.mark.parametrize(
    ("codec", "skipped"), rows(("sign1", "topk:ratio=0.05"), ((), (0,), (2,), (2, 3), (3,)))
)
def test_momentum_is_handed_over_after_the_change(
    world_of_2: World, codec: str, skipped: tuple[int, ...]
) -> None:
    fewer = sum(step < WARMUP_STEPS for step in skipped)
    late = 2 in skipped  # one step more passes until the optimizer finds that it is to freeze
    scenario = warming_up(codec, 2, "q8", options={"warmup_steps": WARMUP_STEPS - fewer})
    engine, count = reference_of(scenario), range(len(WEIGHTS))
    averages = [torch.zeros(w.num_elements) for w in WEIGHTS]
    expected: list[list[np.ndarray]] = []
    handed_over = False
    for step in range(STEPS):
        if step in skipped:
            continue
        given = [[CHOSEN.gradient(step, 0, rank, i) for i in count] for rank in range(2)]
        expected.append(engine.step(given)[0])
        if step < WARMUP_STEPS:
            for average, arrived in zip(averages, expected[-1], strict=True):
                average.lerp_(torch.from_numpy(arrived), 1 - BETA)
        if step + 1 >= WARMUP_STEPS and not handed_over:
            handed_over = True
            for index, own in enumerate(engine.layout.codecs):
                share = (1 - momentum_behind(own, BETA)) / (1 - BETA)
                factor = np.float32(BETA ** (1 + late) * share)
                for residual in engine.worker_residual[index]:
                    residual += averages[index].numpy() * factor
    for kept in world_of_2.run(case_hand_over, codec=codec, warmup="q8", skipped=skipped):
        for got, want in zip(kept, expected, strict=True):
            assert [g.tobytes() for g in got] == [w.tobytes() for w in want]
