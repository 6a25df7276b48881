"""What is trained: a model, its data, and the loss that scores it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

# inputs and targets. Targets are int64 class numbers, one per prediction, or what `loss` takes.
Batch = tuple[torch.Tensor, torch.Tensor]
# measure(outputs of the model, targets): a sum over the predictions.
Measure = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """In nats. Scores are float (..., classes), targets class numbers."""
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum")


def correct(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How many predictions name the right class."""
    return (scores.argmax(-1) == targets).sum()


@dataclass(frozen=True)
class Task:
    """A model and its data. The same seed gives the same model and batches on every rank.

    Rank r of W trains on samples r, r + W, ... of every global batch.
    """

    name: str
    source: str  # which data was found, for people
    metric: str  # what the loss counts, with its unit
    global_batch: int  # samples per step over all ranks
    default_steps: int
    learning_rate: float  # of AdamW
    build_model: Callable[[], nn.Module]  # weights from torch's global random generator
    draw: Callable[[torch.Generator], Batch]  # one global batch of training samples
    validation: Sequence[Batch]  # fixed, never trained on
    sgd_learning_rate: float = 0.1  # of SGD with momentum 0.9
    loss: Measure = cross_entropy
    score: Measure = correct  # what people look at beside the loss; a mean over predictions
    score_title: str = "accuracy"
    lowest_loss: float = 0.0  # of the training data, where known; metric counts from there

    def mean_loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of one batch, to call backward() on."""
        inputs, targets = batch
        outputs = model(inputs)
        return self.loss(outputs, targets) / num_predictions(outputs)


def num_predictions(outputs: torch.Tensor) -> int:
    """All dimensions of a model's outputs but the last one count predictions."""
    return outputs.shape[:-1].numel()


def in_batches(inputs: torch.Tensor, targets: torch.Tensor, size: int) -> list[Batch]:
    """Cuts samples into batches of `size`, the last one shorter."""
    starts = range(0, len(targets), size)
    return [(inputs[start : start + size], targets[start : start + size]) for start in starts]
