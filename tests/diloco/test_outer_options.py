"""Options of the outer optimizer reach who comes or comes back, with their values and types."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry.averaging.global_parameters import pack, unpack
from gradferry.errors import ProtocolError
from on_ranks import on_ranks
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils._pytree import tree_map_only
from training_alone import Plain, are_equal, bits_of, make, move, movements, of_all

Group = dict[str, Any]


def shown(options: Any) -> str:
    """Equal only where values and types are."""
    return repr(tree_map_only(torch.Tensor, lambda each: (each.dtype, each.tolist()), options))


def described(group: Group) -> dict[str, str]:
    return {key: shown(value) for key, value in group.items() if key != "params"}


def with_tensor(common: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate = torch.tensor(0.7, dtype=torch.float64)
    return torch.optim.SGD(common, lr=rate, momentum=0.5, nesterov=True, foreach=False)


@pytest.mark.parametrize("comes", ["new", "behind"])
@on_ranks(2)
def test_options_reach_who_comes(comes: str) -> None:
    """Rank 0 has taken two outer steps alone, under a schedule, and has changed another option."""
    rank, model = dist.get_rank(), Plain()
    groups = [dist.new_group([each]) for each in range(2)]
    if rank == 0 or comes == "behind":
        optimizer, diloco = make(model, outer=with_tensor, group=groups[rank])
        optimizer.step()
        if rank == 0:
            schedule = ExponentialLR(diloco.outer, 0.75)
            optimizer.step()
            schedule.step()
            (group,) = diloco.outer.param_groups
            group["foreach"] = None
            group["pair"] = (0.5, torch.tensor(3))
            diloco.rejoin()
        else:
            with pytest.warns(gradferry.GradferryWarning, match="others 2 without it"):
                diloco.rejoin()
    else:
        optimizer, diloco = make(model, outer=with_tensor)
    (group,) = diloco.outer.param_groups
    found = described(group)
    assert found["lr"] == shown(torch.tensor(0.7 * 0.75, dtype=torch.float64))
    assert found["foreach"] == "None"
    assert found["pair"] == shown((0.5, torch.tensor(3)))
    assert are_equal(of_all(found))
    move(model, movements(model, rank))
    optimizer.step()
    assert are_equal(of_all(bits_of(model)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@on_ranks(2)
def test_momentum_reaches_who_comes(dtype: torch.dtype) -> None:
    """Also that of complex parameters, of which a codec compresses the real view."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(64, 256, dtype=dtype))
    model.scalar = nn.Parameter(torch.zeros((), dtype=dtype))
    groups = [dist.new_group([each]) for each in range(2)]
    if dist.get_rank() == 0:
        optimizer, diloco = make(model, outer=None, group=groups[0])
        move(model, movements(model, 0))
        optimizer.step()
        diloco.rejoin()
    else:
        optimizer, diloco = make(model, outer=None)
    state = diloco.state_dict()["outer"]["state"]
    momentum = [state[index]["momentum_buffer"] for index in range(2)]
    assert all(bool(each.abs().sum() > 0) for each in momentum)
    assert are_equal(of_all([torch.view_as_real(each + 0j).tolist() for each in momentum]))
    move(model, movements(model, 1))
    optimizer.step()
    assert are_equal(of_all(bits_of(model)))


@on_ranks(2)
def test_rates_in_tensors_that_differ_are_named() -> None:
    model = Plain()
    optimizer, diloco = make(model, outer=with_tensor)
    if dist.get_rank() == 1:
        diloco.outer.param_groups[0]["lr"].fill_(0.5)
    with pytest.raises(gradferry.RankMismatchError, match=r"rank 1 differs .* in outer optimizer"):
        optimizer.step()


def optimizer_with(**options: Any) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.zeros(3))
    return torch.optim.SGD([{"params": [parameter], **options}], lr=0.5)


OPTIONS: dict[str, Any] = {
    "none": None,
    "flag": True,
    "whole": 3,
    "number": 0.1,
    "no bound": float("inf"),
    "whole number in fp": 1.0,
    "text": "exact",
    "list": [1, (2.0, None)],
    "named": {"tensor": [1], "tuple": (0.9, torch.tensor(0.95))},
    "half": torch.tensor([0.1, 3e-5], dtype=torch.bfloat16),
    "mask": torch.tensor([[True, False]]),
    "far": torch.tensor(2**62 + 1),
}


def test_options_have_their_values_and_types() -> None:
    there, here = optimizer_with(**OPTIONS), optimizer_with(none=1)
    unpack(pack(there), here)
    assert described(here.param_groups[0]) == described(there.param_groups[0])


def test_tensors_stay_the_same_objects_which_schedules_hold() -> None:
    one, other = (optimizer_with(rate=torch.tensor(rate), mine=object()) for rate in (0.5, 0.25))
    rate, mine = (one.param_groups[0][key] for key in ("rate", "mine"))
    unpack(pack(other), one)
    assert one.param_groups[0]["rate"] is rate
    assert rate == 0.25
    assert one.param_groups[0]["mine"] is mine  # which cannot be written


DAMAGED = [
    b"",
    pack(optimizer_with(mine=1))[:-40],
    pickle.dumps([1, 2]),  # no optimizer
    pickle.dumps(print),  # a call
]


def test_bytes_that_fit_no_optimizer_are_refused() -> None:
    there, here = torch.optim.Adam([nn.Parameter(torch.ones(4))]), optimizer_with(mine=1)
    there.param_groups[0]["params"][0].grad = torch.ones(4)
    there.step()
    before = described(here.param_groups[0])
    for data in (*DAMAGED, pack(there, with_state=True)):
        with pytest.raises(ProtocolError):
            unpack(data, here)
        assert described(here.param_groups[0]) == before


@on_ranks(2)
def test_outer_adafactor_is_saved_loaded_and_handed_on() -> None:
    """Its state has means over rows and columns."""
    model, group = Plain(), dist.new_group()
    optimizer, diloco = make(model, outer=torch.optim.Adafactor)
    move(model, movements(model, dist.get_rank()))
    optimizer.step()
    saved = copy.deepcopy((model.state_dict(), diloco.state_dict()))
    if dist.get_rank() == 0:
        diloco.rejoin(group)
    else:
        diloco.close()
        model = Plain()
        optimizer, diloco = make(model, outer=torch.optim.Adafactor, group=group)
    bits = []
    for again in range(2):
        move(model, movements(model, dist.get_rank(), 1))
        optimizer.step()
        bits.append(of_all(bits_of(model)))
        if not again:
            model.load_state_dict(saved[0])
            diloco.load_state_dict(saved[1])
    assert are_equal(bits[0])
    assert are_equal(bits[1])
