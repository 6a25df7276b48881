"""`on_resize="fold"`: a rank goes on in another world with what it has itself withheld."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradferry
import torch.distributed as dist
from gradferry.checkpoint import merge
from on_ranks import on_ranks
from outcomes import attempt
from reducing import same
from training_alone import Plain, movements, of_all


def reducer_of(
    codec: str = "q4", group: dist.ProcessGroup | None = None, **options: Any
) -> gradferry.Reducer:
    named = [(name, p.detach()) for name, p in Plain().named_parameters()]
    return gradferry.Reducer(named, codec, group, **{"error_feedback": "both", **options})


def average(reducer: gradferry.Reducer, steps: Sequence[int]) -> dict[str, Any]:
    """Averages numbers of this rank, and returns the state after it."""
    for step in steps:
        reducer.all_reduce(movements(Plain(), dist.get_rank(), step))
    return reducer.state_dict()


@on_ranks(2)
def test_rank_of_a_world_of_the_same_size_takes_its_slot() -> None:
    saved = average(reducer_of(), range(3))
    reducer = reducer_of()
    reducer.load_state_dict(saved, on_resize="fold")
    assert same(reducer.state_dict(), saved)


@on_ranks(4)
def test_states_that_cannot_be_folded_are_refused() -> None:
    three: Any = dist.new_group([0, 1, 2])
    plain = of_all(average(reducer_of(), range(2)))
    nodes = average(reducer_of(nodes=2), range(2))
    owner = average(reducer_of(error_feedback="owner"), range(2))
    mine = plain[dist.get_rank()]

    def expect_refused(reducer: gradferry.Reducer, state: dict[str, Any], text: str) -> None:
        before = reducer.state_dict()
        outcome = attempt(lambda: reducer.load_state_dict(state, on_resize="fold"))
        assert outcome.error == "StateError"
        assert text in outcome.text
        assert same(reducer.state_dict(), before)

    if dist.get_rank() < 3:
        left = reducer_of(group=three)
        several = "takes what this rank itself saved"
        expect_refused(left, merge(plain), several)
        expect_refused(left, {k: v for k, v in mine.items() if "slot" not in k}, several)
        expect_refused(left, nodes, "is for the flat exchange")
        without_workers = reducer_of(group=three, error_feedback="owner")
        expect_refused(without_workers, owner, "which are not kept here")
    expect_refused(reducer_of(nodes=2), mine, "is for the flat exchange")
