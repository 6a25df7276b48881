"""Going on with another number of ranks, or on other nodes: who saves, who loads, and what
`on_resize` says becomes of what was withheld.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gradferry.checkpoint import ResizedState, merge
from gradferry.core.codec_spec import parse_codec
from gradferry.ddp.state import bound_to
from outcomes import Outcome, attempt
from reducing import given, make_reducer, place_of, reduce
from reference.engine import momentum_behind
from residual_sums import assert_goes_on, reference_of, resize, still_missing, worker_mean
from saved import same
from scenario import Run, Scenario, Weight
from stepping import warned
from ways import WAYS
from world import Worlds, WorldsOn

WEIGHTS = (
    Weight("embedding", (70, 64)),
    Weight("wide", (3, 4099)),
    Weight("bias", (67,)),
    Weight("bf16", (90, 50), torch.bfloat16),
)
MODES: dict[str, dict[str, Any]] = {
    "q4": {"codec": "q4", "error_feedback": "both"},
    "q8": {"codec": "q8"},  # keeps the owner residual alone
    "worker": {"codec": "q4", "error_feedback": "worker"},
    "topk": {"codec": "topk:ratio=0.05"},
    "sign1 momentum": {"codec": "sign1", "options": {"momentum": 0.9}},
    "topk momentum": {"codec": "topk:ratio=0.05", "options": {"momentum": 0.9}},
    "rht": {"codec": "rht:bits=2"},
    # Resized within the warm-up, which ends before it is resized again.
    "topk warm-up": {
        "codec": "topk:ratio=0.05",
        "options": {"momentum": 0.9, "warmup_steps": 5, "warmup": "q4"},
    },
}
WITHOUT_RESIDUALS: dict[str, dict[str, Any]] = {
    "exact": {"codec": "exact"},
    "auto": {"codec": "auto"},
}


Members = tuple[tuple[int, ...], ...]
TWO_BY_TWO: Members = ((0, 1), (2, 3))
CROSSED: Members = ((0, 2), (1, 3))
UNEVEN: Members = ((0, 1), (2,))


def apart(world_size: int) -> Members:
    return tuple((rank,) for rank in range(world_size))


ROUTES: dict[str, tuple[Members, ...]] = {
    "2-3-2": (apart(2), apart(3), apart(2)),
    "4-2": (apart(4), apart(2)),
    "2-1": (apart(2), apart(1)),
    "2-1-2": (apart(2), apart(1), apart(2)),
    "2x2-4x1-2x1-2x2": (TWO_BY_TWO, apart(4), apart(2), TWO_BY_TWO),
    "2x2-crossed-uneven-2x2": (TWO_BY_TWO, CROSSED, UNEVEN, TWO_BY_TWO),
    "2x2-1-4x1": (TWO_BY_TWO, apart(1), apart(4)),
}


def scenario_on(mode: str, members: Members, device: str = "cpu") -> Scenario:
    size = sum(map(len, members))
    nodes = None if len(members) == size else members
    plain = Scenario(WEIGHTS, size, ddp={"bucket_cap_mb": 0.05}, nodes=nodes, device=device)
    return dataclasses.replace(plain, **{**MODES, **WITHOUT_RESIDUALS}[mode])


def case_go_on(
    scenario: Scenario,
    saved: list[dict] | None = None,
    on_resize: str = "mean",
    steps: range = range(0),
    way: str = "hook",
    disabled: bool = False,
) -> dict[str, Any]:
    """Loads, if there is something to load, and trains."""
    with mock.patch.dict(os.environ, {"GRADFERRY_DISABLE": str(int(disabled))}):
        training = WAYS[way](scenario)
    held = [training.state.stats()["residual_bytes"]]
    with warned() as said:
        if saved is not None:
            training.state.load_state_dict(merge(saved), on_resize=on_resize)
    held.append(training.state.stats()["residual_bytes"])
    loaded = training.state.state_dict()
    gradients = [training.step(step) for step in steps]
    saved_now = training.state.state_dict()
    return {
        "bytes": held,
        "said": [str(each.message) for each in said],
        "gradients": gradients,
        "loaded": loaded,
        "saved": saved_now,
    }


def go_on(worlds: Worlds, scenario: Scenario, **how: Any) -> list[dict[str, Any]]:
    """`case_go_on` on all ranks of the scenario."""
    return worlds(scenario.world_size).run(case_go_on, scenario=scenario, **how)


def states(answers: list[dict], key: str = "saved") -> list[dict]:
    return [answer[key] for answer in answers]


def missing(saved: list[dict], scenario: Scenario) -> np.ndarray:
    return np.concatenate(still_missing(saved, scenario))


# Every mode, every route, both ways, every device.
QUICK = (
    ("hook", "q4", "2x2-crossed-uneven-2x2", "cpu"),
    ("hook", "q4", "2x2-1-4x1", "cpu"),
    ("hook", "topk", "2-3-2", "cpu"),
    ("hook", "rht", "4-2", "cpu"),
    ("hook", "sign1 momentum", "2x2-4x1-2x1-2x2", "cpu"),
    ("hook", "topk momentum", "2x2-crossed-uneven-2x2", "cpu"),
    ("hook", "topk warm-up", "2-3-2", "cpu"),
    ("reducer", "q4", "2-3-2", "cpu"),
    ("reducer", "q8", "2-1-2", "cpu"),
    ("reducer", "worker", "2-1-2", "cpu"),
    ("reducer", "q4", "2-1-2", "streamed"),
    ("hook", "topk", "2-1-2", "staged"),
    ("hook", "topk warm-up", "2-1", "cpu"),
)
ALL = [
    ("hook", mode, route, device)
    for device in ("cpu", "streamed", "staged")
    for mode in MODES
    for route in (ROUTES if device == "cpu" else ("2-1-2",))
    # In a world of one momentum takes what owners have; see below.
    if not (apart(1) in ROUTES[route] and "options" in MODES[mode])
]


@pytest.mark.parametrize(
    ("way", "mode", "route", "device"),
    [
        *QUICK,
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ALL if row not in QUICK),
    ],
)
def test_mean_keeps_what_is_missing_and_goes_on_as_the_reference(
    worlds_on: WorldsOn, way: str, mode: str, route: str, device: str
) -> None:
    saved, engine, before_it = None, None, None
    for number, members in enumerate(ROUTES[route]):
        scenario = scenario_on(mode, members, device)
        steps = range(3 * number, 3 * number + 3)
        answers = go_on(worlds_on(device), scenario, steps=steps, saved=saved, way=way)
        engine = reference_of(scenario) if engine is None else resize(engine, scenario)
        assert_goes_on(answers, engine, scenario, steps)
        if saved is not None:
            assert {state["steps"] for state in states(answers, "loaded")} == {3 * number}
        # A world of one rounds sums, too.
        if saved is not None and 1 not in (scenario.world_size, before_it.world_size):
            before = missing(saved, before_it)
            after = missing(states(answers, "loaded"), scenario)
            assert np.abs(before).max() > (0.01 if mode == "q8" else 0.1)  # q8 rounds least
            # The mean of the workers' is rounded to fp32 once; the owners' move as they are.
            largest = np.abs(np.concatenate(worker_mean(saved, before_it))).max()
            assert np.abs(after - before).max() <= largest * 2.0**-24
        if scenario.world_size == 1 and "options" not in MODES[mode]:
            # It takes memory when it has something to deliver, and keeps what it could not.
            assert answers[0]["bytes"][0] == 0 < answers[0]["bytes"][1]
            left = still_missing(states(answers), scenario)
            for weight, kept in zip(WEIGHTS, left, strict=True):
                assert not kept.any() or weight.dtype == torch.bfloat16
        saved, before_it = states(answers), scenario


def momentum_shares(scenario: Scenario) -> np.ndarray:
    """By element, what residuals of two ranks hold for what a world of one holds."""
    layout = reference_of(scenario).layout
    sizes = [parameter.num_elements for parameter in layout.parameters]
    kept = [momentum_behind(codec, 0.9) for codec in layout.codecs]
    return np.repeat([(1 - m) / (1 - 0.9) for m in kept], sizes)


@pytest.mark.parametrize(
    ("mode", "members"), [("sign1 momentum", UNEVEN), ("topk momentum", apart(2))]
)
def test_world_of_one_takes_owner_residuals_into_its_momentum(
    worlds: Worlds, mode: str, members: Members
) -> None:
    scenario, alone = scenario_on(mode, members), scenario_on(mode, apart(1))
    saved = states(go_on(worlds, scenario, steps=range(3)))
    (loaded,) = states(go_on(worlds, alone, saved=saved), "loaded")
    shares = momentum_shares(scenario)
    before, after = missing(saved, scenario) / shares, missing([loaded], alone)
    # The mean, its sum with the owner's, the share and the product with it are rounded.
    assert (np.abs(after - before) <= 4 * 32 * 2.0**-24).all()
    assert np.abs(before).max() < 32
    back = go_on(worlds, scenario, saved=[loaded])
    again = missing(states(back, "loaded"), scenario) / shares
    assert (np.abs(again - after) <= 2 * 32 * 2.0**-24).all()


@pytest.mark.parametrize("way", ["hook", "reducer"])
def test_same_size_is_strict_whatever_on_resize_says(worlds: Worlds, way: str) -> None:
    scenario = scenario_on("topk warm-up", apart(2))
    whole = go_on(worlds, scenario, steps=range(8), way=way)
    saved = states(go_on(worlds, scenario, steps=range(4), way=way))
    for policy in ("strict", "mean", "fold", "drop"):
        steps = range(4, 8)
        went_on = go_on(worlds, scenario, saved=saved, on_resize=policy, steps=steps, way=way)
        assert all(map(same, saved, states(went_on, "loaded")))
        assert all(map(same, states(whole), states(went_on)))


# --- a world of one -------------------------------------------------------------------------------


def withheld_by_two(worlds: Worlds, scenario: Scenario) -> list[dict]:
    two = dataclasses.replace(scenario, world_size=2, ddp={})
    return states(go_on(worlds, two, steps=range(3), way="reducer"))


def case_unused(scenario: Scenario, saved: list[dict]) -> dict[str, Any]:
    """The first parameter is left out by a pass, with no .grad and, on the CPU, with an old one."""
    run = Run(scenario)
    run.state.load_state_dict(merge(saved), on_resize="mean")
    first = next(run.model.parameters())
    seen = [run.state.state_dict()]
    old = [None] if scenario.device != "cpu" else [None, torch.ones_like(first)]
    for step, grad in enumerate(old):
        run.ddp.zero_grad()
        first.grad = grad
        targets = run.targets(step)
        del targets["embedding"]
        run.ddp(targets).backward()
        assert first.grad is grad
        assert grad is None or bool((grad == 1).all())
        seen.append(run.state.state_dict())
    return {"seen": seen, "gradients": run.step(7), "after": run.state.state_dict()}


@pytest.mark.parametrize("device", ["cpu", "streamed"])
def test_what_a_pass_leaves_out_stays_withheld(worlds_on: WorldsOn, device: str) -> None:
    # On a device that is where find_unused_parameters works; without an old .grad it drops as well.
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": device != "cpu"}
    scenario = dataclasses.replace(scenario_on("q4", apart(1), device), ddp=ddp)
    saved = withheld_by_two(worlds_on(device), scenario)
    (answer,) = worlds_on(device)(1).run(case_unused, scenario=scenario, saved=saved)
    held = [still_missing([state], scenario)[0] for state in answer["seen"]]
    assert held[0].any()
    assert all(np.array_equal(held[0], each) for each in held)
    given = scenario.gradient(7, 0, 0, 0)
    assert answer["gradients"][0].tobytes() == (given + held[0].astype(np.float32)).tobytes()
    assert not still_missing([answer["after"]], scenario)[0].any()


def case_infinite(scenario: Scenario, saved: list[dict], scale: float) -> dict[str, Any]:
    """A call with infinities alone, and one that is finite."""
    scaler = torch.amp.GradScaler(place_of(scenario)[1].type, init_scale=scale)
    reducer = make_reducer(scenario, grad_scaler=scaler)
    reducer.load_state_dict(merge(saved), on_resize="mean")
    loaded = reducer.state_dict()
    reducer.all_reduce([torch.full_like(tensor, torch.inf) for tensor in given(scenario, 3)])
    kept = reducer.state_dict()
    gradients = reduce(scenario, reducer, range(4, 5))[0]
    return {"states": [loaded, kept], "gradients": gradients, "after": reducer.state_dict()}


@pytest.mark.parametrize("device", ["cpu", "streamed"])
def test_infinite_steps_deliver_nothing_and_units_are_those_of_the_scale(
    worlds_on: WorldsOn, device: str
) -> None:
    scenario = scenario_on("q4", apart(1), device)
    saved = withheld_by_two(worlds_on(device), scenario)  # without a scale, which is 1
    (answer,) = worlds_on(device)(1).run(case_infinite, scenario=scenario, saved=saved, scale=8.0)
    held = [still_missing([state], scenario) for state in answer["states"]]
    for state, values in zip(answer["states"], held, strict=True):
        for before, now in zip(held[0], values, strict=True):
            assert np.array_equal(before, now / max(state["loss_scale"], 1.0))
    for index in (0, 1):
        want = scenario.gradient(4, 0, 0, index) + 8 * held[0][index].astype(np.float32)
        assert answer["gradients"][index].tobytes() == want.tobytes()
        assert not still_missing([answer["after"]], scenario)[index].any()


@pytest.mark.parametrize("device", ["cpu", "streamed"])
def test_a_world_of_one_takes_no_memory_where_it_has_nothing_to_deliver(
    worlds_on: WorldsOn, device: str
) -> None:
    one = scenario_on("q4", apart(1), device)
    worlds = worlds_on(device)
    (first,) = go_on(worlds, one, steps=range(2), way="reducer")
    (again,) = go_on(worlds, one, steps=range(2, 3), saved=[first["saved"]], way="reducer")
    assert first["bytes"] == again["bytes"] == [0, 0]
    assert len(again["saved"]["slot_0"]["worker"]) == 0
    for index in range(len(WEIGHTS)):
        assert again["gradients"][0][index].tobytes() == one.gradient(2, 0, 0, index).tobytes()
    saved = withheld_by_two(worlds, one)
    (dropped,) = go_on(worlds, one, saved=saved, on_resize="drop", way="reducer")
    assert dropped["bytes"] == [0, 0]
    assert dropped["loaded"]["steps"] == 3


# --- gradients that pass through ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "mode", "members"),
    [
        *(("hook", mode, apart(2)) for mode in ("exact", "auto", "topk warm-up")),
        ("hook", "q4", UNEVEN),
        ("reducer", "q4", apart(2)),
        ("shards", "q4", apart(2)),
    ],
)
def test_disabled_trainings_save_their_steps_and_nothing_withheld(
    worlds: Worlds, way: str, mode: str, members: Members
) -> None:
    def part(state: dict) -> dict:
        return state if "steps" in state else next(iter(state.values()))  # of one shard

    scenario, how = scenario_on(mode, members), {"way": way, "disabled": True}
    off = states(go_on(worlds, scenario, steps=range(3), **how))
    for policy in ("strict", "mean", "drop"):
        answers = go_on(worlds, scenario, saved=off, on_resize=policy, steps=range(3, 4), way=way)
        for rank, answer in enumerate(answers):
            slot = part(answer["loaded"])[f"slot_{rank}"]
            assert not slot["worker"].any()
            assert not slot["owner"].any()
            assert answer["said"] == []
            assert [part(answer[key])["steps"] for key in ("loaded", "saved")] == [3, 4]
    for answer in go_on(worlds, scenario, saved=states(answers), steps=range(4, 5), **how):
        assert part(answer["saved"])["steps"] == 5
        assert len(answer["said"]) == (mode != "exact")
        assert all("the saved residuals are not used" in text for text in answer["said"])


# --- codecs that are chosen -----------------------------------------------------------------------


def case_chosen(scenario: Scenario, saved: list[dict] | None) -> dict[str, Any]:
    """Trains with q4 chosen, or alone, and says what it has loaded."""
    run = Run(scenario)
    bound = bound_to(run.state)
    if saved is not None:
        run.state.load_state_dict(merge(saved), on_resize="mean")
    loaded = run.state.state_dict()
    if bound.chooser is not None and saved is None:
        bound.running.switch(bound.hook, parse_codec("q4"), 0)
        bound.chooser.choice = dataclasses.replace(
            bound.chooser.choice, codec=parse_codec("q4"), made=True, next_check=1000
        )
    gradients = run.step(0 if saved is None else 1)
    return {"loaded": loaded, "gradients": gradients, "saved": run.state.state_dict()}


def test_residuals_of_a_choice_pass_through_a_world_of_one(worlds: Worlds) -> None:
    auto = Scenario(WEIGHTS, 2, codec="auto")
    one = dataclasses.replace(auto, world_size=1)
    q4, q4_alone = (dataclasses.replace(each, codec="q4") for each in (auto, one))
    saved = states(worlds(2).run(case_chosen, scenario=auto, saved=None))
    (alone,) = worlds(1).run(case_chosen, scenario=one, saved=saved)
    held = still_missing([alone["loaded"]], q4_alone)
    assert np.abs(np.concatenate(held)).max() > 1e-3
    want = one.gradient(1, 0, 0, 0) + held[0].astype(np.float32)
    assert alone["gradients"][0].tobytes() == want.tobytes()
    for state in (alone["loaded"], alone["saved"]):
        again = states(worlds(2).run(case_chosen, scenario=auto, saved=[state]), "loaded")
        assert again[0]["choice"]["codec"] == saved[0]["choice"]["codec"]
        assert np.array_equal(missing(again, q4), missing([state], q4_alone))


def case_switched(scenario: Scenario) -> list[dict]:
    """States before and after a change of the codec."""
    run = Run(scenario)
    bound = bound_to(run.state)
    bound.running.switch(bound.hook, parse_codec("q4"), 0)
    for step in range(2):
        run.step(step)
    before = run.state.state_dict()
    bound.running.switch(bound.hook, parse_codec("topk:ratio=0.05"), 2)
    return [before, run.state.state_dict()]


def test_what_nodes_withheld_goes_to_the_new_delegates(worlds: Worlds) -> None:
    # Sent as it is, it weighs as much as other numbers of tiles of the two codecs.
    weights = (Weight("heavy", (800,)), Weight("embedding", (170, 64)), *WEIGHTS[1:3])
    plain = dataclasses.replace(scenario_on("q4", TWO_BY_TWO), weights=weights)
    scenario = dataclasses.replace(plain, codec="auto")
    before, after = zip(*worlds(4).run(case_switched, scenario=scenario), strict=True)
    moved = [
        not torch.equal(*(state[f"slot_{rank}"]["worker_tiles"] for state in of_rank))
        for rank, of_rank in enumerate(zip(before, after, strict=True))
    ]
    assert any(moved)
    q4, topk = (dataclasses.replace(scenario, codec=c) for c in ("q4", "topk:ratio=0.05"))
    assert np.array_equal(missing(before, q4), missing(after, topk))
    assert np.abs(missing(before, q4)).max() > 0.1


# --- what is refused ------------------------------------------------------------------------------


def case_refused(scenario: Scenario, attempts: list[tuple[list[dict], str]]) -> list[Outcome]:
    run = Run(scenario)

    outcomes = []
    for saved, policy in attempts:
        before = run.state.state_dict()
        outcomes.append(
            attempt(lambda s=saved, p=policy: run.state.load_state_dict(merge(s), on_resize=p))
        )
        assert outcomes[-1].error is None or same(run.state.state_dict(), before)
    return outcomes


Case = tuple[list[dict], str, str | None]  # states, on_resize, and what is said of them


def assert_refused(worlds: Worlds, scenario: Scenario, cases: list[Case]) -> None:
    """By all ranks; None: it is loaded."""
    attempts = [(saved, policy) for saved, policy, _ in cases]
    for outcomes in worlds(scenario.world_size).run(
        case_refused, scenario=scenario, attempts=attempts
    ):
        for outcome, (_, _, text) in zip(outcomes, cases, strict=True):
            assert outcome.error == (None if text is None else "StateError"), (text, outcome)
            assert text is None or text in outcome.text


def test_what_cannot_be_resized_is_refused(worlds: Worlds) -> None:
    two = states(go_on(worlds, scenario_on("q4", apart(2)), steps=range(2)))
    stolen = {**two[1], "slot_1": {**two[0]["slot_0"]}}
    without_slots = {key: two[0][key] for key in two[0] if "slot" not in key}
    cases: list[Case] = [
        (two, "strict", "has world_size 2, this hook has 3"),
        (two[:1], "mean", "slot_1 is missing"),
        ([{**two[0], "steps": 5}, two[1]], "mean", "differ in steps: 5 and 2"),
        ([two[0], two[0]], "mean", "hold slot_0"),
        ([two[0], stolen], "mean", "slot_1 was damaged, or changed"),
        ([], "mean", "no state to merge"),
        (two, "fold", "takes what this rank itself saved"),
        ([without_slots], "fold", "takes what this rank itself saved"),
        (two, "drop", None),
    ]
    assert_refused(worlds, scenario_on("q4", apart(3)), cases)
    q8 = states(go_on(worlds, scenario_on("q8", apart(2)), steps=range(2)))
    kept: list[Case] = [(q8[:1], "fold", "which are not kept here")]
    assert_refused(worlds, scenario_on("q8", apart(3)), kept)
    alone: list[Case] = [
        (two, "strict", "has world_size 2, this hook has 1"),
        (two[:1], "mean", "slot_1 is missing"),
        (two, "mean", None),
        (two, "drop", None),
    ]
    assert_refused(worlds, scenario_on("q4", apart(1)), alone)


def test_states_of_other_nodes_are_refused_by_name(worlds: Worlds) -> None:
    scenario = scenario_on("q4", TWO_BY_TWO)
    saved, flat = (
        states(go_on(worlds, scenario_on("q4", members), steps=range(2)))
        for members in (TWO_BY_TWO, apart(4))
    )
    claiming = [{**state, "nodes": "[[0, 2], [1, 3]]"} for state in saved]
    cases: list[Case] = [
        (saved, "strict", "has nodes [[0, 1], [2, 3]], this hook has [[0, 2], [1, 3]]"),
        (flat, "strict", "has nodes [[0], [1], [2], [3]], this hook has [[0, 2], [1, 3]]"),
        (saved[:3], "mean", "slot_3 is missing"),
        *((each[:1], "fold", "is for the flat exchange") for each in (saved, flat)),
        *((claiming, policy, "it was damaged, or changed") for policy in ("strict", "mean")),
        ([{**state, "format": 2} for state in saved], "mean", "reads format 4"),
    ]
    assert_refused(worlds, dataclasses.replace(scenario, nodes=CROSSED), cases)


# --- torch.distributed.checkpoint -----------------------------------------------------------------


def case_dcp(scenario: Scenario, path: str, saves: bool, resized: bool) -> dict[str, Any]:
    """The state that is saved, in the background while training goes on, or loaded."""
    run = Run(scenario)
    content = {"model": run.model.state_dict(), "hook": run.state}
    if not saves:
        content["hook"] = ResizedState(run.state, path) if resized else run.state
        dcp.load(content, checkpoint_id=path)
        return run.state.state_dict()
    for step in range(3):
        run.step(step)
    before = copy.deepcopy(run.state.state_dict())
    # It has collectives of its own in a thread, which must not meet those of DDP.
    saving = dcp.async_save(content, checkpoint_id=path, process_group=dist.new_group())
    run.step(3)
    saving.result()
    assert not same(before, run.state.state_dict())
    return before


@pytest.mark.torch_core
@pytest.mark.parametrize(("mode", "members"), [("topk", apart(2)), ("sign1 momentum", UNEVEN)])
def test_distributed_checkpoint_keeps_every_rank_and_resizes(
    worlds: Worlds, tmp_path: Path, mode: str, members: Members
) -> None:
    def play(scenario: Scenario, saves: bool = False, resized: bool = False) -> list[dict]:
        arguments = {"path": str(tmp_path / "dcp"), "saves": saves, "resized": resized}
        return worlds(scenario.world_size).run(case_dcp, scenario=scenario, **arguments)

    scenario, other = scenario_on(mode, members), scenario_on(mode, apart(3))
    saved = play(scenario, saves=True)
    slots = [state[f"slot_{rank}"]["worker"] for rank, state in enumerate(saved)]
    assert not torch.equal(slots[0], slots[-1])
    for resized in (False, True):
        assert all(map(same, saved, play(scenario, resized=resized)))
    merged = states(go_on(worlds, other, saved=saved), "loaded")
    assert all(map(same, merged, play(other, resized=True)))
