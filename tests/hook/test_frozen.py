"""Parameters that are frozen, unfrozen or replaced after DDP took those it reduces."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outcomes import Outcome, attempt
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 40)
        self.second = nn.Linear(40, 40)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def step(ddp: DistributedDataParallel) -> list[torch.Tensor | None]:
    """Gradients are small multiples of 1/2: their average over two ranks is exact."""
    ddp.zero_grad()
    ddp(torch.full((2, 40), 1.0 + dist.get_rank())).sum().backward()
    return [p.grad for p in ddp.module.parameters()]


def case_frozen(attached: bool, when: str) -> dict[str, Any]:
    """Gradients of five steps; the first layer is frozen at attach, to step 3, or from 1 to 3."""
    import gradferry

    model = TwoLayers()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    if when.startswith("before attach"):
        model.first.requires_grad_(False)
    state = gradferry.attach(ddp, "exact") if attached else None
    gradients = []
    for number in range(5):
        if when == "in training" and number == 1:
            model.first.requires_grad_(False)
        if when != "before attach" and number == 3:
            model.first.requires_grad_(True)
        gradients.append(step(ddp))
    if state is not None:
        state.load_state_dict(state.state_dict())
    return {"gradients": gradients, "steps": state and state.stats()["steps"]}


@pytest.mark.parametrize("when", ["before attach", "before attach, to step 3", "in training"])
def test_frozen_layer_changes_nothing_for_the_others(world_of_2: World, when: str) -> None:
    plain = world_of_2.run(case_frozen, attached=False, when=when)
    for answer, expected in zip(
        world_of_2.run(case_frozen, attached=True, when=when), plain, strict=True
    ):
        assert answer["steps"] == 5
        for got, want in zip(answer["gradients"], expected["gradients"], strict=True):
            for one, other in zip(got, want, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)


def case_unfrozen() -> tuple[list[str], int, list[torch.Tensor | None]]:
    import gradferry

    model = TwoLayers()
    model.first.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model.first.requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = gradferry.attach(ddp, "q4")
    step(ddp)
    gradients = step(ddp)
    state.load_state_dict(state.state_dict())
    return [str(w.message) for w in caught], state.stats()["steps"], gradients


def test_unfrozen_layer_is_warned_about_and_left_to_itself(world_of_2: World) -> None:
    answers = world_of_2.run(case_unfrozen)
    for rank, (texts, steps, gradients) in enumerate(answers):
        (text,) = [text for text in texts if "does not reduce" in text]
        assert "the gradients of 'first.weight' and 1 more" in text
        assert "wrap the model after the last change" in text
        assert steps == 2
        # Two samples of 1 + rank, through 40 weights of 1/2.
        assert torch.equal(gradients[0], torch.full((40, 40), 2 * (1.0 + rank) * 20))
        assert torch.equal(gradients[3], torch.full((40,), 2.0))


def case_replaced(rank: int) -> Outcome:
    import gradferry

    model = TwoLayers()
    ddp = DistributedDataParallel(model)
    if dist.get_rank() == rank:
        model.first.weight = nn.Parameter(torch.zeros(40, 40))
    return attempt(lambda: gradferry.attach(ddp, "q4"))


def test_replaced_parameter_is_refused_on_all_ranks(world_of_2: World) -> None:
    for outcome in world_of_2.run(case_replaced, rank=1):
        assert outcome.error == "ConfigError"
        assert (
            "rank 1: DistributedDataParallel reduces a parameter of shape (40, 40)" in outcome.text
        )
