"""Task `digits`: a perceptron on scikit-learn's images of handwritten digits."""

from __future__ import annotations

import importlib

import torch
from gradferry.errors import ConfigError
from torch import nn

from gradferry_lab.workloads.task import Batch, Task, in_batches

_NUM_CLASSES = 10
_SIDE = 8
_WIDTH = 128
_GLOBAL_BATCH = 64
_VALIDATION_BATCH = 90
_VALIDATION_SHARE = 5  # every 5th image is kept for validation


class Perceptron(nn.Module):
    """Class scores. Takes float (batch, 1, 8, 8), gives float (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(_SIDE * _SIDE, _WIDTH),
            nn.ReLU(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.ReLU(),
            nn.Linear(_WIDTH, _NUM_CLASSES),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(inputs)
        return scores


def load_digits() -> Task:
    """Raises ConfigError when scikit-learn is not installed."""
    (images, labels), held_out = read_digits("task digits needs scikit-learn")

    def draw(generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(labels), (_GLOBAL_BATCH,), generator=generator)
        return images[chosen], labels[chosen]

    return Task(
        name="digits",
        source=f"scikit-learn's digits ({len(labels)} training images)",
        metric="nats per image",
        global_batch=_GLOBAL_BATCH,
        default_steps=300,
        learning_rate=8e-3,
        sgd_learning_rate=0.1,
        build_model=Perceptron,
        draw=draw,
        validation=in_batches(*held_out, _VALIDATION_BATCH),
    )


def read_digits(without: str) -> tuple[Batch, Batch]:
    """Training and validation images, float (items, 1, 8, 8), and labels.

    Raises ConfigError, starting with the text `without`, when scikit-learn is not installed.
    """
    try:
        digits = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError:
        raise ConfigError(f"{without} (pip install scikit-learn)") from None
    images = normalize(torch.from_numpy(digits.images).float() / 16)
    labels = torch.from_numpy(digits.target).long()
    kept = torch.arange(len(labels)) % _VALIDATION_SHARE == _VALIDATION_SHARE - 1
    return (images[~kept], labels[~kept]), (images[kept], labels[kept])


def normalize(images: torch.Tensor) -> torch.Tensor:
    """(items, side, side) in 0..1 -> (items, 1, side, side) with mean 0 and deviation 1."""
    return ((images - images.mean()) / images.std()).unsqueeze(1)
