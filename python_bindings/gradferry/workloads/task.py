"""What is trained: a model, its data, and the loss that scores it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

# inputs, and targets: int64 class numbers, one per prediction.
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model and its data. The same seed gives the same model and batches on every rank."""

    name: str
    source: str  # which data was found, for people
    metric: str  # what the loss counts, with its unit
    global_batch: int  # samples per step over all ranks
    default_steps: int
    learning_rate: float
    build_model: Callable[[], nn.Module]  # weights from torch's global random generator
    draw: Callable[[torch.Generator], Batch]  # one global batch of training samples
    validation: Sequence[Batch]  # fixed, never trained on


def sum_of_losses(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """Cross entropy of one batch, in nats: the sum over its predictions, and their number."""
    inputs, targets = batch
    scores: torch.Tensor = model(inputs)
    loss = functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum")
    return loss, targets.numel()


def in_batches(inputs: torch.Tensor, targets: torch.Tensor, size: int) -> list[Batch]:
    """Cuts samples into batches of `size`, the last one shorter."""
    starts = range(0, len(targets), size)
    return [(inputs[start : start + size], targets[start : start + size]) for start in starts]
