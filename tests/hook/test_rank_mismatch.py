"""Ranks that disagree all get the same error, which says who, what and which values: at attach, or
at the first bucket that one of them cuts or orders otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import os
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry import _native
from gradferry.core import agreement
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from products import rows
from scenario import ChosenGradients, Run, Scenario, Weight, hooked
from torch.nn.parallel import DistributedDataParallel
from world import World

WEIGHTS = (Weight("first", (40, 40)), Weight("second", (9,)))
RANKS = (0, 1, 2)


def other_second(name: str = "second", size: int = 9, **changes: Any) -> tuple[Weight, ...]:
    return (WEIGHTS[0], Weight(name, (size,), **changes))


# --- at attach ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Difference:
    """What one rank does otherwise. The error names the field and both values, as Python writes
    them.
    """

    field: str
    usual_value: str
    odd_value: str
    odd: dict[str, Any]  # options of the odd rank
    usual: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of every rank
    entries: tuple[str, ...] = ("attach", "HookState", "Reducer")


def option(name: str, usual: object, odd: object, **options_of_all: Any) -> Difference:
    return Difference(name, repr(usual), repr(odd), {name: odd}, options_of_all)


def parameter(field: str, *values: Any, **options: Any) -> Difference:
    return Difference(f"parameter {field}", *values, **options)


OF_DDP = ("attach", "HookState")
# DistributedDataParallel itself compares shapes and strides.
OF_REDUCER = ("Reducer",)
DIFFERENCES = {
    "codec": option("codec", "q4", "bf16"),
    "option of a codec": option("codec", "rht:bits=4", "rht:bits=3", codec="rht:bits=4"),
    "seed": option("seed", 5, 6, seed=5),
    "rule": Difference(
        "rules", "[]", "[{'codec': 'exact'", {"rules": [{"name": "first", "codec": "exact"}]}
    ),
    "error_feedback": option("error_feedback", "auto", "both"),
    "nonfinite": option("nonfinite", "propagate", "raise"),
    "momentum": option("momentum", 0.0, 0.9),
    "warmup_steps": option("warmup_steps", 0, 3),
    "warmup": option("warmup", "exact", "q8", warmup_steps=3),
    "check_every": Difference("check_every", "0", "2", {"check_every": 2}, entries=OF_DDP),
    "workspace": option("workspace_cap_mb", 96.0, 48.0),
    "nodes": option("nodes", "auto", 1),
    "switched off": Difference("GRADFERRY_DISABLE", "False", "True", {"disable": "1"}),
    "wire version": Difference("wire version", "2", "99", {"wire_version": 99}),
    "way in": Difference("way in", "None", "'Reducer'", {"entry": "Reducer"}, entries=OF_DDP),
    "size of buckets": Difference(
        "bucket_cap_mb", "25.0", "3.0", {"bucket_cap_mb": 3}, entries=OF_REDUCER
    ),
    "name": parameter("1 (", "'second'", "'other'", {"weights": other_second(name="other")}),
    "dtype": parameter(
        "1 (second), dtype",
        "'torch.float32'",
        "'torch.bfloat16'",
        {"weights": other_second(dtype=torch.bfloat16)},
    ),
    "shape": parameter(
        "1 (second), shape", "[9]", "[8]", {"weights": other_second(size=8)}, entries=OF_REDUCER
    ),
    "number of parameters": Difference(
        "number of parameters", "2", "1", {"weights": WEIGHTS[:1]}, entries=OF_REDUCER
    ),
    "strides": parameter(
        "0 (first), strides", "[40, 1]", "[1, 40]", {"transposed": True}, entries=OF_REDUCER
    ),
}


def enter(
    entry: str,
    *,
    codec: str = "q4",
    weights: tuple[Weight, ...] = WEIGHTS,
    transposed: bool = False,
    disable: str = "0",
    wire_version: int | None = None,
    **options: Any,
) -> Outcome:
    """The outcome of the call that compares this rank with the others."""
    # On every rank, whatever it calls, because it is collective.
    shaped = [dataclasses.replace(w, shape=u.shape) for w, u in zip(weights, WEIGHTS, strict=False)]
    model = ChosenGradients(Scenario((*shaped, *WEIGHTS[len(shaped) :])))
    # Without the copy of rank 0's parameters, which other dtypes would mix up.
    of_ddp = DistributedDataParallel(model, init_sync=False)
    named = [(w.name, torch.zeros(w.shape, dtype=w.dtype)) for w in weights]
    if transposed:
        named[0] = (named[0][0], named[0][1].t())
    calls = {
        "attach": lambda: gradferry.attach(of_ddp, codec, **options),
        "HookState": lambda: gradferry.HookState(codec, of_ddp, **options),
        "Reducer": lambda: gradferry.Reducer(named, codec, **options),
    }
    with contextlib.ExitStack() as patches:
        if wire_version is not None:
            patches.enter_context(mock.patch.object(_native, "WIRE_VERSION", wire_version))
        patches.enter_context(mock.patch.dict(os.environ, {"GRADFERRY_DISABLE": disable}))
        return attempt(calls[entry])


def case_differ(
    entry: str, usual: dict[str, Any], odd_rank: int, odd: dict[str, Any]
) -> tuple[Outcome, bool]:
    """One rank differs. Afterwards none does, and all of them attach and train."""
    mine = {"entry": entry, **usual, **(odd if dist.get_rank() == odd_rank else {})}
    return enter(**mine), Run(Scenario(WEIGHTS)).step(0)[0] is not None


def assert_same_error(outcomes: list[Outcome], error: str) -> str:
    """Returns its text."""
    assert [o.error for o in outcomes] == [error] * len(outcomes), outcomes
    assert len({o.headline for o in outcomes}) == 1, outcomes
    return outcomes[0].headline


def cells() -> Iterator[Any]:
    """All of them; the quick ones have every difference, and some of them on each rank."""
    for number, (name, differs) in enumerate(DIFFERENCES.items()):
        for odd_rank, (turn, entry) in itertools.product(RANKS, enumerate(differs.entries)):
            way = (number + odd_rank) % len(differs.entries) == turn
            quick = way and (number % 3 == odd_rank or name in ("codec", "nodes", "name"))
            marks = () if quick else pytest.mark.slow
            yield pytest.param(
                name, entry, odd_rank, id=f"{name}, {entry}, {odd_rank}", marks=marks
            )


@pytest.mark.torch_core
@pytest.mark.parametrize(("name", "entry", "odd_rank"), list(cells()))
def test_same_error_on_all_ranks_when_one_differs(
    world_of_3: World, name: str, entry: str, odd_rank: int
) -> None:
    differs = DIFFERENCES[name]
    answers = world_of_3.run(
        case_differ, entry=entry, usual=differs.usual, odd_rank=odd_rank, odd=differs.odd
    )
    text = assert_same_error([outcome for outcome, _ in answers], "RankMismatchError")
    # All are compared with rank 0.
    named = odd_rank or 1
    got, wanted = differs.odd_value, differs.usual_value
    if odd_rank == 0:
        got, wanted = wanted, got
    place = f"rank {named} differs from rank 0 in {differs.field}"
    pattern = f"{re.escape(place)}.*: {re.escape(got)}.* instead of {re.escape(wanted)}"
    assert re.match(pattern, text), text
    assert all(trained for _, trained in answers)


def case_fails_alone(entry: str, odd_rank: int, what: str) -> tuple[Outcome, Outcome]:
    """One rank has a wrong argument, also of another version, or no memory for its engine; then it
    has not.
    """
    odd = dist.get_rank() == odd_rank
    engine, version = _native.HostEngine, agreement.GRADFERRY_VERSION
    if odd and what == "memory":
        engine = mock.Mock(side_effect=MemoryError("no memory for residuals"))
    if odd and what == "version":
        version = "0.0.7"
    with (
        mock.patch.object(_native, "HostEngine", engine),
        mock.patch.object(agreement, "GRADFERRY_VERSION", version),
    ):
        first = enter(entry, codec="q44" if odd and what != "memory" else "q4")
    return first, enter(entry)


@pytest.mark.parametrize(
    ("entry", "odd_rank", "what"),
    rows(("attach", "HookState", "Reducer"), RANKS, ("codec", "memory", "version"), turns=2),
)
def test_failure_of_one_rank_is_the_same_error_on_all(
    world_of_3: World, entry: str, odd_rank: int, what: str
) -> None:
    answers = world_of_3.run(case_fails_alone, entry=entry, odd_rank=odd_rank, what=what)
    first, second = [a[0] for a in answers], [a[1] for a in answers]
    error, text = {
        "codec": ("ConfigError", f"rank {odd_rank}: .*q44"),
        "memory": ("PeerError", f"rank {odd_rank}: .*no memory for residuals"),
        "version": ("RankMismatchError", f"rank {odd_rank or 1} differs from .* version: .*0.0.7"),
    }[what]
    assert re.match(text, assert_same_error(first, error))
    assert [o.error for o in second] == [None] * 3, second


@pytest.mark.parametrize(
    ("values", "found"),
    [([1, 1, 1], None), ([2, 1, 1], (0, 1)), ([1, 3, 2, 2], (0, 2)), ([1, 2], (1, 0))],
)
def test_the_odd_one_differs_from_what_most_have(
    values: list[int], found: tuple[int, int] | None
) -> None:
    assert agreement.odd_one(values) == found


@on_ranks()
def test_the_same_model_attaches_after_a_failed_attach() -> None:
    ddp = DistributedDataParallel(ChosenGradients(Scenario(WEIGHTS)))
    assert attempt(lambda: hooked(ddp, seed=dist.get_rank())).error == "RankMismatchError"
    hooked(ddp)


# --- in a step ------------------------------------------------------------------------------------

# Every rank owns one tile of each of the first two.
TWINS = (Weight("first", (192, 64)), Weight("second", (192, 64)), Weight("last", (64, 64)))
SIBLINGS = (Weight("first", (64, 64)), Weight("second", (64, 90)), Weight("last", (120, 64)))
ORDERS: dict[str, tuple[tuple[Weight, ...], list[list[int]], str]] = {
    # Messages of one bucket have the sizes of those of the other.
    "equal buckets swapped": (TWINS, [[1], [0], [2]], "layout hash is {n}, expected {n}"),
    "buckets swapped": (
        SIBLINGS,
        [[1], [0], [2]],
        "rank {n} sends a message of {n} bytes where {n} were expected",
    ),
    "two buckets in one": (
        SIBLINGS,
        [[0, 1], [2]],
        "rank {n} sends a message of {n} bytes where {n} were expected",
    ),
    "one bucket more": (
        TWINS,
        [[0], [1], [2]],
        "rank {n} sends a message of {n} bytes where {n} were expected",
    ),
}
USUAL_ORDER = {"one bucket more": [[0], [1, 2]]}


def cut(buckets: list[list[int]]) -> Any:
    def assign(*_: Any) -> tuple[list[list[int]], list[int]]:
        return [list(bucket) for bucket in buckets], [2**20] * len(buckets)

    return mock.patch.object(dist, "_compute_bucket_assignment_by_size", assign)


def case_other_buckets(name: str, odd_rank: int, native: bool) -> tuple[Outcome, bool]:
    weights, buckets, _ = ORDERS[name]
    usual = USUAL_ORDER.get(name, [[0], [1], [2]])
    with cut(buckets if dist.get_rank() == odd_rank else usual):
        run = Run(Scenario(weights, 3, native=native))
    before = run.parameter_hash()
    outcome = attempt(lambda: run.step(0))
    dist.barrier()
    return outcome, run.parameter_hash() == before


def orders() -> Iterator[Any]:
    """The quick ones have every order once, on another rank each time, through either hook."""
    for number, (name, native, odd_rank) in enumerate(
        itertools.product(ORDERS, (True, False), RANKS)
    ):
        marks = () if number % 7 == 0 else pytest.mark.slow
        way = "native" if native else "python"
        yield pytest.param(name, native, odd_rank, id=f"{name}, {way}, {odd_rank}", marks=marks)


@pytest.mark.parametrize(("name", "native", "odd_rank"), list(orders()))
def test_other_buckets_on_one_rank_are_one_error_on_all_before_the_optimizer(
    world_of_3: World, name: str, native: bool, odd_rank: int
) -> None:
    answers = world_of_3.run(case_other_buckets, name=name, odd_rank=odd_rank, native=native)
    text = assert_same_error([outcome for outcome, _ in answers], "ProtocolError")
    values = ORDERS[name][2].replace("{n}", r"\d+")
    assert re.match(rf"rank \d refused a message.* \(step 0, chunk \d, \w+\): {values}", text), text
    assert "no longer run the same sequence of buckets" in text
    assert all(untouched for _, untouched in answers)


@pytest.mark.parametrize("odd_rank", RANKS)
@on_ranks(3)
def test_calls_of_two_reducers_do_not_mix_in_whatever_order_they_come(odd_rank: int) -> None:
    """Calls are under way together. Each Reducer has connections of its own."""
    tensors = [torch.full((3, 1000), 10.0 * i + dist.get_rank()) for i in range(2)]
    reducers = [gradferry.Reducer([("t", tensor)], "exact") for tensor in tensors]
    mine = list(reversed(reducers)) if dist.get_rank() == odd_rank else reducers
    for work in [reducer.all_reduce(async_op=True) for reducer in mine]:
        work.wait()
    assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [11.0]]


@pytest.mark.slow
@pytest.mark.parametrize("odd_rank", RANKS)
@on_ranks(3)
def test_one_collective_more_on_the_group_ends_attach_with_the_timeout(odd_rank: int) -> None:
    """One rank has posted a collective of its own on the group that attach talks over."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    extra = None
    if dist.get_rank() == odd_rank:
        extra = dist.all_reduce(torch.zeros(300), group=group, async_op=True)
    tensors = [(w.name, torch.zeros(w.shape)) for w in WEIGHTS]
    outcome = attempt(lambda: gradferry.Reducer(tensors, "q4", group))
    if extra is not None:
        attempt(extra.wait)
    dist.barrier()
    assert outcome.error == "PeerError", outcome
    assert "the ranks could not agree" in outcome.text
    assert ".cc" not in outcome.text
