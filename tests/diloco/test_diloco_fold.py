"""`on_resize="fold"`: a rank goes on in another world with what it has itself withheld."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry.checkpoint import merge
from on_ranks import on_ranks
from outcomes import attempt
from reducing import same
from training_alone import Plain, movements, of_all, residuals, summed

CODECS = ("q4", "sign1", "topk:ratio=0.05")


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


def shares(reducer: gradferry.Reducer) -> tuple[torch.Tensor, torch.Tensor]:
    return residuals(reducer.state_dict(), reducer._running.tiles())


@pytest.mark.parametrize("codec", CODECS)
@on_ranks(4)
def test_ranks_keep_what_they_withhold_when_others_leave_and_come(codec: str) -> None:
    """Four ranks, then three, then four."""
    rank = dist.get_rank()
    three: Any = dist.new_group([0, 1, 2])
    four = reducer_of(codec)
    saved = average(four, range(4))
    if rank < 3:
        left = reducer_of(codec, three)
        left.load_state_dict(saved, on_resize="fold")
        before, after = shares(four), shares(left)
        assert before[0].any()
        assert before[1].any()
        assert not after[1].any()
        # Numbers are dyadic and of few bits, and 3/4 of them, too.
        wanted = 3 * (summed(before[0], three) / 4 + summed(before[1], three))
        assert torch.equal(summed(after[0], three), wanted)
        saved = average(left, range(4, 6))
        before = shares(left)
    of_first = of_all(saved)[0]
    again = reducer_of(codec)
    if rank < 3:
        again.load_state_dict(saved, on_resize="fold")
        after = shares(again)
        wanted = 4 * (summed(before[0], three) / 3 + summed(before[1], three))
        assert not after[1].any()
        # Each rank rounds 4/3 of its residual to fp32; sums in fp64 err by some 2^-53 beside.
        magnitude = summed(after[0].abs(), three)
        gap = (summed(after[0], three) - wanted).abs()
        assert (gap <= magnitude * (2.0**-24 + 2.0**-48)).all()
    else:
        again.load_state_dict(of_first, on_resize="drop")  # a newcomer has withheld nothing
    mine = movements(Plain(), rank, 6)
    again.all_reduce(mine)
    assert all(torch.equal(mine[0], other) for other in of_all(mine[0]))


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
