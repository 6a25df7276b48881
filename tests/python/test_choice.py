"""codec="auto": what it may choose, when it changes its mind, and how all ranks change at once."""

from __future__ import annotations

import dataclasses
import io
import logging
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gradferry.checkpoint import merge
from gradferry.core.codec_spec import parse_codec
from gradferry.core.config import make_config
from gradferry.core.nodes import Nodes
from gradferry.core.options import Options
from gradferry.ddp import auto as choice
from gradferry.ddp.auto import (
    CHECK_EVERY,
    CHOSEN_BY,
    FIRST_CHECK,
    SLOWER,
    candidates,
    decide,
)
from gradferry.ddp.state import bound_to
from gradferry.ddp.trial import TRIAL_STEPS
from gradferry.forecast.diagnosis import default_hooks
from gradferry.forecast.hook_names import TORCH_DTYPES
from gradferry.forecast.predict import Prediction
from gradferry.reduction import start
from outcomes import attempt
from residual_sums import still_missing
from scenario import Run, Scenario, Weight
from world import World

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))
# What residuals hold of a momentum of 0.5 behind topk:ratio=0.05, of which m / (1 - m) is
# 0.5 / (1 - 0.5) / (1 + (1 / 0.05 - 1) / 4) = 1 / 5.75: (1 - m) / (1 - 0.5).
SHARE = 2 / (1 + 1 / 5.75)
Members = tuple[tuple[int, ...], ...]
AUTO = Scenario(WEIGHTS, codec="auto", ddp={"bucket_cap_mb": 0.02})


def predicted(**ms: float) -> list[Prediction]:
    """By "codec" or "codec exchange"."""
    return [
        Prediction(codec, None, 1e-3 * value, 0.0, 0, exchange or None)
        for name, value in ms.items()
        for codec, _, exchange in [name.partition(" ")]
    ]


def decided(held: str | None, **ms: float) -> str:
    every = predicted(**ms)
    found, _ = decide(every, next((p for p in every if p.hook == held), None))
    return found.hook


@pytest.mark.parametrize(
    ("ms", "chosen"),
    [
        ({"off": 100, "bf16": 99, "q4": 98.1}, "off"),  # all within 2 % of the fastest
        ({"off": 103, "bf16": 99, "q4": 98.1}, "bf16"),
        ({"off": 200, "bf16": 120, "q8": 111, "q4": 100}, "q4"),
        ({"off": 100, "exact": 100}, "off"),
        ({"off": 101, "exact": 100}, "off"),
        # 3 bits where they save more than 2 %, or 4 bits cost no more.
        ({"q4": 103, "rht:bits=3": 100}, "rht:bits=3"),
        ({"q4": 101, "rht:bits=4": 102, "rht:bits=3": 100}, "q4"),
        # q4 has 4.3 bits and rht 4.1, and loses no less: the faster of the two.
        ({"q4": 101, "rht:bits=4": 100.5, "rht:bits=3": 100}, "rht:bits=4"),
    ],
)
def test_the_most_precise_within_2_percent_is_chosen(ms, chosen):
    wanted, reason = decide(predicted(**ms), None)
    assert wanted.hook == chosen
    assert chosen in reason
    assert "within 2% of" in reason


def test_a_choice_stays_while_it_is_not_much_slower():
    assert decided("off", off=109, q4=100) == "off"
    assert decided("off", off=111, q4=100) == "q4"
    # More bits only when they cost nothing, not already within 2 %.
    assert decided("q4", off=101, q4=100) == "q4"
    assert decided("q4", off=99, q4=100) == "off"
    assert decided("rht:bits=3", **{"q4": 99, "rht:bits=3": 100}) == "q4"
    assert decided("rht:bits=4", **{"q4": 99, "rht:bits=4": 100}) == "rht:bits=4"


@pytest.mark.parametrize("start", ["off", "bf16", "q4"])
def test_noise_does_not_make_it_flap(start):
    # At most 1.03 * 1.02 / 0.98 = 1.07 lie between any two: below 1 + SLOWER. So a choice can only
    # go to more precision, when that happens to be the fastest.
    noise = random.Random(0)
    current, changes = start, 0
    for _ in range(1000):
        ms = {"off": 103.0, "bf16": 101.5, "q4": 100.0}
        noisy = {hook: value * noise.uniform(0.98, 1.02) for hook, value in ms.items()}
        wanted = decided(current, **noisy)
        changes += wanted != current
        current = wanted
    assert changes <= 2


def test_checks_become_rarer_with_every_change():
    # So a training of n steps sees at most log2(n / CHECK_EVERY + 1) changes, whatever is measured.
    steps, interval, changes = FIRST_CHECK, CHECK_EVERY, 0
    while steps < 1_000_000:
        interval *= 2
        steps += interval
        changes += 1
    assert changes <= np.log2(1_000_000 / CHECK_EVERY + 1)


def config_of(**arguments: Any) -> Any:
    return make_config(Options("auto", **arguments))


def test_codecs_below_3_bits_are_for_momentum_mode():
    without = candidates(config_of())
    assert {name.partition(":")[0] for name in without} == {
        "off", "exact", "bf16", "q8", "q4", "rht",
    }  # fmt: skip
    assert "rht:bits=3" in without
    momentum = candidates(config_of(momentum=0.9))
    assert {"sign1", "topk"} < {name.partition(":")[0] for name in momentum}
    assert "off" not in momentum  # it delivers gradients, not their momentum


def test_doctor_and_auto_choose_from_the_same_codecs():
    of_doctor = {str(parse_codec(hook)) for hook in default_hooks() if hook not in TORCH_DTYPES}
    assert set(candidates(config_of(momentum=0.9))) == of_doctor


@pytest.mark.parametrize("arguments", [{"nonfinite": "raise"}, {"check_every": 5}])
def test_off_is_no_choice_where_only_an_engine_does_what_was_asked(arguments):
    assert "off" not in candidates(config_of(**arguments))


def run_on(scenario: Scenario, found: Members | None) -> Run:
    """As if ranks were found on these nodes."""
    if found is None:
        return Run(scenario)
    with mock.patch.object(start, "resolve", return_value=Nodes(found)):
        return Run(scenario)


def case_forced(
    scenario: Scenario, answers: list[str], steps: int, found: Members | None = None
) -> dict[str, Any]:
    """Trains with a choice every 4 steps from step 3 on, of which `answers` are the outcomes."""
    run = run_on(scenario, found)
    bound = bound_to(run.state)
    chooser = bound.chooser
    chooser.choice = choice.Choice(next_check=3, interval=2)
    chooser._observed = object()
    chooser.start(bound.hook)
    equal_costs = predicted(**dict.fromkeys(answers, 1))
    named = dict(zip(dict.fromkeys(answers), equal_costs, strict=True))
    told = ((named[answer], "so it was told") for answer in answers)
    with (
        mock.patch.object(choice, "decide", side_effect=told),
        mock.patch.object(choice, "rivals", side_effect=lambda _, chosen: [chosen]),
        mock.patch.object(chooser, "_observe"),
        mock.patch.object(chooser, "_predict", return_value=equal_costs),
    ):
        gradients = [run.step(step) for step in range(steps)]
    stats = run.state.stats()
    return {
        "gradients": gradients,
        "hashes": run.hashes,
        "choice": stats["choice"],
        "stats": stats,
        "config_hash": bound.running.config_hash,
        "state": run.state.state_dict(),
        "text": str(run.state),
    }


def case_given(
    scenario: Scenario, begin: int, steps: int, found: Members | None = None
) -> list[Any]:
    """The same gradients with a codec that begins at step `begin`."""
    run = run_on(scenario, found)
    engine = bound_to(run.state).running.engine
    worker, owner = (torch.zeros(size) for size in engine.residual_sizes())
    engine.load_state(steps=begin, worker_residual=worker, owner_residual=owner, loss_scale=0.0)
    return [run.step(step) for step in range(begin, steps)]


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(
        np.array_equal(a, b)
        for step, step_of_other in zip(one, other, strict=True)
        for a, b in zip(step, step_of_other, strict=True)
    )


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("codec", ["q4", "rht:bits=4"])  # whose signs change with the step
def test_all_ranks_change_at_the_same_step(world_of_2: World, native: bool, codec: str) -> None:
    scenario = dataclasses.replace(AUTO, native=native)
    answers = world_of_2.run(case_forced, scenario=scenario, answers=[codec] * 3, steps=7)
    exact = dataclasses.replace(scenario, codec="exact")
    chosen = dataclasses.replace(scenario, codec=codec)
    dense = world_of_2.run(case_given, scenario=exact, begin=0, steps=3)
    compressed = world_of_2.run(case_given, scenario=chosen, begin=3, steps=7)
    assert answers[0]["hashes"] == answers[1]["hashes"]
    for answer, before, after in zip(answers, dense, compressed, strict=True):
        assert equal(answer["gradients"][:3], before)
        assert equal(answer["gradients"][3:], after)
        assert answer["choice"]["codec"].startswith(codec.partition(":")[0])
        assert answer["choice"]["reason"] == "so it was told"
        assert answer["choice"]["step"] == 3
        assert answer["stats"]["steps"] == 7
        assert answer["stats"]["gradient_bytes"] == 7 * 4 * (90 * 70 + 50 + 120 * 60)
        assert "chosen by 'auto': so it was told" in answer["text"]
    assert answers[0]["config_hash"] == answers[1]["config_hash"]


def test_off_takes_the_backends_all_reduce_and_can_be_left_again(world_of_2: World) -> None:
    told = ["off", "q8"]
    answers = world_of_2.run(case_forced, scenario=AUTO, answers=told, steps=8)
    q8 = dataclasses.replace(AUTO, codec="q8")
    for answer, after in zip(
        answers, world_of_2.run(case_given, scenario=q8, begin=5, steps=8), strict=False
    ):
        # Off at step 3, q8 at step 3 + 2: the interval doubles only with the next change.
        assert answer["stats"]["fallbacks"] > 0
        assert equal(answer["gradients"][5:], after)
        assert answer["choice"]["codec"] == "q8"


def case_owner_residuals(scenario: Scenario) -> list[np.ndarray]:
    """Owner residuals by tile, before and after a change of codec."""
    run = Run(scenario)
    bound = bound_to(run.state)
    bound.running.switch(bound.hook, parse_codec("q4"), 0)
    for step in range(3):
        run.step(step)

    def by_tile() -> np.ndarray:
        _, _, owner, _ = bound.running.engine.state()
        rows = [row for row in bound.running.engine.tiles() if row[3] >= 0]
        whole = np.zeros(sum(row[1] for row in bound.running.engine.tiles()), np.float32)
        begins = np.cumsum([0] + [row[1] for row in bound.running.engine.tiles()])
        for tile, count, _, offset in rows:
            whole[begins[tile] : begins[tile] + count] = owner[offset : offset + count]
        return whole

    before = by_tile()
    bound.running.switch(bound.hook, parse_codec("q8"), 3)
    return [before, by_tile()]


def test_what_owners_withheld_goes_to_the_new_owners(world_of_2: World) -> None:
    answers = world_of_2.run(case_owner_residuals, scenario=AUTO)
    before = sum(answer[0] for answer in answers)
    after = sum(answer[1] for answer in answers)
    assert before.any()
    assert np.array_equal(before, after)


def test_momentum_goes_on_through_a_change(world_of_2: World) -> None:
    scenario = dataclasses.replace(AUTO, options={"momentum": 0.5})
    answers = world_of_2.run(case_forced, scenario=scenario, answers=["bf16"] * 2, steps=4)
    exact = dataclasses.replace(scenario, codec="exact")
    for answer, dense in zip(
        answers, world_of_2.run(case_given, scenario=exact, begin=0, steps=4), strict=False
    ):
        # bf16 rounds to 8 bits of mantissa; without the momentum of 3 steps half would be missing.
        for got, wanted in zip(answer["gradients"][3], dense[3], strict=True):
            assert np.allclose(got, wanted, rtol=2.0**-6, atol=2.0**-7 * np.abs(wanted).max())


def case_share_of_momentum(scenario: Scenario) -> list[torch.Tensor]:
    """Worker residuals under sign1, then topk, then sign1 again."""
    run = Run(scenario)
    bound = bound_to(run.state)
    seen = []
    for number, codec in enumerate(("sign1", "topk:ratio=0.05", "sign1")):
        bound.running.switch(bound.hook, parse_codec(codec), min(number, 1))
        if number == 0:
            run.step(0)
        seen.append(bound.running.engine.state()[1])
    return seen


def test_residuals_hold_more_of_a_momentum_of_which_less_stays(world_of_2: World) -> None:
    weights = (Weight("only", (64, 64)),)
    scenario = dataclasses.replace(AUTO, weights=weights, options={"momentum": 0.5})
    for sign1, topk, again in world_of_2.run(case_share_of_momentum, scenario=scenario):
        assert sign1.any()
        torch.testing.assert_close(topk, sign1 * SHARE, rtol=2.0**-22, atol=0)
        torch.testing.assert_close(again, sign1, rtol=2.0**-21, atol=0)


def test_residuals_of_a_compressed_warmup_are_those_of_every_codec(world_of_2: World) -> None:
    options = {"momentum": 0.5, "warmup_steps": 2, "warmup": "q4"}
    scenario = dataclasses.replace(AUTO, options=options)
    for sign1, topk, again in world_of_2.run(case_share_of_momentum, scenario=scenario):
        assert sign1.any()
        assert torch.equal(topk, sign1)
        assert torch.equal(again, sign1)


def case_moved(scenario: Scenario, saved: list[dict], codec: str) -> tuple[dict, dict]:
    """The state after loading (if there is something to load), and after two steps more."""
    run = Run(scenario)
    if saved:
        run.state.load_state_dict(merge(saved), on_resize="mean")
    if codec:
        bound = bound_to(run.state)
        spec = parse_codec(codec)
        bound.running.switch(bound.hook, spec, 0)
        bound.chooser.choice = choice.Choice(codec=spec, made=True, reason="so it was told")
    loaded = run.state.state_dict()
    begin = int(loaded["steps"])
    for step in range(begin, begin + 2):
        run.step(step)
    return loaded, run.state.state_dict()


def test_momentum_goes_to_a_world_of_one_and_back(worlds: Callable[[int], World]) -> None:
    weights = (Weight("only", (64, 64)),)
    pair = dataclasses.replace(AUTO, weights=weights, options={"momentum": 0.5})
    alone = dataclasses.replace(pair, world_size=1)
    first = worlds(2).run(case_moved, scenario=pair, saved=[], codec="topk:ratio=0.05")
    saved = [state for _, state in first]
    ((one, later),) = worlds(1).run(case_moved, scenario=alone, saved=saved, codec="")
    back = worlds(2).run(case_moved, scenario=pair, saved=[later], codec="")
    topk = dataclasses.replace(pair, codec="topk:ratio=0.05")
    (before,) = still_missing(saved, topk)
    (after,) = still_missing([one], dataclasses.replace(alone, codec="exact"))
    assert before.any()
    # The mean, the sum with the owner's, the share, and the product.
    np.testing.assert_allclose(after * SHARE, before, rtol=0, atol=np.abs(before).max() * 2.0**-21)
    for rank, (loaded, _) in enumerate(back):
        torch.testing.assert_close(
            loaded[f"slot_{rank}"]["worker"],
            later["slot_0"]["worker"] * SHARE,
            rtol=2.0**-22,
            atol=0,
        )
        assert loaded["steps"] == 4
        # The world of one passed it on.
        assert loaded["choice"]["codec"] == saved[0]["choice"]["codec"]


def case_resumed(scenario: Scenario, codec: str) -> dict[str, Any]:
    """Six steps at a stretch, and three, saved, and three more in a new model."""
    spec = parse_codec(codec)

    def chosen() -> Run:
        run = Run(scenario)
        bound = bound_to(run.state)
        bound.running.switch(bound.hook, spec, 0)
        bound.chooser.choice = choice.Choice(codec=spec, made=True, reason="so it was told")
        return run

    straight = chosen()
    expected = [straight.step(step) for step in range(6)]
    before = chosen()
    for step in range(3):
        before.step(step)
    file = io.BytesIO()
    torch.save({"model": before.model.state_dict(), "hook": before.state.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    after = Run(scenario)
    after.model.load_state_dict(saved["model"])
    after.state.load_state_dict(saved["hook"])
    resumed = [after.step(step) for step in range(3, 6)]
    return {
        "equal": equal(expected[3:], resumed),
        "choice": after.state.stats()["choice"],
        "steps": after.state.stats()["steps"],
    }


@pytest.mark.parametrize("codec", ["q4", "off"])
def test_a_checkpoint_holds_the_choice(world_of_2: World, codec: str) -> None:
    for answer in world_of_2.run(case_resumed, scenario=AUTO, codec=codec):
        assert answer["equal"]
        assert answer["choice"]["codec"] == codec
        assert answer["choice"]["exchange"] == "flat"
        assert answer["choice"]["reason"] == "restored from a checkpoint"
        assert answer["choice"]["next_check"] >= 3 + FIRST_CHECK
        assert answer["steps"] == 6


def case_loads_another(scenario: Scenario) -> Any:
    run = Run(scenario)
    run.step(0)
    saved = run.state.state_dict()
    if run.rank == 1:
        saved["choice"] = {**saved["choice"], "codec": "q8"}
    return attempt(lambda: Run(scenario).state.load_state_dict(saved))


def test_ranks_that_load_unlike_choices_all_get_the_same_error(world_of_2: World) -> None:
    one, other = world_of_2.run(case_loads_another, scenario=AUTO)
    assert one.error == other.error == "RankMismatchError"
    assert one.text == other.text
    assert "choice" in one.text
    assert "q8" in one.text


def case_measured(scenario: Scenario) -> dict[str, Any]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("gradferry")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        run = Run(scenario)
        before = run.state.stats()["choice"]
        for step in range(CHOSEN_BY + 2):
            run.step(step)
    finally:
        logger.removeHandler(handler)
    return {
        "before": before,
        "choice": run.state.stats()["choice"],
        "hashes": run.hashes,
        "log": [record.getMessage() for record in records],
    }


def test_it_measures_chooses_and_says_why(world_of_2: World) -> None:
    one, other = world_of_2.run(case_measured, scenario=AUTO)
    assert one["hashes"] == other["hashes"]
    assert one["choice"] == other["choice"]
    assert one["before"]["codec"] == "exact"
    assert "measured" in one["before"]["reason"]
    made = one["choice"]
    assert made["step"] == FIRST_CHECK + len(made["measured_ms"]) * TRIAL_STEPS
    assert made["next_check"] == made["step"] + CHECK_EVERY
    assert set(made["predicted_ms"]) == set(candidates(config_of()))
    assert made["exchange"] == "flat"
    known = made["measured_ms"] or made["predicted_ms"]
    assert known[made["codec"]] <= 1.02 * min(known.values())
    assert len(one["log"]) == 1
    assert not other["log"]
    assert f"takes {made['codec']} from step {made['step']} on" in one["log"][0]


def case_disabled(scenario: Scenario) -> dict[str, Any]:
    with mock.patch.dict("os.environ", {"GRADFERRY_DISABLE": "1"}):
        run = Run(scenario)
    for step in range(FIRST_CHECK + 2):
        run.step(step)
    return run.state.stats()


def test_disabled_it_chooses_nothing(world_of_2: World) -> None:
    for stats in world_of_2.run(case_disabled, scenario=AUTO):
        assert stats["choice"] == {
            "codec": "off",
            "exchange": "flat",
            "reason": "GRADFERRY_DISABLE=1",
        }
        assert stats["wire_bytes"] == 0


def case_failing(scenario: Scenario) -> Any:
    run = Run(scenario)

    def fail(*_: Any) -> None:
        raise ArithmeticError("not today")

    bound = bound_to(run.state)
    bound.hook.call_at(1, fail, "test")
    run.step(0)
    return attempt(lambda: run.step(1))


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_an_error_in_a_choice_is_the_steps_error(world_of_2: World, native: bool) -> None:
    for outcome in world_of_2.run(case_failing, scenario=dataclasses.replace(AUTO, native=native)):
        assert outcome.error == "ArithmeticError"
        assert "not today" in outcome.text


def test_slower_is_more_than_the_tolerance_so_that_there_is_a_band():
    assert SLOWER > 2 * choice.TOLERANCE
