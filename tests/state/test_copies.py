"""What users make beside a model that is trained: pickled states, averaged weights, checkpoints in
the background; and weights that are used twice.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import gradferry
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
from scenario import Run, Scenario, Weight
from stepping import warned
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from world import World

SCENARIO = Scenario((Weight("first", (60, 50)), Weight("bias", (50,))), error_feedback="both")


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
}


@pytest.mark.parametrize("how", COPIES)
@on_ranks(2)
def test_copied_state_says_that_it_is_unbound_and_can_be_bound(how: str) -> None:
    run = Run(SCENARIO)
    run.step(0)
    with warned() as said:
        state = COPIES[how](run.state)
    (text,) = said
    assert "is not bound to a model" in str(text.message)
    ddp = DistributedDataParallel(copy.deepcopy(run.model))
    state.bind(ddp)
    ddp.register_comm_hook(state, gradferry.hook)
    ddp(run.targets(0)).backward()
    assert state.config == run.state.config
    assert state.stats()["buckets"] > 0


@on_ranks(2)
def test_averaged_weights_leave_the_training_alone() -> None:
    """An exponential moving average, of the module and of the whole DistributedDataParallel."""
    run = Run(SCENARIO)
    share = get_ema_multi_avg_fn(0.5)
    with warned():  # a copied DistributedDataParallel has no hook
        averages = [AveragedModel(model, multi_avg_fn=share) for model in (run.model, run.ddp)]
    expected: list[torch.Tensor] = []
    for step in range(3):
        run.step(step)
        for average, model in zip(averages, (run.model, run.ddp), strict=True):
            average.update_parameters(model)
        now = [p.detach().clone() for p in run.model.parameters()]
        # The first update copies.
        expected = [a.lerp(b, 0.5) for a, b in zip(expected, now, strict=True)] if step else now
    for average in averages:
        assert all(torch.equal(p, e) for p, e in zip(average.parameters(), expected, strict=True))
    assert run.state.stats()["steps"] == 3


class Tied(nn.Module):
    """A language model's: what embeds tokens also scores them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids)).sum()


@on_ranks(2)
def test_tied_weights_are_averaged_once() -> None:
    torch.manual_seed(0)
    plain = DistributedDataParallel(Tied())
    ours = DistributedDataParallel(copy.deepcopy(plain.module))
    state = gradferry.attach(ours, "exact")
    for ddp in (plain, ours):
        ddp(torch.arange(4) + 4 * dist.get_rank()).backward()
    assert [parameter.name for parameter in state.parameters] == ["embedding.weight"]
    # A sum of two, halved.
    assert torch.equal(ours.module.embedding.weight.grad, plain.module.head.weight.grad)


def case_saved_in_background(folder: str) -> bool:
    """Training goes on while torch.distributed.checkpoint writes what the hook had withheld."""
    run = Run(SCENARIO)
    run.step(0)
    before = copy.deepcopy(run.state.state_dict())
    # It has collectives of its own in a thread, which must not meet those of DDP.
    group = dist.new_group()
    saving = dcp.async_save({"hook": run.state}, checkpoint_id=folder, process_group=group)
    run.step(1)
    saving.result()
    other = Run(SCENARIO)
    dcp.load({"hook": other.state}, checkpoint_id=folder)
    slot = f"slot_{dist.get_rank()}"
    loaded, now = other.state.state_dict()[slot], run.state.state_dict()[slot]
    assert not torch.equal(now["worker"], before[slot]["worker"])
    # Both ranks have a worker residual, one of them owns the only tile.
    return all(torch.equal(loaded[kind], before[slot][kind]) for kind in ("worker", "owner"))


def test_state_saved_in_the_background_is_that_of_when_it_was_asked_for(
    world_of_2: World, tmp_path: Path
) -> None:
    answers = world_of_2.run(case_saved_in_background, folder=str(tmp_path))
    assert answers == [True, True]
