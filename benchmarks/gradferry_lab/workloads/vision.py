"""Tasks `vision` and `tiny_vision`: small convolutional networks on Fashion-MNIST, or on
scikit-learn's digits.
"""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from gradferry.errors import ConfigError
from torch import nn

from gradferry_lab.workloads.digits import normalize, read_digits
from gradferry_lab.workloads.task import Batch, Task, in_batches

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # Debian: dataset-fashion-mnist

_NUM_CLASSES = 10
_GLOBAL_BATCH = 64
_VALIDATION_BATCH = 250
_TRAINING_IMAGES = 30_000
_VALIDATION_IMAGES = 2_000


@dataclass(frozen=True)
class VisionSize:
    """How large the network is, and the learning rates that suit it."""

    first_channels: int
    second_channels: int
    hidden: int
    learning_rate: float
    sgd_learning_rate: float


SMALL = VisionSize(
    first_channels=32, second_channels=64, hidden=128, learning_rate=1e-3, sgd_learning_rate=0.02
)
# Hundreds of trainings of this one fit into an hour.
TINY = VisionSize(
    first_channels=8, second_channels=16, hidden=128, learning_rate=8e-3, sgd_learning_rate=0.05
)


class ConvolutionalNetwork(nn.Module):
    """Class scores. Takes float (batch, 1, side, side), gives float (batch, 10)."""

    def __init__(self, side: int, size: VisionSize) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, size.first_channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(size.first_channels, size.second_channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(size.second_channels * (side // 4) ** 2, size.hidden),
            nn.ReLU(),
            nn.Linear(size.hidden, _NUM_CLASSES),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(inputs)
        return scores


def load_tiny_vision() -> Task:
    """Task `vision` for a quarter of the model. Raises ConfigError as load_vision does."""
    return load_vision(size=TINY, name="tiny_vision")


def load_vision(
    folder: Path = FASHION_MNIST_FOLDER, size: VisionSize = SMALL, name: str = "vision"
) -> Task:
    """Fashion-MNIST's gzipped IDX files from `folder`; where missing, scikit-learn's digits.

    Raises ConfigError when neither is installed, or a file is not what it should be.
    """
    if (folder / "train-images-idx3-ubyte.gz").exists():
        training = _read_fashion_mnist(folder, "train", _TRAINING_IMAGES)
        held_out = _read_fashion_mnist(folder, "t10k", _VALIDATION_IMAGES)
        source = f"Fashion-MNIST from {folder} (first {_TRAINING_IMAGES} training images)"
    else:
        training, held_out = read_digits(
            f"task {name} found no data: neither Fashion-MNIST in {folder} (Debian: apt install "
            f"dataset-fashion-mnist) nor scikit-learn's digits"
        )
        source = f"scikit-learn's digits, because {folder} holds no Fashion-MNIST"
    images, labels = training
    side = images.shape[-1]

    def draw(generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(labels), (_GLOBAL_BATCH,), generator=generator)
        return images[chosen], labels[chosen]

    return Task(
        name=name,
        source=source,
        metric="nats per image",
        global_batch=_GLOBAL_BATCH,
        default_steps=400,
        learning_rate=size.learning_rate,
        sgd_learning_rate=size.sgd_learning_rate,
        build_model=lambda: ConvolutionalNetwork(side, size),
        draw=draw,
        validation=in_batches(*held_out, _VALIDATION_BATCH),
    )


def read_idx(path: Path, most_items: int) -> torch.Tensor:
    """The first `most_items` items of a gzipped IDX file of unsigned bytes, uint8 (items, ...).

    Raises ConfigError when the file is not of that kind or is cut short.
    """
    try:
        with gzip.open(path, "rb") as file:
            start = file.read(4)
            if len(start) < 4 or start[:3] != b"\0\0\x08":
                raise ConfigError(f"{path} is no IDX file of unsigned bytes: it starts {start!r}")
            num_dimensions = start[3]
            shape = list(struct.unpack(f">{num_dimensions}I", file.read(4 * num_dimensions)))
            shape[0] = min(shape[0], most_items)
            content = file.read(torch.Size(shape).numel())
    except (OSError, EOFError, struct.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}; install it again") from error
    if len(content) < torch.Size(shape).numel():
        raise ConfigError(f"{path} is cut short at {len(content)} bytes; install it again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)


def _read_fashion_mnist(folder: Path, part: str, most_items: int) -> Batch:
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz", most_items)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz", most_items)
    return normalize(images.float() / 255), labels.long()
