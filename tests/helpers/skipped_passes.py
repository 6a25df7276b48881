"""Optimizer steps of several synced backward passes each, of which some are skipped."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from scenario import ChosenGradients, Scenario, Weight, hooked, placed
from stepping import slot
from torch.nn.parallel import DistributedDataParallel

SCENARIO = Scenario((Weight("first", (90, 70)), Weight("bias", (50,))))


def residuals(state: Any) -> torch.Tensor:
    held = slot(state)
    return torch.cat([held["worker"], held["owner"]])


class Passes:
    def __init__(self, options: dict[str, Any], device: str = "cpu") -> None:
        self.place, group = placed(device)
        self.scaler = torch.amp.GradScaler(self.place.type, init_scale=8.0)
        self.model = ChosenGradients(SCENARIO).to(self.place)
        self.ddp = DistributedDataParallel(self.model, process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.state = hooked(self.ddp, "sign1", exact_skip=True, grad_scaler=self.scaler, **options)

    def backward(self, step: int, turn: int, *, poison: bool = False) -> None:
        targets = SCENARIO.targets(step, dist.get_rank(), turn)
        if poison and dist.get_rank() == 0:
            targets["bias"][0] = math.inf
        loss = self.ddp({name: target.to(self.place) for name, target in targets.items()})
        self.scaler.scale(loss).backward()

    def step(self, step: int, passes: int = 2) -> None:
        self.model.zero_grad()
        for turn in range(passes):
            self.backward(step, turn)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def residuals(self) -> torch.Tensor:
        """Unscaled; the scales are powers of two."""
        return residuals(self.state) / self.state.state_dict()["loss_scale"]


def case_skipped_passes(
    options: dict[str, Any], poisoned: int | None, *, looked_at: bool, device: str = "cpu"
) -> list[bool]:
    """Which of the steps after two left the residuals as they were: the third is skipped."""
    passes, kept = Passes(options, device), []
    for step in range(5):
        before = passes.residuals() if step else None
        if step != 2:
            passes.step(step, passes=1 + step % 3)
        else:
            passes.model.zero_grad()
            for turn in range(3):
                # Gradients accumulate, so what comes after an infinity holds it, too; zeroed in
                # between it does not.
                passes.backward(step, turn, poison=turn == poisoned)
                passes.model.zero_grad()
                if looked_at:
                    passes.residuals()
            if poisoned is None:
                passes.state.skip_step()
            passes.scaler.update(new_scale=passes.scaler.get_scale() / 2)
        if before is not None:
            kept.append(torch.equal(before, passes.residuals()))
    return kept
