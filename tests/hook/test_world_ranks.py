"""Errors name ranks of the world, also in a process group where these have other ranks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry.core import engine
from outcomes import Outcome, attempt
from stepping import flip_last_bit
from test_connecting import little_patience
from torch.nn.parallel import DistributedDataParallel
from world import World

GROUP = [1, 2]  # of a world of three; in the group these are ranks 0 and 1


def named() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(40, 50), "b": torch.zeros(70, 30)}


def reducer(group: Any, codec: str = "q4", **options: Any) -> Any:
    return gradferry.Reducer(named(), codec, group, **options)


def other_codec(group: Any, second: bool) -> Outcome:
    return attempt(lambda: reducer(group, "q8" if second else "q4"))


def bad_codec(group: Any, second: bool) -> Outcome:
    return attempt(lambda: reducer(group, "q5" if second else "q4"))


def stays_away(group: Any, second: bool) -> Outcome:
    with little_patience():
        return attempt(lambda: None if second else reducer(group))


def cannot_connect(group: Any, second: bool) -> Outcome:

    from gradferry.errors import PeerError

    error = PeerError("cannot connect to the other ranks: too many open files")
    broken = mock.patch.object(engine, "make_lanes", side_effect=error)
    with broken if second else contextlib.nullcontext(), little_patience():
        return attempt(lambda: reducer(group))


def bad_tensors(group: Any, second: bool) -> Outcome:
    made = reducer(group)
    given = {"a": torch.zeros(3)} if second else named()
    return attempt(lambda: made.all_reduce(given))


def lets_go(group: Any, second: bool) -> Outcome:
    made = reducer(group)
    made.all_reduce()
    if second:
        del made
        gc.collect()
        outcome = attempt(lambda: None)
    else:
        outcome = attempt(made.all_reduce)
    dist.barrier(group)
    return outcome


def other_step(group: Any, second: bool) -> Outcome:
    made = reducer(group)
    state = made.state_dict()
    if second:
        made.load_state_dict({**state, "steps": 5})
    return attempt(made.all_reduce)


def diverged(group: Any, second: bool) -> Outcome:
    model = torch.nn.Linear(40, 50)
    ddp = DistributedDataParallel(model, process_group=group)
    gradferry.attach(ddp, "q4", check_every=1)
    ddp(torch.ones(1, 40)).sum().backward()
    if second:
        flip_last_bit(model.weight)
    return attempt(lambda: ddp(torch.ones(1, 40)).sum().backward())


# By case: what the errors of the group's ranks contain.
CASES: dict[Callable[[Any, bool], Outcome], tuple[str, str]] = {
    other_codec: ("rank 2 differs from rank 1 in codec",) * 2,
    bad_codec: ("rank 2: codec 'q5'", "codec 'q5'"),
    stays_away: ("rank 2 did not come to make a Reducer", ""),
    cannot_connect: ("rank 2: cannot connect to the other ranks: too many open files",) * 2,
    bad_tensors: ("rank 2: the tensors lack 'b'", "the tensors lack 'b'"),
    lets_go: ("rank 1 lost contact with rank 2 (step 1", ""),
    other_step: ("rank 1 refused a message from rank 2 (step 0",) * 2,
    diverged: ("parameter 'weight' of rank 2 differs from that of rank 1 at step 1",) * 2,
}


def case_errors() -> dict[str, Outcome]:
    group = dist.new_group(GROUP)
    rank = dist.get_rank()
    outcomes = {}
    for case in CASES:
        if rank in GROUP:
            outcomes[case.__name__] = case(group, rank == GROUP[1])
        dist.barrier()
    if rank in GROUP:
        outcomes["text"] = str(reducer(group))
    return outcomes


@pytest.fixture(scope="module")
def answers(world_of_3_of_module: World) -> list[dict[str, Any]]:
    return world_of_3_of_module.run(case_errors)[GROUP[0] :]


@pytest.fixture(scope="module")
def world_of_3_of_module(worlds: Callable[[int], World]) -> World:
    return worlds(3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_errors_name_ranks_of_the_world(
    answers: list[dict[str, Any]], case: Callable[[Any, bool], Outcome]
) -> None:
    for answer, text in zip(answers, CASES[case], strict=True):
        outcome = answer[case.__name__]
        assert text in outcome.text, outcome
        assert (outcome.error is None) == (text == "")


def test_text_of_a_state_says_which_ranks_of_the_world_the_group_has(
    answers: list[dict[str, Any]],
) -> None:
    for rank, answer in enumerate(answers):
        assert f"rank {rank} of 2, " in answer["text"]
        assert "(ranks 1 and 2 of the world)" in answer["text"]
