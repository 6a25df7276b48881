"""Models as a user writes them for `--model own_models:FUNCTION`, good ones and bad ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(300, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


class Stubborn(WithLoss):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ArithmeticError("not today")
        return super().forward(x)


def tensors():
    return WithLoss(), lambda: (torch.randn(4, 300),)


def words():
    return WithLoss(), lambda: {"x": torch.randn(4, 300)}


def scores():
    return nn.Linear(300, 2), lambda: (torch.randn(4, 300),)


def bare():
    return WithLoss(), lambda: torch.randn(4, 300)


def fails():
    return Stubborn(), lambda: (torch.randn(4, 300),)


def nothing():
    return None
