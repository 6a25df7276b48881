"""Going on with another number of ranks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from gradferry.checkpoint import ResizedState, merge
from outcomes import Outcome, attempt
from reducing import same
from reference.engine import momentum_behind
from residual_sums import advance, assert_goes_on, reference_of, resize, still_missing, worker_mean
from scenario import Run, Scenario, Weight
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (
    Weight("embedding", (70, 64)),
    Weight("wide", (3, 4099)),
    Weight("bias", (67,)),
    Weight("bf16", (90, 50), torch.bfloat16),
)
MODES = {
    "q4": {"codec": "q4", "error_feedback": "both"},
    "topk": {"codec": "topk:ratio=0.05"},
    "sign1_momentum": {"codec": "sign1", "options": {"momentum": 0.9}},
    "topk_momentum": {"codec": "topk:ratio=0.05", "options": {"momentum": 0.9}},
    "rht": {"codec": "rht:bits=2"},
    # Resized within the warm-up, which ends before it is resized again.
    "topk_warmup": {
        "codec": "topk:ratio=0.05",
        "options": {"momentum": 0.9, "warmup_steps": 5, "warmup": "q4"},
    },
}


Members = tuple[tuple[int, ...], ...]
TWO_BY_TWO: Members = ((0, 1), (2, 3))
CROSSED: Members = ((0, 2), (1, 3))
UNEVEN: Members = ((0, 1), (2,))


def apart(world_size: int) -> Members:
    return tuple((rank,) for rank in range(world_size))


ROUTES = {
    "2-3-2": (apart(2), apart(3), apart(2)),
    "4-2": (apart(4), apart(2)),
    "2x2-4x1-2x1-2x2": (TWO_BY_TWO, apart(4), apart(2), TWO_BY_TWO),
    "2x2-crossed-uneven-2x2": (TWO_BY_TWO, CROSSED, UNEVEN, TWO_BY_TWO),
    "2x2-1-4x1": (TWO_BY_TWO, apart(1), apart(4)),
}


def scenario_of(mode: str, world_size: int) -> Scenario:
    return Scenario(WEIGHTS, world_size, ddp={"bucket_cap_mb": 0.05}, **MODES[mode])


def scenario_on(mode: str, members: Members, weights: tuple[Weight, ...] = WEIGHTS) -> Scenario:
    scenario = scenario_of(mode, sum(map(len, members)))
    nodes = None if len(members) == scenario.world_size else members
    return dataclasses.replace(scenario, weights=weights, nodes=nodes)


def case_go_on(
    scenario: Scenario, saved: list[dict] | None, on_resize: str, steps: range
) -> dict[str, Any]:
    """Loads, if there is something to load, and trains."""
    run = Run(scenario)
    if saved is not None:
        run.state.load_state_dict(merge(saved), on_resize=on_resize)
    loaded = run.state.state_dict()
    gradients = [run.step(step) for step in steps]
    return {"gradients": gradients, "loaded": loaded, "saved": run.state.state_dict()}


def go_on(
    worlds: Worlds,
    scenario: Scenario,
    steps: range = range(0),
    saved: list[dict] | None = None,
    on_resize: str = "mean",
) -> list[dict[str, Any]]:
    """`case_go_on` on all ranks of the scenario."""
    arguments = {"scenario": scenario, "saved": saved, "on_resize": on_resize, "steps": steps}
    return worlds(scenario.world_size).run(case_go_on, **arguments)


def residuals_of(answers: list[dict], key: str) -> list[dict]:
    return [answer[key] for answer in answers]


# Every mode, every route.
QUICK = (
    *(("q4", "2x2-crossed-uneven-2x2"), ("topk", "2-3-2"), ("rht", "4-2"), ("q4", "2x2-1-4x1")),
    *(("sign1_momentum", "2x2-4x1-2x1-2x2"), ("topk_momentum", "2x2-crossed-uneven-2x2")),
    ("topk_warmup", "2-3-2"),
)


@pytest.mark.parametrize(
    ("mode", "route"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in itertools.product(MODES, ROUTES)
        # In a world of one momentum takes what owners have; see below.
        if not (row[1] == "2x2-1-4x1" and "options" in MODES[row[0]])
    ],
)
def test_mean_keeps_what_is_missing_and_goes_on_as_the_reference(
    worlds: Worlds, mode: str, route: str
) -> None:
    saved, engine, before_it = None, None, None
    for number, members in enumerate(ROUTES[route]):
        scenario = scenario_on(mode, members)
        steps = range(3 * number, 3 * number + 3)
        answers = go_on(worlds, scenario, steps, saved)
        engine = reference_of(scenario) if engine is None else resize(engine, scenario)
        assert_goes_on(answers, engine, scenario, steps)
        # A world of one rounds sums, too: test_elastic_alone.py.
        if saved is not None and 1 not in (scenario.world_size, before_it.world_size):
            before = np.concatenate(still_missing(saved, before_it))
            after = np.concatenate(still_missing(residuals_of(answers, "loaded"), scenario))
            assert np.abs(before).max() > 0.1
            # The mean of the workers' is rounded to fp32 once; the owners' move as they are.
            largest = np.abs(np.concatenate(worker_mean(saved, before_it))).max()
            assert np.abs(after - before).max() <= largest * 2.0**-24
            assert {s["steps"] for s in residuals_of(answers, "loaded")} == {3 * number}
        saved, before_it = residuals_of(answers, "saved"), scenario


def momentum_shares(scenario: Scenario) -> np.ndarray:
    """By element, what residuals of two ranks hold for what a world of one holds."""
    layout = reference_of(scenario).layout
    sizes = [parameter.num_elements for parameter in layout.parameters]
    kept = [momentum_behind(codec, 0.9) for codec in layout.codecs]
    return np.repeat([(1 - m) / (1 - 0.9) for m in kept], sizes)


@pytest.mark.parametrize(
    ("mode", "members"), [("sign1_momentum", UNEVEN), ("topk_momentum", apart(2))]
)
def test_world_of_one_takes_owner_residuals_into_its_momentum(
    worlds: Worlds, mode: str, members: Members
) -> None:
    scenario = scenario_on(mode, members)
    saved = residuals_of(go_on(worlds, scenario, range(3)), "saved")
    alone = scenario_on(mode, apart(1))
    (loaded,) = residuals_of(go_on(worlds, alone, saved=saved), "loaded")
    shares = momentum_shares(scenario)
    before = np.concatenate(still_missing(saved, scenario)) / shares
    after = np.concatenate(still_missing([loaded], alone))
    # The mean, its sum with the owner's, the share and the product with it are rounded.
    assert (np.abs(after - before) <= 4 * 32 * 2.0**-24).all()
    assert np.abs(before).max() < 32
    back = go_on(worlds, scenario, saved=[loaded])
    again = np.concatenate(still_missing(residuals_of(back, "loaded"), scenario)) / shares
    assert (np.abs(again - after) <= 2 * 32 * 2.0**-24).all()


def test_compressed_warmup_goes_on_in_a_world_of_one(worlds: Worlds) -> None:
    scenario, alone = scenario_of("topk_warmup", 2), scenario_of("topk_warmup", 1)
    saved = residuals_of(go_on(worlds, scenario, range(3)), "saved")
    engine = reference_of(scenario)
    advance(engine, scenario, range(3))
    one = resize(engine, alone)
    assert max(np.abs(worker[0]).max() for worker in one.worker_residual) > 0.1
    assert_goes_on(go_on(worlds, alone, range(3, 8), saved), one, alone, range(3, 8))


def test_same_size_is_strict_whatever_on_resize_says(worlds: Worlds) -> None:
    scenario = scenario_of("q4", 2)
    saved = residuals_of(go_on(worlds, scenario, range(3)), "saved")
    for policy in ("strict", "mean", "drop"):
        loaded = residuals_of(go_on(worlds, scenario, saved=saved, on_resize=policy), "loaded")
        assert all(map(same, saved, loaded))


def case_refused(scenario: Scenario, attempts: list[tuple[list[dict], str]]) -> list[Outcome]:
    run = Run(scenario)

    def load(states: list[dict], policy: str) -> None:
        run.state.load_state_dict(merge(states), on_resize=policy)

    return [attempt(functools.partial(load, *arguments)) for arguments in attempts]


def test_what_cannot_be_resized_is_refused(worlds: Worlds) -> None:
    scenario = scenario_of("q4", 2)
    two = residuals_of(go_on(worlds, scenario, range(2)), "saved")
    later = [{**two[0], "steps": 5}, two[1]]
    stolen = {**two[1], "slot_1": {**two[1]["slot_1"]}}
    stolen["slot_1"]["owner_tiles"] = two[0]["slot_0"]["owner_tiles"]
    short = {**two[1], "slot_1": {**two[1]["slot_1"], "owner": torch.zeros(16)}}
    attempts = [
        (two, "strict"),
        (two[:1], "mean"),
        (later, "mean"),
        ([two[0], two[0]], "mean"),
        ([two[0], stolen], "mean"),
        ([two[0], short], "mean"),
        ([], "mean"),
        (two, "drop"),
    ]
    for outcomes in worlds(3).run(
        case_refused, scenario=dataclasses.replace(scenario, world_size=3), attempts=attempts
    ):
        assert [o.error for o in outcomes] == ["StateError"] * 7 + [None]
        texts = [o.text for o in outcomes]
        assert "has world_size 2, this hook has 3" in texts[0]
        assert "slot_1 is missing" in texts[1]
        assert "differ in steps: 5 and 2" in texts[2]
        assert "two of the states to merge hold slot_0" in texts[3]
        assert "which another slot has, too" in texts[4]
        assert "it was damaged" in texts[5]
        assert "there is no state to merge" in texts[6]
    alone = worlds(1).run(
        case_refused,
        scenario=dataclasses.replace(scenario, world_size=1),
        attempts=[(two, "strict"), (two[:1], "mean"), (two, "mean"), (two, "drop")],
    )[0]
    assert [o.error for o in alone] == ["StateError", "StateError", None, None]
    assert "has world_size 2, this hook has 1" in alone[0].text
    assert "slot_1 is missing" in alone[1].text


def case_dcp_save(scenario: Scenario, path: str) -> dict[str, Any]:
    run = Run(scenario)
    for step in range(3):
        run.step(step)
    dcp.save({"model": run.model.state_dict(), "hook": run.state}, checkpoint_id=path)
    return run.state.state_dict()


def case_dcp_load(scenario: Scenario, path: str, resized: bool) -> dict[str, Any]:
    run = Run(scenario)
    model = run.model.state_dict()
    hook = ResizedState(run.state, path) if resized else run.state
    dcp.load({"model": model, "hook": hook}, checkpoint_id=path)
    return run.state.state_dict()


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("mode", "members", "others"),
    [
        ("topk", apart(2), apart(3)),
        ("sign1_momentum", UNEVEN, apart(3)),
        pytest.param("sign1_momentum", apart(2), apart(3), marks=pytest.mark.slow),
        pytest.param("topk", UNEVEN, apart(3), marks=pytest.mark.slow),
    ],
)
def test_distributed_checkpoint_keeps_every_rank_and_resizes(
    worlds: Worlds, tmp_path: Path, mode: str, members: Members, others: Members
) -> None:
    def load(scenario: Scenario, resized: bool) -> list[dict]:
        arguments = {"scenario": scenario, "path": path, "resized": resized}
        return worlds(scenario.world_size).run(case_dcp_load, **arguments)

    scenario, path = scenario_on(mode, members), str(tmp_path / "dcp")
    saved = worlds(scenario.world_size).run(case_dcp_save, scenario=scenario, path=path)
    slots = [state[f"slot_{rank}"]["worker"] for rank, state in enumerate(saved)]
    assert not torch.equal(slots[0], slots[-1])
    for resized in (False, True):
        assert all(map(same, saved, load(scenario, resized)))
    other = scenario_on(mode, others)
    merged = residuals_of(go_on(worlds, other, saved=saved), "loaded")
    assert all(map(same, merged, load(other, resized=True)))
