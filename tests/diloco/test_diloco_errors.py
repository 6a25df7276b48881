"""What `gradferry.DiLoCo` refuses, said on all ranks, and what it leaves unchanged then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from outcomes import Outcome, attempt
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
    of_all,
    shift,
    still,
)


def momentum(common: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(common, lr=1.0, momentum=0.5)


def adam(common: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(common, lr=1.0)


def expect_on_all(call: Callable[[], Any], error: str, *texts: str) -> Outcome:
    """All ranks raise one error, with one headline."""
    outcome = attempt(call)
    assert outcome.error == error, outcome
    for text in texts:
        assert text in outcome.text, outcome
    assert are_equal(of_all(outcome.headline))
    return outcome


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        ({"sync_every": 4}, {"sync_every": 5}, "sync_every: 5 instead of 4"),
        ({"residual_decay": 0.5}, {}, "residual_decay: 1.0 instead of 0.5"),
        ({}, {"outer": momentum}, "outer optimizer"),
        ({}, {"outer": adam}, "outer optimizer"),
        ({}, {"codec": "q8"}, "codec"),
        ({}, {"seed": 1}, "seed"),
    ],
    ids=["period", "decay", "momentum", "optimizer", "codec", "seed"],
)
@on_ranks(2)
def test_ranks_that_differ_are_named(
    one: dict[str, Any], other: dict[str, Any], field: str
) -> None:
    arguments = (one, other)[dist.get_rank()]
    expect_on_all(lambda: make(Plain(), **arguments), "RankMismatchError", "rank 1", field)


@on_ranks(2)
def test_models_that_differ_are_named() -> None:
    dtype = (torch.float32, torch.bfloat16)[dist.get_rank()]
    expect_on_all(lambda: make(Plain(dtype)), "RankMismatchError", "rank 1", "bfloat16")
    model = nn.Linear(4, 4 + dist.get_rank())
    expect_on_all(lambda: make(model), "RankMismatchError", "rank 1", "weight")


@on_ranks(2)
def test_rank_that_makes_a_reducer_instead_is_named() -> None:
    ways = (lambda: make(Plain()), lambda: gradferry.Reducer(Plain().named_parameters()))
    outcome = attempt(ways[dist.get_rank()])
    assert outcome.error == "RankMismatchError", outcome
    assert "rank 1 differs from rank 0 in way in" in outcome.text
    assert "DiLoCo" in outcome.text
    assert "Reducer" in outcome.text


BAD: list[dict[str, Any]] = [
    *({"sync_every": value} for value in (0, True, "x", 1.5)),
    *({"residual_decay": value} for value in (0, 2, True, "x", float("nan"))),
    *({"device": value} for value in ("cuda", "nowhere", 7)),
    {"codec": "auto"},
    {"codec": "q17"},
    {"bucket_cap_mb": 0},
    *({"outer": value} for value in ("sgd", lambda common: None)),
    {"outer": lambda common: torch.optim.SGD(common[:1], lr=1.0)},
    {"momentum": 0.9},
    {"check_every": 1},
    {"grad_scaler": None},
    {"nonfinite": "raise"},
    {"warmup_steps": 3},
    {"error_feedbak": "both"},
]


@on_ranks(2)
def test_bad_argument_of_one_rank_is_said_on_all() -> None:
    for bad in BAD:
        arguments = bad if dist.get_rank() == 1 else {}
        (name,) = bad
        call = partial(make, Plain(), **arguments)
        expect_on_all(call, "ConfigError", "rank 1", name)
    optimizer, _ = make(Plain())  # the group can be used as before
    optimizer.step()


def not_all(model: Plain) -> tuple[Any, str]:
    return torch.optim.SGD([model.weight], lr=0.1), "'bias'"


def foreign(model: Plain) -> tuple[Any, str]:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1), "SGD"


def no_optimizer(model: Plain) -> tuple[Any, str]:
    return [still(model), model], "Plain"


def empty_list(model: Plain) -> tuple[Any, str]:
    return [], "no optimizer"


def frozen(model: Plain) -> tuple[Any, str]:
    optimizer = still(model)
    model.requires_grad_(False)
    return optimizer, "no parameters that require grad"


@pytest.mark.parametrize("wrong", [not_all, foreign, no_optimizer, empty_list, frozen])
@on_ranks(2)
def test_wrong_optimizer_of_one_rank_is_said_on_all(
    wrong: Callable[[Plain], tuple[Any, str]],
) -> None:
    model = Plain()
    optimizer, text = wrong(model)
    if dist.get_rank() == 0:
        model = Plain()
        optimizer = still(model)
    expect_on_all(lambda: gradferry.DiLoCo(model, optimizer), "ConfigError", "rank 1", text)


@on_ranks(2)
def test_ranks_that_begin_elsewhere_get_the_parameters_of_rank_0() -> None:
    for codec in ("q4", "off"):
        model = Plain()
        shift(model, movements(model, dist.get_rank()))
        mine = bits_of(model)
        first = of_all(mine)[0]
        _, diloco = make(model, codec)
        assert bits_of(model) == first
        assert torch.equal(common(diloco), flat(model.parameters()))
        assert (mine == first) == (dist.get_rank() == 0)


# --- optimizers and steps -------------------------------------------------------------------------


@on_ranks(2)
def test_another_optimizer_of_the_model_is_refused() -> None:
    model = Plain()
    optimizer, diloco = make(model)
    outcome = attempt(torch.optim.Adam(model.parameters()).step)
    assert outcome.error == "StateError"
    assert "Adam" in outcome.text
    torch.optim.Adam(nn.Linear(2, 2).parameters()).step()  # of another model
    optimizer.step()
    assert diloco.stats()["outer_steps"] == 1


@on_ranks(2)
def test_two_optimizers_count_one_step_together() -> None:
    model = Plain()
    weights = torch.optim.SGD([model.weight], lr=0.1)
    biases = torch.optim.AdamW([model.bias], lr=0.1)
    diloco = gradferry.DiLoCo(model, [weights, biases], sync_every=2)
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank())
        weights.step()
        assert diloco.stats()["inner_steps"] == step
        biases.step()
        assert diloco.stats()["inner_steps"] == step + 1
        assert diloco.stats()["outer_steps"] == (step + 1) // 2
    assert are_equal(of_all(bits_of(model)))


@pytest.mark.parametrize("steps", [(6, 6), (6, 5), (6, 1), (0, 7), (5, 4)])
@on_ranks(2)
def test_rank_whose_data_ends_takes_part_until_all_finish(steps: tuple[int, int]) -> None:
    model = Plain()
    optimizer, diloco = make(model, "exact", sync_every=2)
    for number in range(steps[dist.get_rank()]):
        move(model, movements(model, dist.get_rank(), number))
        optimizer.step()
    diloco.finish()
    moved = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank in range(2):
        for number in range(steps[rank]):
            for whole, part in zip(moved, movements(model, rank, number), strict=True):
                whole += part / 2
    assert torch.equal(common(diloco), -flat(moved))
    assert diloco.stats()["outer_steps"] == -(-max(steps) // 2)


@on_ranks(2)
def test_what_has_ended_stays_so() -> None:
    model = Plain()
    optimizer, diloco = make(model)
    diloco.finish()
    for call in (diloco.finish, diloco.rejoin):
        outcome = attempt(call)
        assert outcome.error == "StateError"
        assert "has ended" in outcome.text
    move(model, movements(model, 7))
    optimizer.step()
    torch.optim.Adam(model.parameters()).step()
    assert diloco.stats()["inner_steps"] == 0


@on_ranks(2)
def test_optimizer_that_never_steps_is_told() -> None:
    model = Plain()
    both = [torch.optim.SGD([parameter], lr=0.0) for parameter in model.parameters()]
    diloco = gradferry.DiLoCo(model, both)
    for _ in range(99):
        both[0].step()
    outcome = attempt(both[0].step)
    assert outcome.error == "StateError"
    assert "SGD has stepped 100 times" in outcome.text
    assert diloco.stats()["inner_steps"] == 0


@on_ranks(2)
def test_outer_optimizer_that_fails_is_named_and_takes_what_others_have() -> None:
    model = Plain()
    group = dist.new_group()
    optimizer, diloco = make(model, "exact")
    if dist.get_rank() == 1:
        handle = diloco.outer.register_step_pre_hook(lambda *_: 1 / 0)
    move(model, movements(model, dist.get_rank()))
    outcome = attempt(optimizer.step)
    assert outcome.error == (None if dist.get_rank() == 0 else "StateError")
    if dist.get_rank() == 1:
        assert "ZeroDivisionError: division by zero" in outcome.text
        handle.remove()
        with pytest.warns(gradferry.GradferryWarning, match="dropped"):
            diloco.rejoin(group)
    else:
        diloco.rejoin(group)
    assert are_equal(of_all(diloco._global.hashes()))
    assert diloco.stats()["outer_steps"] == 1


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


# --- outer steps that cannot be -------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("codec", ["q4", "off"])
@on_ranks(2)
def test_change_that_is_not_finite_stops_the_outer_step_of_all(codec: str, value: float) -> None:
    model = Plain()
    optimizer, diloco = make(model, codec, sync_every=2)
    for _ in range(2):
        move(model, movements(model, dist.get_rank()))
        optimizer.step()
    optimizer.step()
    before, kept = common(diloco), copy.deepcopy(diloco.state_dict()["reducer"])
    if dist.get_rank() == 1:
        model.weight.grad = torch.zeros_like(model.weight)
        model.weight.grad[3, 4] = value
    expect_on_all(optimizer.step, "StateError", "rank 1", "'weight'")
    assert torch.equal(common(diloco), before)
    slot = f"slot_{dist.get_rank()}"
    now = diloco.state_dict()["reducer"]
    assert all(torch.equal(now[slot][kind], kept[slot][kind]) for kind in kept[slot])
    assert now["steps"] == kept["steps"]
    assert diloco.stats()["outer_steps"] == 1
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.weight[3, 4] = 0.0
        diloco.accept_local()
    optimizer.step()  # the outer step that is due
    assert diloco.stats()["outer_steps"] == 2
    assert common(diloco).isfinite().all()
    assert are_equal(of_all(bits_of(model)))


def replace(model: Plain) -> str:
    model.weight = nn.Parameter(model.weight.detach().clone())
    return "'weight' was replaced"


def remove(model: Plain) -> str:
    del model.bias
    return "'bias' was removed"


def convert(model: Plain) -> str:
    model.to(torch.bfloat16)
    return "torch.bfloat16"


def add(model: Plain) -> str:
    model.more = nn.Parameter(torch.zeros(3))
    return "'more' was added"


def assign(model: Plain) -> str:
    new = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(new, assign=True)
    return "'weight' was replaced"


def parametrize(model: Plain) -> str:
    torch.nn.utils.parametrizations.weight_norm(model)
    return "'weight' was removed"


@pytest.mark.parametrize("change", [replace, remove, convert, add, assign, parametrize])
@on_ranks(2)
def test_model_that_changes_on_one_rank_stops_all(change: Callable[[Plain], str]) -> None:
    model = Plain()
    optimizer, diloco = make(model)
    optimizer.step()
    before = common(diloco)
    text = change(model if dist.get_rank() == 1 else Plain())
    expect_on_all(optimizer.step, "StateError", "rank 1", text)
    assert torch.equal(common(diloco), before)
    assert diloco.stats()["outer_steps"] == 1


@on_ranks(2)
def test_parameters_that_were_replaced_are_named_wherever_they_are_asked_for() -> None:
    model = Plain()
    optimizer, diloco = make(model)
    assign(model)
    for call in (
        optimizer.step,
        torch.optim.Adam(model.parameters()).step,
        diloco.global_parameters().__enter__,
        diloco.finish,
    ):
        outcome = attempt(call)
        assert outcome.error == "StateError"
        assert "'weight' was replaced" in outcome.text


@on_ranks(2)
def test_parameters_that_the_model_lacks_are_refused_in_an_optimizer() -> None:
    model = Plain()
    optimizer, _ = make(model)
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    expect_on_all(optimizer.step, "StateError", "rank 1", "Moving got parameters")


@on_ranks(2)
def test_what_one_rank_alone_has_frozen_is_named() -> None:
    model = Plain()
    optimizer, _ = make(model)
    model.bias.requires_grad_(dist.get_rank() == 0)
    expect_on_all(optimizer.step, "StateError", "rank 1", "'bias'", "frozen")


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


@on_ranks(2)
def test_average_of_every_step_over_the_same_ranks_is_refused() -> None:
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = still(ddp)
    call = partial(gradferry.DiLoCo, nn.Sequential(ddp), optimizer)
    expect_on_all(call, "ConfigError", "DistributedDataParallel")
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    of_worker = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=alone)
    gradferry.DiLoCo(of_worker, still(of_worker))


@on_ranks(2)
def test_model_is_moved_in_swap_mode() -> None:
    model = Plain()
    optimizer, diloco = make(model, "exact")
    with mock.patch.dict(vars(torch.__future__), {"_swap_module_params_on_conversion": True}):
        for step in range(2):
            model.double()
            model.float()
            move(model, movements(model, dist.get_rank(), step))
            optimizer.step()
    assert diloco.stats()["outer_steps"] == 2


def other_common(states: list[dict[str, Any]]) -> tuple[str, str]:
    """Both are of one outer step, and one has another last bit."""
    states[0]["global"] = copy.deepcopy(states[0]["global"])
    states[0]["global"]["bias"].view(torch.int32)[5] ^= 1
    return "DivergedError", "'bias'"


def other_step(states: list[dict[str, Any]]) -> tuple[str, str]:
    states[0] = states[1]
    return "RankMismatchError", "outer_steps"


@pytest.mark.parametrize("differ", [other_common, other_step])
@on_ranks(2)
def test_states_that_differ_between_ranks_are_found_at_the_next_outer_step(
    differ: Callable[[list[dict[str, Any]]], tuple[str, str]],
) -> None:
    model = Plain()
    optimizer, diloco = make(model)
    states, models = [], []
    for step in range(2):
        move(model, movements(model, dist.get_rank(), step))
        optimizer.step()
        states.append(diloco.state_dict())
        models.append(copy.deepcopy(model.state_dict()))
    own = copy.deepcopy(states[0])
    error, text = differ(states)
    is_other = dist.get_rank() == 1
    diloco.load_state_dict(states[0] if is_other else own)
    model.load_state_dict(models[is_other and error == "RankMismatchError"])
    expect_on_all(optimizer.step, error, "rank 1", text)
    diloco.load_state_dict(own)
    model.load_state_dict(models[0])
    optimizer.step()
    assert diloco.stats()["outer_steps"] == 2
    assert are_equal(of_all(bits_of(model)))


# --- global_parameters() --------------------------------------------------------------------------


@on_ranks(2)
def test_step_within_global_parameters_is_refused() -> None:
    model = Plain()
    optimizer, diloco = make(model, sync_every=2)
    move(model, movements(model, dist.get_rank()))
    optimizer.step()
    local = bits_of(model)
    with diloco.global_parameters():
        outcome = attempt(optimizer.step)
    assert outcome.error == "StateError"
    assert "global_parameters()" in outcome.text
    assert bits_of(model) == local
    assert diloco.stats()["inner_steps"] == 1
    optimizer.step()
    assert diloco.stats()["outer_steps"] == 1


@on_ranks(2)
def test_step_of_one_of_two_optimizers_within_global_parameters_is_refused() -> None:
    model = Plain()
    weights, biases = (torch.optim.SGD([p], lr=0.1) for p in model.parameters())
    diloco = gradferry.DiLoCo(model, [weights, biases], sync_every=2)
    with diloco.global_parameters():
        with diloco.global_parameters():
            pass
        assert attempt(weights.step).error == "StateError"
    biases.step()
    assert diloco.stats()["inner_steps"] == 0
    weights.step()
    assert diloco.stats()["inner_steps"] == 1


# --- what is no change, or one that counts --------------------------------------------------------


class Nested(torch.optim.SGD):
    """torch hooks both this step() and that which it calls."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def trained(steps: int, around: Callable[[gradferry.DiLoCo, nn.Module, int], Any]) -> torch.Tensor:
    """The model after these steps with gradients of this rank, and finish(); `around` is called
    before each step and before finish().
    """
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = Nested(model.parameters(), lr=0.01)
    diloco = gradferry.DiLoCo(model, optimizer, sync_every=3, codec="exact")
    for step in range(steps + 1):
        diloco = around(diloco, model, step) or diloco
        if step == steps:
            break
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
    assert diloco.stats()["inner_steps"] == steps
    diloco.finish()
    assert are_equal(of_all(bits_of(model)))
    return flat(model.parameters())


def swapped(diloco: gradferry.DiLoCo, model: nn.Module, step: int) -> None:
    """An average of weights is swapped in, the global parameters are looked at, and it goes out."""
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict({key: torch.full_like(each, 7.0) for key, each in kept.items()})
    with diloco.global_parameters():
        pass
    model.load_state_dict(kept)


def loaded(at: int, saves: bool) -> Callable[[gradferry.DiLoCo, nn.Module, int], Any]:
    def load(diloco: gradferry.DiLoCo, model: nn.Module, step: int) -> None:
        if step == at:
            model.load_state_dict(
                {k: torch.full_like(v, 2.0) for k, v in model.state_dict().items()}
            )
            if saves:
                diloco.load_state_dict(diloco.state_dict())

    return load


def accepted(at: int, swaps: bool) -> Callable[[gradferry.DiLoCo, nn.Module, int], Any]:
    def clip(diloco: gradferry.DiLoCo, model: nn.Module, step: int) -> None:
        if step == at:
            with torch.no_grad():
                model.weight.clamp_(-0.05 - 0.01 * dist.get_rank(), 0.05)
            diloco.accept_local()
        if swaps and step >= at:
            swapped(diloco, model, step)

    return clip


@on_ranks()
def test_a_swap_there_and_back_is_no_change() -> None:
    assert torch.equal(trained(7, swapped), trained(7, lambda *_: None))


@pytest.mark.parametrize("at", range(8))
@on_ranks()
def test_a_load_is_known_to_a_state_saved_before_the_next_step(at: int) -> None:
    assert torch.equal(trained(7, loaded(at, saves=True)), trained(7, loaded(at, saves=False)))


@pytest.mark.parametrize("at", [0, 3, 4, 6, 7])
@on_ranks()
def test_accepted_parameters_count_from_the_period_on_in_which_they_changed(at: int) -> None:
    clipped = trained(7, accepted(at, swaps=False))
    assert not torch.equal(clipped, trained(7, lambda *_: None))
    assert torch.equal(trained(7, accepted(at, swaps=True)), clipped)
