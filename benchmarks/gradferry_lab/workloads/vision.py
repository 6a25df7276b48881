"""Task `tiny_vision`: a convolutional network on Fashion-MNIST, or on scikit-learn's digits."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import torch
from gradferry.errors import ConfigError
from torch import nn

from gradferry_lab.workloads.digits import normalize, read_digits
from gradferry_lab.workloads.task import Batch, Task, in_batches

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # Debian: dataset-fashion-mnist

_NUM_CLASSES = 10
_CHANNELS = 8  # of the first layer
_HIDDEN = 128
_GLOBAL_BATCH = 64
_VALIDATION_BATCH = 250
_TRAINING_IMAGES = 30_000
_VALIDATION_IMAGES = 2_000


class ConvolutionalNetwork(nn.Module):
    """Class scores. Takes float (batch, 1, side, side), gives float (batch, 10)."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, _CHANNELS, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(_CHANNELS, 2 * _CHANNELS, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * _CHANNELS * (side // 4) ** 2, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, _NUM_CLASSES),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(inputs)
        return scores


def load_tiny_vision(folder: Path = FASHION_MNIST_FOLDER) -> Task:
    """Fashion-MNIST's gzipped IDX files from `folder`; where missing, scikit-learn's digits.

    Raises ConfigError when neither is installed, or a file is not what it should be.
    """
    if (folder / "train-images-idx3-ubyte.gz").exists():
        training = _read_fashion_mnist(folder, "train", _TRAINING_IMAGES)
        held_out = _read_fashion_mnist(folder, "t10k", _VALIDATION_IMAGES)
        source = f"Fashion-MNIST from {folder} (first {_TRAINING_IMAGES} training images)"
    else:
        training, held_out = read_digits(
            f"task tiny_vision found no data: neither Fashion-MNIST in {folder} (Debian: apt "
            "install dataset-fashion-mnist) nor scikit-learn's digits"
        )
        source = f"scikit-learn's digits, because {folder} holds no Fashion-MNIST"
    images, labels = training
    side = images.shape[-1]

    def draw(generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(labels), (_GLOBAL_BATCH,), generator=generator)
        return images[chosen], labels[chosen]

    return Task(
        name="tiny_vision",
        source=source,
        metric="nats per image",
        global_batch=_GLOBAL_BATCH,
        default_steps=400,
        learning_rate=8e-3,
        sgd_learning_rate=0.05,
        build_model=lambda: ConvolutionalNetwork(side),
        draw=draw,
        validation=in_batches(*held_out, _VALIDATION_BATCH),
    )


def _read_fashion_mnist(folder: Path, part: str, most_items: int) -> Batch:
    images = _read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3, most_items)
    labels = _read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 1, most_items)
    return normalize(images.float() / 255), labels.long()


def _read_idx(path: Path, num_dimensions: int, most_items: int) -> torch.Tensor:
    """The first `most_items` items of a gzipped IDX file of unsigned bytes, uint8 (items, ...).

    Raises ConfigError when the file is not of that kind or is cut short.
    """
    try:
        with gzip.open(path, "rb") as file:
            kind, *shape = struct.unpack(
                f">{1 + num_dimensions}I", file.read(4 + 4 * num_dimensions)
            )
            shape[0] = min(shape[0], most_items)
            content = file.read(math.prod(shape))
    except (OSError, EOFError, struct.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}; install it again") from error
    if kind != 0x800 + num_dimensions or len(content) < math.prod(shape):
        raise ConfigError(
            f"{path} is no IDX file of bytes in {num_dimensions} dimensions, or is cut short; "
            "install it again"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)
