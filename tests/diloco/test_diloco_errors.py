"""What `gradferry.DiLoCo` refuses, said on all ranks, and what it leaves unchanged then."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from on_ranks import of_all, on_ranks
from outcomes import attempt
from saved import same
from torch import nn
from training_alone import (
    Plain,
    are_equal,
    bits_of,
    by_its_mean,
    common,
    flat,
    make,
    move,
    movements,
    shift,
    still,
)


def expect_on_all(call: Callable[[], Any], error: str, *texts: str) -> None:
    """All ranks raise one error, with one headline, which has these texts."""
    outcome = attempt(call)
    assert outcome.error == error, (texts, outcome)
    for text in texts:
        assert text in outcome.headline, outcome
    assert are_equal(of_all(outcome.headline)), outcome


def expect_here(call: Callable[[], Any], text: str) -> None:
    outcome = attempt(call)
    assert outcome.error == "StateError", outcome
    assert text in outcome.text, outcome


# --- made -----------------------------------------------------------------------------------------


def frozen(model: nn.Module) -> Any:
    optimizer = still(model)
    model.requires_grad_(False)
    return optimizer


def given(optimizer: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    """Makes a DiLoCo with what this returns of a model."""

    def make_it() -> gradferry.DiLoCo:
        model = Plain()
        return gradferry.DiLoCo(model, optimizer(model))

    return make_it


def partly_frozen(value: float) -> nn.Module:
    model = Plain()
    model.bias = nn.Parameter(torch.full((48,), value), requires_grad=False)
    return model


# What ranks 0 and 1 pass, where these differ, and what all are told.
DIFFER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"sync_every": 4}, {"sync_every": 5}, "sync_every: 5 instead of 4"),
    ({"residual_decay": 0.5}, {}, "residual_decay: 1.0 instead of 0.5"),
    ({}, {"outer": lambda p: torch.optim.SGD(p, 1.0, momentum=0.5)}, "outer optimizer"),
    ({}, {"outer": lambda p: torch.optim.Adam(p, 1.0)}, "outer optimizer"),
    ({}, {"codec": "q8"}, "codec"),
    ({}, {"seed": 1}, "seed"),
    ({"model": Plain()}, {"model": Plain(torch.bfloat16)}, "bfloat16"),
    ({"model": nn.Linear(4, 4)}, {"model": nn.Linear(4, 5)}, "weight"),
    ({"model": partly_frozen(0.0)}, {"model": partly_frozen(1.0)}, "values of frozen parameters"),
]
# What rank 1 passes, which no rank could.
BAD: list[dict[str, Any]] = [
    *({"sync_every": value} for value in (0, True, "x", 1.5)),
    *({"residual_decay": value} for value in (0, 2, True, "x", math.nan)),
    *({"device": value} for value in ("cuda", "nowhere", 7)),
    {"codec": "auto"},
    {"codec": "q17"},
    {"bucket_cap_mb": 0},
    *({"outer": value} for value in ("sgd", lambda tensors: None)),
    {"outer": lambda tensors: torch.optim.SGD(tensors[:1], lr=1.0)},
    {"momentum": 0.9},
    {"check_every": 1},
    {"grad_scaler": None},
    {"nonfinite": "raise"},
    {"warmup_steps": 3},
    {"error_feedbak": "both"},
]
OPTIMIZERS: list[tuple[Callable[[nn.Module], Any], str]] = [
    (lambda model: torch.optim.SGD([model.weight], lr=0.1), "'bias'"),
    (lambda model: still(nn.ParameterList([*model.parameters(), torch.ones(2)])), "Moving"),
    (lambda model: [still(model), model], "Plain"),
    (lambda model: [], "no optimizer"),
    (lambda model: [still(model)] * 2, "twice"),
    (frozen, "no parameters that require grad"),
]


@on_ranks(2)
def test_what_ranks_differ_in_or_cannot_use_is_said_on_all() -> None:
    rank = dist.get_rank()

    def made(model: Any = None, **options: Any) -> Any:
        return make(model or Plain(), **options)

    for *both, text in DIFFER:
        expect_on_all(lambda both=both: made(**both[rank]), "RankMismatchError", "rank 1", text)
    for bad in BAD:
        here = bad if rank == 1 else {}
        expect_on_all(lambda here=here: made(**here), "ConfigError", "rank 1", *bad)
    for wrong, text in OPTIMIZERS:
        call = given(wrong if rank == 1 else still)
        expect_on_all(call, "ConfigError", "rank 1", text)
    ways = (made, lambda: gradferry.Reducer(Plain().named_parameters()))
    assert "rank 1 differs from rank 0 in way in" in attempt(ways[rank]).text
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    whole = nn.Sequential(ddp)
    expect_on_all(lambda: made(whole), "ConfigError", "DistributedDataParallel")
    alone = [dist.new_group([each]) for each in range(2)][rank]
    made(nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=alone))
    optimizer, _ = made()  # the group can be used as before
    optimizer.step()


# --- outer steps that cannot be -------------------------------------------------------------------


def assign(model: Any, *_: Any) -> None:
    new = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(new, assign=True)


def diverge(model: Any, to: float) -> None:
    model.weight.grad = torch.zeros_like(model.weight)
    model.weight.grad[3, 4] = to


CHANGES: list[tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = [  # StateErrors
    (assign, ("'weight' was replaced",)),
    (lambda model, _: delattr(model, "bias"), ("'bias' was removed",)),
    (lambda model, _: setattr(model, "more", nn.Linear(2, 2)), ("'more.weight' was added",)),
    (lambda model, _: nn.utils.parametrizations.weight_norm(model), ("'weight' was removed",)),
    (lambda model, _: diverge(model, math.inf), ("'weight'", "infinity")),
    (lambda model, _: diverge(model, math.nan), ("'weight'", "NaN")),
]


@on_ranks(2)
def test_what_changes_on_one_rank_alone_stops_all() -> None:
    for change, texts in CHANGES:
        model = Plain()
        optimizer, diloco = make(model)
        move(model, movements(model, dist.get_rank()))
        optimizer.step()
        before, kept = common(diloco), copy.deepcopy(diloco.state_dict()["reducer"])
        if dist.get_rank() == 1:
            change(model, optimizer)
        expect_on_all(optimizer.step, "StateError", "rank 1", *texts)
        assert torch.equal(common(diloco), before)
        assert same(diloco.state_dict()["reducer"], kept)
        assert diloco.stats()["outer_steps"] == 1


@on_ranks(2)
def test_states_that_differ_between_ranks_are_found_at_the_next_outer_step() -> None:
    model = Plain()
    optimizer, diloco = make(model, sync_every=2)
    states = []
    for step in range(3):
        move(model, movements(model, dist.get_rank(), step))
        optimizer.step()
        states.append(copy.deepcopy((model.state_dict(), diloco.state_dict())))
    other_bit = copy.deepcopy(states[0])
    other_bit[1]["global"]["bias"].view(torch.int32)[5] ^= 1

    def load(state: Any) -> None:
        model.load_state_dict(state[0])
        diloco.load_state_dict(state[1])

    for other, error, text in (
        (other_bit, "DivergedError", "'bias'"),
        (states[2], "RankMismatchError", "outer_steps"),
    ):
        load(other if dist.get_rank() == 1 else states[0])
        expect_on_all(optimizer.step, error, "rank 1", text)
    load(states[0])
    optimizer.step()
    assert diloco.stats()["outer_steps"] == 1
    assert are_equal(of_all(bits_of(model)))


@on_ranks(2)
def test_what_ranks_load_before_a_period_must_be_the_same() -> None:
    """It becomes the global parameters, without residuals and momentum."""
    model = Plain()
    outer = partial(torch.optim.SGD, lr=1.0, momentum=0.5)
    optimizer, diloco = make(model, outer=outer)
    given = movements(model, 7)
    for number in range(2):
        move(model, movements(model, dist.get_rank(), number))
        optimizer.step()
    shift(model, given)
    begin = flat(model.parameters())
    slot = f"slot_{dist.get_rank()}"
    assert diloco.state_dict()["reducer"][slot]["worker"].any()
    with pytest.warns(gradferry.GradferryWarning, match="changed after outer step 2"):
        optimizer.step()  # without a movement
    assert torch.equal(common(diloco), begin)
    assert not diloco.state_dict()["reducer"][slot]["worker"].any()
    assert not any(kept["momentum_buffer"].any() for kept in diloco.outer.state.values())
    if dist.get_rank() == 1:
        diloco.outer.state.clear()
    expect_on_all(optimizer.step, "RankMismatchError", "rank 1", "outer momentum")
    for finishes in (False, True):
        model = Plain()
        optimizer, diloco = make(model, outer=outer)
        optimizer.step()
        if dist.get_rank() == 1:
            shift(model, given)
        wrong = diloco.finish if finishes else optimizer.step
        expect_on_all(wrong, "DivergedError", "'weight'", "rank 1")


# --- what a rank is told at once ------------------------------------------------------------------


@on_ranks(2)
def test_calls_that_make_no_sense_are_refused_where_they_are_made() -> None:
    model = Plain()
    both = [torch.optim.SGD([parameter], lr=0.0) for parameter in model.parameters()]
    diloco = gradferry.DiLoCo(model, both, sync_every=2)
    foreign = torch.optim.Adam(model.parameters())
    expect_here(foreign.step, "Adam")
    torch.optim.Adam(nn.Linear(2, 2).parameters()).step()  # of another model
    with diloco.global_parameters():
        with diloco.global_parameters():
            pass
        for call in (both[0].step, diloco.finish):
            expect_here(call, "global_parameters()")
    for _ in range(99):
        both[0].step()
    expect_here(both[0].step, "SGD has stepped 100 times")
    assert diloco.stats()["inner_steps"] == 0
    both[1].step()
    assert diloco.stats()["inner_steps"] == 1
    diloco.finish()
    for call in (diloco.finish, diloco.rejoin):
        expect_here(call, "has ended")
    for step in (foreign.step, both[0].step, both[1].step):
        step()
    assert diloco.stats()["inner_steps"] == 1


@on_ranks(2)
def test_parameters_that_were_replaced_are_named_wherever_they_are_asked_for() -> None:
    model = Plain()
    optimizer, diloco = make(model)
    assign(model)
    for call in (optimizer.step, diloco.global_parameters().__enter__, diloco.finish):
        expect_here(call, "'weight' was replaced")


# --- what is allowed ------------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_that_rejoin_in_inference_mode_go_on_outside() -> None:
    model = Plain()
    optimizer, diloco = make(model)
    optimizer.step()
    with torch.inference_mode():
        diloco.rejoin(dist.new_group())
        optimizer.step()
    optimizer.step()
    assert diloco.stats()["outer_steps"] == 3


class Masters(torch.optim.Optimizer):
    """SGD on copies in fp32, in its state, which it rounds to the model."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]
                kept.setdefault("momentum", torch.zeros_like(p))
                kept.setdefault("copy", p.detach().float()).sub_(p.grad.float())
                p.copy_(kept["copy"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_copies_that_an_optimizer_keeps_of_parameters_move_with_them(dtype: torch.dtype) -> None:
    model = Plain(dtype)
    shift(model, [dist.get_rank() + torch.zeros_like(p) for p in model.parameters()])
    optimizer = Masters(model.parameters())
    for p in model.parameters():
        optimizer.state[p]["copy"] = p.detach().float()
    diloco = gradferry.DiLoCo(model, optimizer, 1, "exact", outer=by_its_mean)
    moved = torch.zeros_like(common(diloco))
    for step in range(4):
        given = [movements(model, rank, step) for rank in range(2)]
        move(model, given[dist.get_rank()])
        optimizer.step()
        moved += (flat(given[0]) + flat(given[1])) / 2
        if dtype == torch.float32:
            assert torch.equal(common(diloco), -moved)
        copies = [state["copy"] for state in optimizer.state.values()]
        assert torch.equal(flat(copies), common(diloco))
        assert not any(state["momentum"].any() for state in optimizer.state.values())


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_step_that_a_grad_scaler_skips_does_not_count(fused: bool) -> None:
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    diloco = gradferry.DiLoCo(model, optimizer, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    counted = []
    for step in range(4):
        value = float("inf") if step in (1, 2) else 1.0
        optimizer.zero_grad()
        scaler.scale(model.weight.sum() + model.bias.sum()).backward()
        model.bias.grad[3] *= value
        scaler.step(optimizer)
        scaler.update()
        counted.append(diloco.stats()["inner_steps"])
    assert counted == [1, 1, 1, 2]
