"""Options of the outer optimizer reach who comes or comes back, with their values and types."""

from __future__ import annotations

import copy
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from on_ranks import of_all, on_ranks
from torch import nn
from torch.utils._pytree import tree_map_only
from training_alone import Plain, are_equal, bits_of, make, move, movements


def shown(options: Any) -> str:
    """Equal only where values and types are."""
    return repr(tree_map_only(torch.Tensor, lambda each: (each.dtype, each.tolist()), options))


def with_tensor(common: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate = torch.tensor(0.7, dtype=torch.float64)
    return torch.optim.SGD(common, lr=rate, momentum=0.5, nesterov=True, foreach=False)


@pytest.mark.filterwarnings("ignore::gradferry.GradferryWarning")  # what is behind is dropped
@pytest.mark.parametrize("comes", ["new", "behind"])
@pytest.mark.parametrize(
    ("outer", "dtype"),
    [
        (with_tensor, torch.float32),
        (None, torch.bfloat16),
        (None, torch.complex64),  # of which a codec compresses the real view
        (torch.optim.Adafactor, torch.float32),  # whose state has means over rows and columns
    ],
)
@on_ranks(2)
def test_options_and_state_reach_who_comes_and_are_saved(
    comes: str, outer: Any, dtype: torch.dtype
) -> None:
    """Rank 0 has taken two outer steps alone, and has changed options."""
    rank, model = dist.get_rank(), nn.Module()
    model.weight = nn.Parameter(torch.zeros(64, 256, dtype=dtype))
    model.scalar = nn.Parameter(torch.zeros((), dtype=dtype))
    groups = [dist.new_group([each]) for each in range(2)]
    is_new = rank == 1 and comes == "new"
    optimizer, diloco = make(model, outer=outer, group=None if is_new else groups[rank])
    if not is_new:
        for step in range(2 - rank):
            move(model, movements(model, rank, step))
            optimizer.step()
        if rank == 0:
            (group,) = diloco.outer.param_groups
            group["lr"] *= 0.75
            group["pair"] = (0.5, torch.tensor(3))
            group["foreach"] = None
        diloco.rejoin()
    model_too = copy.deepcopy(model.state_dict())
    saved = diloco.state_dict()
    assert are_equal(of_all(shown(saved["outer"])))
    assert "pair" in diloco.outer.param_groups[0]
    assert len(saved["outer"]["state"]) == 2
    bits = []
    for _ in range(2):
        diloco.load_state_dict(saved)
        model.load_state_dict(model_too)
        move(model, movements(model, rank))
        optimizer.step()
        bits += of_all(bits_of(model))
    assert are_equal(bits)


@on_ranks(2)
def test_rates_in_tensors_that_differ_are_named() -> None:
    model = Plain()
    optimizer, diloco = make(model, outer=with_tensor)
    if dist.get_rank() == 1:
        diloco.outer.param_groups[0]["lr"].fill_(0.5)
    with pytest.raises(gradferry.RankMismatchError, match=r"rank 1 differs .* in outer optimizer"):
        optimizer.step()
