"""Tasks on images: `digits`, a perceptron on scikit-learn's handwritten digits, and `tiny_vision`,
a convolutional network on Fashion-MNIST, or on these digits.
"""

from __future__ import annotations

import gzip
import importlib
import math
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from gradferry.errors import ConfigError
from torch import nn

from gradferry_lab.workloads.task import Batch, Task, in_batches

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # Debian: dataset-fashion-mnist

_NUM_CLASSES = 10
_DIGITS_SIDE = 8
_CHANNELS = 8  # of the first convolution
_HIDDEN = 128
_GLOBAL_BATCH = 64
_VALIDATION_SHARE = 5  # every 5th of the digits is kept for validation
_TRAINING_IMAGES = 30_000
_VALIDATION_IMAGES = 2_000


def perceptron() -> nn.Module:
    """Class scores. Takes float (batch, 1, 8, 8), gives float (batch, 10)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(_DIGITS_SIDE**2, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _NUM_CLASSES),
    )


def convolutional_network(side: int) -> nn.Module:
    """Class scores. Takes float (batch, 1, side, side), gives float (batch, 10)."""
    return nn.Sequential(
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


def load_digits() -> Task:
    """Raises ConfigError when scikit-learn is not installed."""
    training, held_out = _read_digits("task digits needs scikit-learn")
    return _task(
        "digits",
        f"scikit-learn's digits ({len(training[1])} training images)",
        training,
        in_batches(*held_out, 90),
        perceptron,
        default_steps=300,
        sgd_learning_rate=0.1,
    )


def load_tiny_vision(folder: Path = FASHION_MNIST_FOLDER) -> Task:
    """Fashion-MNIST's gzipped IDX files from `folder`; where missing, scikit-learn's digits.

    Raises ConfigError when neither is installed, or a file is not what it should be.
    """
    if (folder / "train-images-idx3-ubyte.gz").exists():
        training = _read_fashion_mnist(folder, "train", _TRAINING_IMAGES)
        held_out = _read_fashion_mnist(folder, "t10k", _VALIDATION_IMAGES)
        source = f"Fashion-MNIST from {folder} (first {_TRAINING_IMAGES} training images)"
    else:
        training, held_out = _read_digits(
            f"task tiny_vision found no data: neither Fashion-MNIST in {folder} (Debian: apt "
            "install dataset-fashion-mnist) nor scikit-learn's digits"
        )
        source = f"scikit-learn's digits, because {folder} holds no Fashion-MNIST"
    return _task(
        "tiny_vision",
        source,
        training,
        in_batches(*held_out, 250),
        lambda: convolutional_network(training[0].shape[-1]),
        default_steps=400,
        sgd_learning_rate=0.05,
    )


def _task(
    name: str,
    source: str,
    training: Batch,
    validation: list[Batch],
    build_model: Callable[[], nn.Module],
    *,
    default_steps: int,
    sgd_learning_rate: float,
) -> Task:
    images, labels = training

    def draw(generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(labels), (_GLOBAL_BATCH,), generator=generator)
        return images[chosen], labels[chosen]

    return Task(
        name=name,
        source=source,
        metric="nats per image",
        global_batch=_GLOBAL_BATCH,
        default_steps=default_steps,
        learning_rate=8e-3,
        sgd_learning_rate=sgd_learning_rate,
        build_model=build_model,
        draw=draw,
        validation=validation,
    )


def _read_digits(without: str) -> tuple[Batch, Batch]:
    """Training and validation images, float (items, 1, 8, 8), and labels.

    Raises ConfigError, starting with the text `without`, when scikit-learn is not installed.
    """
    try:
        digits = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError:
        raise ConfigError(f"{without} (pip install scikit-learn)") from None
    images = _normalize(torch.from_numpy(digits.images).float() / 16)
    labels = torch.from_numpy(digits.target).long()
    kept = torch.arange(len(labels)) % _VALIDATION_SHARE == _VALIDATION_SHARE - 1
    return (images[~kept], labels[~kept]), (images[kept], labels[kept])


def _normalize(images: torch.Tensor) -> torch.Tensor:
    """(items, side, side) in 0..1 -> (items, 1, side, side) with mean 0 and deviation 1."""
    return ((images - images.mean()) / images.std()).unsqueeze(1)


def _read_fashion_mnist(folder: Path, part: str, most_items: int) -> Batch:
    images = _read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3, most_items)
    labels = _read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 1, most_items)
    return _normalize(images.float() / 255), labels.long()


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
