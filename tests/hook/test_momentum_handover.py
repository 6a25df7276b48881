"""Ranks compare whose momentum OneBitAdam hands over."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradferry.optim import OneBitAdam
from momentum_training import BETAS, one_bit_adam
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from scenario import ChosenGradients, Scenario, Weight, hooked
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from world import World

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (64, 60)))


def case_ranks_that_differ(optimizers: dict[int, list[list[int]]]) -> list[str]:
    """The outcome of every step; optimizers: by rank, the indices of each one's parameters."""
    model = ChosenGradients(Scenario(WEIGHTS))
    ddp = DistributedDataParallel(model)
    state = hooked(ddp, "sign1", momentum=BETAS[0], warmup_steps=2)
    parameters = list(ddp.parameters())
    steppers = [
        OneBitAdam(
            [{"params": [parameters[i] for i in chosen]}], betas=BETAS, freeze_step=2, state=state
        )
        for chosen in optimizers[dist.get_rank()]
    ]
    targets = {w.name: torch.ones(w.shape) for w in WEIGHTS}
    outcomes = []
    for _ in range(4):
        outcome = attempt(lambda: ddp(targets).backward())
        outcomes.append(f"{outcome.error}: {outcome.text}" if outcome.error else "")
        if outcome.error:
            break
        for stepper in steppers:
            stepper.step()
    return outcomes


@pytest.mark.parametrize(
    ("optimizers", "fault"),
    [
        ({0: [[0, 1, 2]], 1: [[0, 1, 2]]}, ""),
        ({0: [[0, 2]], 1: [[0, 2]]}, ""),
        ({0: [[0], [1, 2]], 1: [[0], [1, 2]]}, ""),
        ({0: [[0, 1]], 1: [[2]]}, "rank 0 has no OneBitAdam that holds 'second'"),
        ({0: [[0, 1, 2]], 1: [[]]}, "rank 1 has no OneBitAdam that holds 'first' and 2 more"),
        ({0: [[0], [1, 2]], 1: [[0]]}, "rank 1 has no OneBitAdam that holds 'bias' and 1 more"),
        ({0: [], 1: [[1]]}, "rank 0 has no OneBitAdam that holds 'bias'"),
    ],
)
def test_every_rank_must_hold_the_same_momenta(
    world_of_2: World, optimizers: dict[int, list[list[int]]], fault: str
) -> None:
    one, other = world_of_2.run(case_ranks_that_differ, optimizers=optimizers)
    assert one == other
    if fault:
        assert one[0].startswith(f"StateError: {fault}, unlike another rank"), one
        assert "without ZeroRedundancyOptimizer" in one[0]
    else:
        assert one == [""] * 4


@pytest.mark.torch_core
@pytest.mark.parametrize(("native", "built_at"), [(True, 0), (False, 0), (True, 1)])
def test_a_sharded_optimizer_is_refused_on_all_ranks(
    world_of_3: World, native: bool, built_at: int
) -> None:
    # One parameter for three ranks: two shards are empty.
    outcomes = world_of_3.run(case_sharded, native=native, built_at=built_at)
    assert [o.error for o in outcomes] == ["StateError"] * 3
    assert len({o.text for o in outcomes}) == 1
    assert "has no OneBitAdam that holds 'weight'" in outcomes[0].text


def case_sharded(native: bool, built_at: int) -> Outcome:
    """The first step after the optimizer was built at which ranks compare."""
    ddp = DistributedDataParallel(nn.Linear(40, 40, bias=False))
    state = hooked(ddp, "sign1", native=native, momentum=0.9, warmup_steps=2)

    def backward() -> None:
        ddp(torch.ones(2, 40)).sum().backward()

    for _ in range(built_at):
        backward()
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class=OneBitAdam, freeze_step=2, state=state
    )
    for _ in range(built_at, 2 if built_at else 0):
        backward()
        optimizer.step()
    return attempt(backward)


def case_a_rank_that_does_not_step(resumed: bool) -> list[str]:
    """Rank 1 leaves out its optimizer's step at the freeze; perhaps after a checkpoint."""
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    state, optimizer = one_bit_adam(ddp, freeze=3)
    outcomes = []
    for step in range(5):
        if resumed and step == 2:
            state.load_state_dict(state.state_dict())
        outcome = attempt(lambda: ddp(torch.ones(2, 40)).sum().backward())
        outcomes.append(f"{outcome.error}: {outcome.text}" if outcome.error else "")
        if outcome.error:
            break
        if step < 2 or dist.get_rank() == 0:
            optimizer.step()
    return outcomes


@pytest.mark.parametrize("resumed", [False, True])
def test_a_rank_that_hands_over_no_momentum_stops_all(world_of_2: World, resumed: bool) -> None:
    one, other = world_of_2.run(case_a_rank_that_does_not_step, resumed=resumed)
    assert one == other
    assert one[:3] == [""] * 3
    assert len(one) == 4
    assert one[3].startswith(
        "StateError: rank 1 did not hand over, after step 2, the momentum of 'weight' and 1 more"
    )


def pickled(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled])
@on_ranks(1)
def test_a_copied_optimizer_says_that_it_has_no_hook(copied: Callable[[Any], Any]) -> None:
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    _, optimizer = one_bit_adam(ddp, freeze=2)
    ddp(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    duplicate = copied(optimizer)
    for call in (
        duplicate.step,
        lambda: duplicate.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
    ):
        outcome = attempt(call)
        assert outcome.error == "StateError"
        assert "a copied or pickled OneBitAdam has no hook" in outcome.text
        assert "make a new OneBitAdam" in outcome.text
    saved = duplicate.state_dict()
    duplicate.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    ddp(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    assert repr(duplicate) == repr(optimizer)
    assert len(duplicate.param_groups) == 1
    assert optimizer.state[ddp.module.weight]["step"].item() == 2
