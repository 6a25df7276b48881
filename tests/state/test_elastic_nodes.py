"""Checkpoints of the exchange between nodes of several ranks: the same ranks on other nodes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gradferry.checkpoint import merge
from gradferry.core.codec_spec import parse_codec
from gradferry.ddp.state import bound_to
from residual_sums import aligned, reference_of, still_missing
from scenario import Run, Scenario, Weight
from test_elastic import (
    CROSSED,
    TWO_BY_TWO,
    UNEVEN,
    apart,
    case_refused,
    go_on,
    residuals_of,
    scenario_on,
)
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (Weight("embedding", (170, 64)), Weight("wide", (3, 4099)), Weight("bias", (67,)))


def whole_numbers(states: list[dict]) -> list[dict]:
    """The states with whole numbers for residuals: means of 2 or of 4 of them are exact."""
    rng = np.random.default_rng(3)
    changed = []
    for rank, state in enumerate(states):
        slot = {key: value.clone() for key, value in state[f"slot_{rank}"].items()}
        for kind in ("worker", "owner"):
            slot[kind] = torch.from_numpy(rng.integers(-8, 9, len(slot[kind])).astype(np.float32))
        changed.append({**state, f"slot_{rank}": slot})
    return changed


def test_same_ranks_on_other_nodes_keep_what_is_missing_exactly(worlds: Worlds) -> None:
    before, scenario = None, None
    one_node = ((0, 1, 2, 3),)
    few = (TWO_BY_TWO, apart(4), apart(2), apart(1))
    for members in (*few, TWO_BY_TWO, CROSSED, UNEVEN, one_node):
        before_it, scenario = scenario, scenario_on("q4", members, WEIGHTS)
        after = residuals_of(go_on(worlds, scenario, saved=before), "loaded")
        if before is not None:
            missing = still_missing(before, before_it)
            assert max(np.abs(part).max() for part in missing) > 8
            for one, other in zip(missing, still_missing(after, scenario), strict=True):
                assert np.array_equal(one, other)
        # What a world of one has comes from others: for `bias`, which is exact, nothing.
        before = after if len(after) == 1 else whole_numbers(after)


def test_elastic_example_says_how_much_is_withheld(worlds: Worlds) -> None:
    path = Path(__file__).parents[2] / "examples" / "elastic.py"
    example = importlib.util.module_from_spec(
        spec := importlib.util.spec_from_file_location("elastic_example", path)
    )
    spec.loader.exec_module(example)
    for members in (TWO_BY_TWO, UNEVEN, apart(2)):
        scenario = scenario_on("q4", members, WEIGHTS)
        saved = residuals_of(go_on(worlds, scenario, range(2)), "saved")
        missing = np.concatenate(still_missing(saved, scenario))
        # Sums in fp64 of some 23,000 numbers below 4, in another order.
        assert np.abs(missing).max() < 4
        assert abs(example.withheld(merge(saved)) - missing.sum()) <= 4 * 23300**2 * 2.0**-53
        assert abs(missing.sum()) > 1e-3


def test_rank_beyond_the_rails_saves_nothing(worlds: Worlds) -> None:
    answers = go_on(worlds, scenario_on("q4", UNEVEN, WEIGHTS), range(1), on_resize="strict")
    saved = residuals_of(answers, "saved")
    assert saved[0]["nodes"] == "[[0, 1], [2]]"
    assert len(saved[2]["slot_2"]["owner"]) > 0
    extra = answers[1]["saved"]["slot_1"]
    assert [len(extra[key]) for key in extra] == [0] * 4


def without(state: dict, key: str) -> dict:
    return {name: value for name, value in state.items() if name != key}


def with_slot(state: dict, rank: int, **changes: Any) -> dict:
    return {**state, f"slot_{rank}": {**state[f"slot_{rank}"], **changes}}


def test_what_lies_about_nodes_is_refused_by_name(worlds: Worlds) -> None:
    scenario = scenario_on("q4", TWO_BY_TWO, WEIGHTS)
    saved, flat = (
        residuals_of(go_on(worlds, scenario_on("q4", members, WEIGHTS), range(2)), "saved")
        for members in (TWO_BY_TWO, apart(4))
    )
    tiles = saved[0]["slot_0"]["worker_tiles"]

    def claiming(nodes: Any) -> list[dict]:
        text = nodes if isinstance(nodes, str) else json.dumps(nodes)
        return [{**state, "nodes": text} for state in saved]

    def with_worker_tiles(numbers: torch.Tensor) -> list[dict]:
        return [with_slot(saved[0], 0, worker_tiles=numbers), *saved[1:]]

    one_more = torch.cat([tiles, tiles[:1]])
    unknown = torch.cat([tiles[:-1], torch.tensor([10**6])])
    short = [with_slot(saved[0], 0, worker=saved[0]["slot_0"]["worker"][:16]), *saved[1:]]
    theirs = {key: saved[1]["slot_1"][key] for key in ("worker", "worker_tiles")}
    stolen = [with_slot(saved[0], 0, **theirs), *saved[1:]]
    none = {key: torch.zeros(0, dtype=t.dtype) for key, t in saved[0]["slot_0"].items()}
    last = saved[3]["slot_3"]
    end = aligned(reference_of(scenario).layout.tiles[int(last["worker_tiles"][-1])].num_elements)
    fewer = {"worker": last["worker"][:-end], "worker_tiles": last["worker_tiles"][:-1]}
    lacking = [*saved[:3], with_slot(saved[3], 3, **fewer)]
    lost = [with_slot(saved[0], 0, **none), saved[1], with_slot(saved[2], 2, **none), saved[3]]
    cases = [
        (saved, "strict", "has nodes [[0, 1], [2, 3]], this hook has nodes [[0, 2], [1, 3]]; atta"),
        (
            flat,
            "strict",
            "has the flat exchange, this hook has nodes [[0, 2], [1, 3]]; attach with",
        ),
        (saved[:3], "mean", "slot_3 is missing"),
        (claiming([[0, 1], [2]]), "mean", "nodes '[[0, 1], [2]]', which do not say of 4 ranks"),
        (claiming([[0, 1], [2, 2]]), "mean", "which do not say of 4 ranks which share a node"),
        (claiming([[2, 3], [0, 1]]), "mean", "which do not say of 4 ranks"),
        (claiming([[0, 1], [3, 2]]), "mean", "which do not say of 4 ranks"),
        (claiming([[0, True], [2, 3]]), "mean", "which do not say of 4 ranks"),
        (claiming("nonsense"), "mean", "nodes 'nonsense', which do not say"),
        (claiming("5"), "drop", "nodes '5', which do not say"),
        ([{**state, "nodes": None} for state in saved], "mean", "nodes None, which do not say"),
        ([{**state, "format": 2} for state in saved], "mean", "reads format 3"),
        (claiming([[0, 1, 2, 3], []]), "mean", "which do not say of 4 ranks"),
        ([without(state, "nodes") for state in flat], "mean", "lacks nodes"),
        (claiming([[0, 1, 2], [3]]), "mean", "the worker residual of tile 0, which another slot"),
        (lacking, "mean", "other tiles on the node of ranks 2, 3 than on that of ranks 0, 1, such"),
        (with_worker_tiles(one_more), "mean", "has the worker residual of a tile twice"),
        (with_worker_tiles(unknown), "mean", "tile 1000000, which the model lacks"),
        (with_worker_tiles(-tiles), "mean", "which the model lacks"),
        (with_worker_tiles(tiles.float()), "mean", "worker_tiles, is not a tensor of torch.int64"),
        (with_worker_tiles(tiles[:-1]), "mean", "worker residuals for tiles of"),
        (short, "mean", "slot_0 has 16 worker residuals for tiles of"),
        (stolen, "mean", "slot_1 has the worker residual of tile 1, which another slot has, too"),
        (lost, "mean", "lacks the worker residual of tile 0"),
    ]
    attempts = [(states, policy) for states, policy, _ in cases]
    other = dataclasses.replace(scenario, nodes=CROSSED)
    for outcomes in worlds(4).run(case_refused, scenario=other, attempts=attempts):
        for outcome, (_, _, text) in zip(outcomes, cases, strict=True):
            assert outcome.error == "StateError", text
            assert text in outcome.text
    # On the nodes that it says, what it says of its tiles must be what this hook has.
    here = [(stolen, "strict"), (claiming([[0, 2], [1, 3]]), "strict"), (saved, "strict")]
    answers = worlds(4).run(case_refused, scenario=scenario, attempts=here)
    assert [a[0].error for a in answers] == ["StateError", None, None, None]
    assert "slot_0 has the worker residuals of other tiles than this rank" in answers[0][0].text
    for answer in answers:
        assert [o.error for o in answer[1:]] == ["StateError", None]
    crossed = worlds(4).run(case_refused, scenario=other, attempts=[here[1]])
    assert [a[0].error for a in crossed] == ["StateError"] * 4


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
    weights = (Weight("heavy", (800,)), *WEIGHTS)
    scenario = dataclasses.replace(scenario_on("q4", TWO_BY_TWO, weights), codec="auto")
    answers = worlds(4).run(case_switched, scenario=scenario)
    before, after = zip(*answers, strict=True)
    moved = [
        [state[f"slot_{rank}"]["worker_tiles"].tolist() for state in states]
        for rank, states in enumerate(answers)
    ]
    assert any(one != other for one, other in moved), moved
    q4, topk = (dataclasses.replace(scenario, codec=c) for c in ("q4", "topk:ratio=0.05"))
    for one, other in zip(still_missing(before, q4), still_missing(after, topk), strict=True):
        assert np.array_equal(one, other)
    assert max(np.abs(part).max() for part in still_missing(before, q4)) > 0.1
