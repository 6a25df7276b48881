"""Saved states that were damaged or are foreign: they load, or raise one of our errors and change
nothing. Whatever they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed.checkpoint as dcp
from damaged_states import CHANGES, VALUES, damaged, drawn, examples, made
from gradferry.checkpoint import ResizedState
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import of_all
from saved import same
from scenario import Scenario, Weight
from ways import WAYS
from world import Worlds

WEIGHTS = (
    Weight("first", (90, 70)),
    Weight("bias", (50,)),
    Weight("fp16", (70, 64), torch.float16),
)
PLAIN = Scenario(WEIGHTS, 3, error_feedback="both")
ON_NODES = Scenario(WEIGHTS, 3, error_feedback="both", nodes=((0, 1), (2,)))
QUICK, MANY = 60, 2000  # examples
Drawn = tuple[list[Any], list[Any]]  # changes of a state, and values in place of one


def merged_of_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    return gradferry.checkpoint.merge(of_all(state))


def is_whole(wrong: dict[Any, Any], saved: dict[str, Any]) -> bool:
    """Whether a damaged copy lacks slots at most, or parts of a sharded model."""
    return all(
        isinstance(value, dict)
        if key not in wrong
        else is_whole(wrong[key], value)
        if key.startswith("shard_")
        else same(value, wrong[key])
        for key, value in saved.items()
    )


def loaded_of(loader: Any, state: Any, on_resize: Any) -> bool:
    """Whether a state was loaded; if not, nothing has changed, and the error is ours."""
    before = loader.state_dict()
    try:
        loader.load_state_dict(state, on_resize=on_resize)
    except gradferry.GradferryError:
        assert same(loader.state_dict(), before)
        return False
    return True


def check_loads(loader: Any, saved: dict[str, Any], on_resize: str, drawn: Drawn) -> int:
    """Loads damaged copies of a state, and what is none. Returns how many copies were refused."""
    changes, values = drawn
    refused = 0
    for change in changes:
        wrong = damaged(saved, change)
        is_loaded = loaded_of(loader, wrong, on_resize)
        assert not is_loaded or is_whole(wrong, saved)
        refused += not is_loaded
    for value in values:
        foreign = made(value)
        assert not loaded_of(loader, foreign, on_resize)
        if not (isinstance(foreign, str) and foreign in ("strict", "mean", "drop")):
            assert not loaded_of(loader, saved, foreign)
    assert loaded_of(loader, saved, on_resize)
    return refused


def case_damaged(way: str, on_resize: str, drawn: Drawn) -> int:
    loader = WAYS[way](PLAIN)
    saves = loader if on_resize == "strict" else WAYS[way](ON_NODES)
    for step in range(2):
        loader.step(step)
        if saves is not loader:
            saves.step(step)
    saved = merged_of_all_ranks(saves.state.state_dict())
    return check_loads(loader.state, saved, on_resize, drawn)


CASES = [("reducer", "strict"), ("reducer", "mean"), ("hook", "strict"), ("shards", "strict")]


@pytest.mark.parametrize("count", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("way", "on_resize"), CASES)
def test_damaged_state_loads_or_is_refused_and_changes_nothing(
    worlds: Worlds, way: str, on_resize: str, count: int
) -> None:
    what = (drawn(CHANGES, count), drawn(VALUES, count))
    for refused in worlds(3).run(case_damaged, way=way, on_resize=on_resize, drawn=what):
        assert refused > count // 3


@given(st.lists(st.one_of(VALUES, CHANGES.map(lambda changes: damaged({"a": 1}, changes)))))
@examples(QUICK)
def test_foreign_states_merge_or_are_refused(states: list[Any]) -> None:
    try:
        merged = gradferry.checkpoint.merge(map(made, states))
    except gradferry.StateError:
        pass
    else:
        assert all(set(state) <= set(merged) for state in map(made, states))


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.one_of(JSON.map(json.dumps), st.sampled_from(["[" * 100_000, "9" * 5000, "\ud800", ""])))
@examples(QUICK)
def test_foreign_pointer_is_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("pointer")
    (folder / "latest.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(gradferry.StateError):
        gradferry.checkpoint.load(folder, rank=0)


def test_resized_state_asks_for_nothing_beside_what_it_loads(tmp_path: Path) -> None:
    hook = {"steps": 3, "slot_0": {"worker": torch.ones(3)}}
    dcp.save({"hook": hook, "epoch": 3, "values": torch.ones(2)}, checkpoint_id=tmp_path)
    resized = ResizedState(gradferry.HookState("q4"), tmp_path)
    room = resized.state_dict()
    assert room["steps"] is None
    assert room["slot_0"]["worker"].tolist() == [0, 0, 0]
    assert set(room) == set(hook)
    with pytest.raises(gradferry.StateError, match="nothing under 'epoch'"):
        ResizedState(gradferry.HookState("q4"), tmp_path, key="epoch").state_dict()
