"""Ranks that disagree all get the same error, which says who, what and which values: at attach, at
the first bucket that one of them cuts or orders otherwise, where their loss scales or parameters
differ. Ranks are named as in the world, also in a group where they have other numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import os
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry import _native
from gradferry.averaging.running import Running
from gradferry.averaging.saved_state import signed
from gradferry.core import agreement
from on_ranks import of_all, on_ranks
from outcomes import Outcome, attempt, little_patience
from products import rows
from scenario import ChosenGradients, Run, Scenario, Weight, hooked, placed
from sharding import Sharding
from stepping import flip_last_bit
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watching import expect_no_race

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
    "loss scale": Difference(
        "scale of grad_scaler", "1024.0", "2048.0", {"scale": 2048.0}, {"scale": 1024.0}
    ),
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
    scale: float | None = None,
    **options: Any,
) -> Outcome:
    """The outcome of the call that compares this rank with the others."""
    # On every rank, whatever it calls, because it is collective.
    shaped = [dataclasses.replace(w, shape=u.shape) for w, u in zip(weights, WEIGHTS, strict=False)]
    model = ChosenGradients(Scenario((*shaped, *WEIGHTS[len(shaped) :])))
    # Without the copy of rank 0's parameters, which other dtypes would mix up.
    of_ddp = DistributedDataParallel(model, init_sync=False)
    named = [(w.name, torch.zeros(w.shape, dtype=w.dtype)) for w in weights]
    if scale is not None:
        options["grad_scaler"] = torch.amp.GradScaler("cpu", init_scale=scale)
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


def told_alike(outcome: Outcome, error: str) -> str:
    """The first line of this rank's error, which is that of all ranks."""
    assert outcome.error == error, outcome
    texts = of_all(outcome.headline)
    assert len(set(texts)) == 1, texts
    return outcome.headline


@pytest.mark.torch_core
@pytest.mark.parametrize(("number", "name"), [*enumerate(DIFFERENCES)])
@on_ranks(3)
def test_same_error_on_all_ranks_when_one_differs(number: int, name: str) -> None:
    """Every way in and every rank in turn. Afterwards none differs, and all attach and train."""
    differs, odd_rank = DIFFERENCES[name], number % 3
    entry = differs.entries[number % len(differs.entries)]
    odd = differs.odd if dist.get_rank() == odd_rank else {}
    text = told_alike(enter(**{"entry": entry, **differs.usual, **odd}), "RankMismatchError")
    # All are compared with rank 0.
    got, wanted = differs.odd_value, differs.usual_value
    if odd_rank == 0:
        got, wanted = wanted, got
    place = f"rank {odd_rank or 1} differs from rank 0 in {differs.field}"
    pattern = f"{re.escape(place)}.*: {re.escape(got)}.* instead of {re.escape(wanted)}"
    assert re.match(pattern, text), text
    assert Run(Scenario(WEIGHTS)).step(0)[0] is not None


# What one rank has, and what all are told.
FAILURES = {
    "codec": ("ConfigError", "rank {}: .*q44"),
    "scale": ("ConfigError", "rank {}: the scale of grad_scaler is inf"),
    # Beside a wrong codec.
    "version": ("RankMismatchError", "rank ({}|1) differs from .* version: .*0.0.7"),
}


@pytest.mark.parametrize(
    ("entry", "odd_rank", "what"), rows(("attach", "HookState", "Reducer"), RANKS, list(FAILURES))
)
@on_ranks(3)
def test_failure_of_one_rank_is_the_same_error_on_all(entry: str, odd_rank: int, what: str) -> None:
    """Afterwards nothing fails."""
    odd = dist.get_rank() == odd_rank
    version = "0.0.7" if odd and what == "version" else agreement.GRADFERRY_VERSION
    with mock.patch.object(agreement, "GRADFERRY_VERSION", version):
        codec = "q44" if odd and what in ("codec", "version") else "q4"
        outcome = enter(entry, codec=codec, scale=math.inf if odd and what == "scale" else 2.0)
    error, text = FAILURES[what]
    assert re.match(text.format(odd_rank), told_alike(outcome, error))
    assert enter(entry).error is None


@pytest.mark.parametrize(
    ("values", "found"),
    [([1, 1, 1], None), ([2, 1, 1], (0, 1)), ([1, 3, 2, 2], (0, 2)), ([1, 2], (1, 0))],
)
def test_the_odd_one_differs_from_what_most_have(
    values: list[int], found: tuple[int, int] | None
) -> None:
    assert agreement.odd_one(values) == found


# --- in a step ------------------------------------------------------------------------------------

# Every rank owns one tile of each of the first two: messages of one have the sizes of the other's.
TWINS = (Weight("first", (192, 64)), Weight("second", (192, 64)), Weight("last", (64, 64)))


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks(3)
def test_other_buckets_on_one_rank_are_one_error_on_all_before_the_optimizer(native: bool) -> None:
    """Simulated worlds have other differences of buckets."""
    first = int(dist.get_rank() == 1)
    assigned = ([[first], [1 - first], [2]], [2**20] * 3)
    with mock.patch.object(dist, "_compute_bucket_assignment_by_size", return_value=assigned):
        run = Run(Scenario(TWINS, 3, native=native))
    before = run.parameter_hash()
    outcome = attempt(lambda: run.step(0))
    text = told_alike(outcome, "ProtocolError")
    values = r"layout hash is \d+, expected \d+"
    pattern = rf"rank \d \w+ a message.* \(step 0, chunk \d, \w+\): {values}"
    assert re.match(pattern, text), text
    assert "no longer run the same sequence of buckets" in text
    assert run.parameter_hash() == before


@pytest.mark.parametrize("field", ["config_hash", "layout_hash"])
@on_ranks(3)
def test_another_hash_on_one_rank_is_one_error_on_all(field: str) -> None:
    with mock.patch.object(Running, field, dist.get_rank() // 2):
        run = Run(Scenario(TWINS, 3))
    assert field.split("_")[0] in told_alike(attempt(lambda: run.step(0)), "ProtocolError")


# --- loss scales ----------------------------------------------------------------------------------

DIFFERS = "differs from rank 0 in the scale of its GradScaler at step "
Scaler = torch.amp.GradScaler


def steps_of_hook(scaler: Scaler) -> Callable[[], None]:
    ddp = DistributedDataParallel(nn.Linear(70, 70))
    hooked(ddp, grad_scaler=scaler)
    return lambda: scaler.scale(ddp(torch.ones(2, 70)).square().mean()).backward()


def steps_of_reducer(scaler: Scaler) -> Callable[[], None]:
    reducer = gradferry.Reducer({"gradient": torch.ones(70, 70)}, "q4", grad_scaler=scaler)
    return lambda: reducer.all_reduce([torch.ones(70, 70)])


def steps_of_shards(scaler: Scaler, scatters: bool) -> Callable[[], None]:
    sharding = Sharding(replicas=1 if scatters else 2, shards=2 if scatters else 1)
    model = sharding.native()
    options = {"all_gather": "off"} if scatters else {}
    gradferry.fsdp.attach(model, "q4", grad_scaler=scaler, **options)

    def step() -> None:
        model.zero_grad()
        scaler.scale(model(sharding.targets(0, 0, dist.get_rank()))).backward()

    return step


# Warm-ups, nodes and unused parameters differ in nothing here: simulated worlds show that.
WAYS = {
    "hook": steps_of_hook,
    "reducer": steps_of_reducer,
    "replicas": functools.partial(steps_of_shards, scatters=False),
    "shards": functools.partial(steps_of_shards, scatters=True),
}


@pytest.mark.torch_core
@pytest.mark.parametrize("way", WAYS)
@on_ranks()
def test_scales_that_differ_are_one_error_on_all_ranks(way: str) -> None:
    """Rank 1 alone has doubled its scale after two steps."""
    scaler = Scaler("cpu", init_scale=1024.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of FSDP2's unused parameters
        step = WAYS[way](scaler)
        step()
        step()
        if dist.get_rank() == 1:
            scaler.load_state_dict({**scaler.state_dict(), "scale": 2048.0})
        for outcome in attempt(step), attempt(step):
            assert outcome.error == "RankMismatchError", outcome
            assert outcome.text.startswith(f"rank 1 {DIFFERS}2: 2048 instead of 1024,"), outcome


@pytest.mark.parametrize("growth_interval", [100, 4])
@on_ranks()
def test_a_scale_that_changes_without_a_rank_under_join_is_an_error(growth_interval: int) -> None:
    """join() with 2 and 6 inputs, then a step of both ranks."""
    scaler = Scaler("cpu", init_scale=8.0, growth_interval=growth_interval)
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    hooked(ddp, grad_scaler=scaler)

    def step() -> None:
        scaler.scale(ddp(torch.ones(2, 40)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    def train() -> None:
        with ddp.join():
            for _ in range(2 + 4 * dist.get_rank()):
                step()
        step()

    outcome = attempt(train)
    assert outcome.error == (None if growth_interval == 100 else "RankMismatchError")
    if outcome.error:
        assert outcome.text.startswith(f"rank 1 {DIFFERS}4: 16 instead of 8,")
        assert "throw_on_early_termination=True" in outcome.headline
        assert scaler.get_scale() == (8.0, 16.0)[dist.get_rank()]


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("device", "scales", "text"),
    [
        ("streamed", [1024.0, 2048.0], f"rank 1 {DIFFERS}2: 2048 instead of 1024"),
        ("staged", [1024.0, 2048.0], f"rank 1 {DIFFERS}2: 2048 instead of 1024"),
        ("streamed", [math.nan] * 2, "the scale of rank 0's GradScaler is nan at step 2"),
        ("staged", [0.0, 1024.0], "the scale of rank 0's GradScaler is 0 at step 2"),
    ],
)
@on_ranks()
def test_devices_report_scales_that_differ_two_steps_later(
    device: str, scales: list[float], text: str
) -> None:
    """A rank's scale from step 2 on."""

    place, group = placed(device)
    scaler = torch.amp.GradScaler(place.type, init_scale=1024.0)
    ddp = DistributedDataParallel(nn.Linear(70, 70).to(place), process_group=group)
    hooked(ddp, grad_scaler=scaler)

    def step() -> None:
        scaler.scale(ddp(torch.ones(2, 70, device=place)).square().mean()).backward()

    outcomes = []
    for number in range(5):
        if number == 2:
            scaler._scale.fill_(scales[dist.get_rank()])
        if number == 3:
            scaler._scale.fill_(1024.0)  # equal again: only step 2 was wrong
        outcomes.append(attempt(step))
    kind = "RankMismatchError" if DIFFERS in text else "StateError"
    assert [o.error for o in outcomes] == [None] * 4 + [kind]
    assert text in outcomes[4].headline
    expect_no_race()


# --- check_every: parameters ----------------------------------------------------------------------

PARAMETERS = (
    Weight("first", (90, 70)),
    Weight("bias", (51,), torch.bfloat16),
    Weight("channels", (32, 20, 3, 3), channels_last=True),
    Weight("fp64", (5, 7), torch.float64),
    Weight("complex", (7, 3), torch.complex64),
    Weight("empty", (0, 3)),
    Weight("one", (1,)),
)


@pytest.mark.parametrize("odd", RANKS)
@on_ranks(3)
def test_one_bit_on_one_rank_is_named_on_all_and_nobody_looks_between(odd: int) -> None:
    scenario = Scenario(PARAMETERS, 3, options={"check_every": 2}, ddp={"bucket_cap_mb": 0.02})
    kinds = [weight.name for weight in PARAMETERS if weight.num_elements]
    for number, names in enumerate([*([name] for name in kinds[odd::3]), kinds[2:4]]):
        run = Run(scenario)
        if run.rank == odd:
            run.model.get_parameter("one").data.fill_(1)
        run.step(0)
        run.step(1)  # nobody looks
        with torch.no_grad():
            run.model.get_parameter("one").zero_()
        if run.rank == odd:
            for name in names:  # in the step that looks: adding a gradient may round it away
                flip_last_bit(run.model.get_parameter(name))
        outcome = attempt(lambda: run.step(2))  # noqa: B023
        usual = 1 if odd == 0 else 0
        assert outcome.error == "DivergedError", number
        assert outcome.text.startswith(  # the first of several
            f"parameter '{names[0]}' of rank {odd} differs from that of rank {usual} at step 2"
        )


# --- names of ranks -------------------------------------------------------------------------------

GROUP = [1, 2]  # of a world of three; in the group these are ranks 0 and 1


def named() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(40, 50), "b": torch.zeros(70, 30)}


def reducer(group: Any, codec: str = "q4", **options: Any) -> Any:
    return gradferry.Reducer(named(), codec, group, **options)


def other_codec(group: Any, second: bool) -> Outcome:
    return attempt(lambda: reducer(group, "q8" if second else "q4"))


def stays_away(group: Any, second: bool) -> Outcome:
    with little_patience():
        return attempt(lambda: None if second else reducer(group))


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
        made.load_state_dict(signed({**state, "steps": 5}))
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
    stays_away: ("rank 2 did not make a Reducer", ""),
    lets_go: ("rank 1 lost contact with rank 2 (step 1", ""),
    other_step: (" a message from rank 2 (step 0",) * 2,
    diverged: ("parameter 'weight' of rank 2 differs from that of rank 1 at step 1",) * 2,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@on_ranks(3)
def test_errors_name_ranks_of_the_world(case: Callable[[Any, bool], Outcome]) -> None:
    group, rank = dist.new_group(GROUP), dist.get_rank()
    if rank in GROUP:
        second = rank == GROUP[1]
        text, outcome = CASES[case][second], case(group, second)
        assert text in outcome.text, outcome
        assert (outcome.error is None) == (text == "")
        dist.barrier(group)
        described = str(reducer(group))
        assert f"rank {rank - 1} of 2, " in described
        assert "(ranks 1 and 2 of the world)" in described
    dist.barrier()
