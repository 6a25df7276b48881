"""What users make beside a model that is trained: pickled states, averaged weights, checkpoints in
the background; and weights that are used twice.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import gradferry
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from scenario import Run, Scenario, Weight
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from world import World

SCENARIO = Scenario((Weight("first", (60, 50)), Weight("bias", (50,))), error_feedback="both")


def case_copied_state() -> list[Any]:
    """What copies of a bound state say, and the buckets of models that they are bound to."""
    run = Run(SCENARIO)
    run.step(0)
    answers = []
    for make in (copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = make(run.state)
        ddp = DistributedDataParallel(copy.deepcopy(run.model))
        state.bind(ddp)
        ddp.register_comm_hook(state, gradferry.hook)
        ddp(run.targets(0)).backward()
        said = [str(each.message) for each in caught]
        same = state.config == run.state.config
        answers.append((said, same, state.stats()["buckets"]))
    return answers


def test_copied_state_says_that_it_is_unbound_and_can_be_bound(world_of_2: World) -> None:
    for answers in world_of_2.run(case_copied_state):
        for said, same, buckets in answers:
            assert len(said) == 1
            assert "is not bound to a model" in said[0]
            assert same
            assert buckets > 0


def case_copied_model() -> tuple[list[str], list[bool]]:
    """What stays on a copy of a model that has a hook, and whether it takes another hook."""
    run = Run(SCENARIO)
    own = set(vars(DistributedDataParallel(copy.deepcopy(run.model))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copied = [copy.deepcopy(run.ddp), pickle.loads(pickle.dumps(run.ddp))]
    called = []
    for ddp in copied:
        ddp.register_comm_hook(None, lambda _, bucket: called.append(True) or done(bucket.buffer()))
        ddp(run.targets(0)).backward()
    return sorted(set(vars(copied[0])) - own), called


def done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def test_a_copied_model_takes_another_hook(world_of_2: World) -> None:
    for left, called in world_of_2.run(case_copied_model):
        assert left == []
        assert len(called) >= 2


def case_averaged_weights() -> list[Any]:
    """An exponential moving average, of the module and of the whole DistributedDataParallel."""
    run = Run(SCENARIO)
    share = get_ema_multi_avg_fn(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a copied DistributedDataParallel has no hook
        averages = [AveragedModel(model, multi_avg_fn=share) for model in (run.model, run.ddp)]
    expected: list[torch.Tensor] = []
    for step in range(3):
        run.step(step)
        for average, model in zip(averages, (run.model, run.ddp), strict=True):
            average.update_parameters(model)
        now = [p.detach().clone() for p in run.model.parameters()]
        # The first update copies.
        expected = [a.lerp(b, 0.5) for a, b in zip(expected, now, strict=True)] if step else now
    equal = [
        all(torch.equal(p, e) for p, e in zip(average.parameters(), expected, strict=True))
        for average in averages
    ]
    return [equal, run.state.stats()["steps"]]


def test_averaged_weights_leave_the_training_alone(world_of_2: World) -> None:
    assert world_of_2.run(case_averaged_weights) == [[[True, True], 3]] * 2


class Tied(nn.Module):
    """A language model's: what embeds tokens also scores them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids)).sum()


def case_tied(codec: str) -> tuple[list[str], Any, Any]:
    torch.manual_seed(0)
    plain = DistributedDataParallel(Tied())
    ours = DistributedDataParallel(copy.deepcopy(plain.module))
    state = gradferry.attach(ours, codec)
    ids = torch.arange(4) + 4 * dist.get_rank()
    for ddp in (plain, ours):
        ddp(ids).backward()
    names = [parameter.name for parameter in state.parameters]
    return names, plain.module.head.weight.grad, ours.module.embedding.weight.grad


def test_tied_weights_are_averaged_once(world_of_2: World) -> None:
    for names, expected, got in world_of_2.run(case_tied, codec="exact"):
        assert names == ["embedding.weight"]
        assert torch.equal(got, expected)  # a sum of two, halved


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
