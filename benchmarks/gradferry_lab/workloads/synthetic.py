"""Tasks on data made from random numbers, so that nothing need be installed.

Both can be learned: images are noisy copies of ten patterns; a tuple of ids has the class of its
first id, which a hidden table holds.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gradferry_lab.workloads.task import Batch, Task, in_batches

_NUM_CLASSES = 10
_HIDDEN_SEED = 1234  # of patterns and tables: the same for every run
_VALIDATION_SEED = 4321

_SIDE = 32
_VGG_WIDTHS = (
    (64,),
    (128,),
    (256, 256),
    (512, 512),
    (512, 512),
)  # by resolution, halved after each
_VGG_HIDDEN = 1024
_IMAGES_PER_RANK = 4
_NOISE = 2.0

_NUM_IDS = 200_000
_ID_WIDTH = 64
_IDS_PER_SAMPLE = 8
_PERCEPTRON_HIDDEN = 256
_SAMPLES_PER_RANK = 256
_ID_SKEW = 6.0  # ids are drawn as u^6: few are frequent, most are rare


class VggNetwork(nn.Module):
    """Convolutions as in VGG-11 (Simonyan and Zisserman 2014), for float (batch, 3, 32, 32)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for widths in _VGG_WIDTHS:
            for width in widths:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        layers += [nn.Flatten(), nn.Linear(channels, _VGG_HIDDEN), nn.ReLU()]
        layers.append(nn.Linear(_VGG_HIDDEN, _NUM_CLASSES))
        self.layers = nn.Sequential(*layers)
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images)
        return scores


class EmbeddingNetwork(nn.Module):
    """A perceptron on the embeddings of int64 (batch, 8) ids: little to compute, much to send."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_NUM_IDS, _ID_WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(_IDS_PER_SAMPLE * _ID_WIDTH, _PERCEPTRON_HIDDEN),
            nn.ReLU(),
            nn.Linear(_PERCEPTRON_HIDDEN, _NUM_CLASSES),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(self.embedding(ids).flatten(1))
        return scores


def load_vgg(num_ranks: int) -> Task:
    """VggNetwork on noisy copies of ten patterns, 4 images per rank."""
    hidden = torch.Generator().manual_seed(_HIDDEN_SEED)
    # Coarse patterns: convolutions and pooling see them through the noise.
    coarse = torch.randn(_NUM_CLASSES, 3, _SIDE // 8, _SIDE // 8, generator=hidden)
    patterns = functional.interpolate(coarse, size=(_SIDE, _SIDE), mode="nearest")

    def draw(generator: torch.Generator, count: int = _IMAGES_PER_RANK * num_ranks) -> Batch:
        labels = torch.randint(_NUM_CLASSES, (count,), generator=generator)
        noise = torch.randn(count, 3, _SIDE, _SIDE, generator=generator)
        return patterns[labels] + _NOISE * noise, labels

    held_out = draw(torch.Generator().manual_seed(_VALIDATION_SEED), 256)
    return Task(
        name="vgg",
        source="noisy copies of ten random patterns",
        metric="nats per image",
        global_batch=_IMAGES_PER_RANK * num_ranks,
        default_steps=400,
        learning_rate=1e-4,
        build_model=VggNetwork,
        draw=draw,
        validation=in_batches(*held_out, 32),
    )


def load_embedding(num_ranks: int) -> Task:
    """EmbeddingNetwork on ids whose classes a hidden table holds, 256 samples per rank."""
    hidden = torch.Generator().manual_seed(_HIDDEN_SEED)
    classes = torch.randint(_NUM_CLASSES, (_NUM_IDS,), generator=hidden)

    def draw(generator: torch.Generator, count: int = _SAMPLES_PER_RANK * num_ranks) -> Batch:
        uniform = torch.rand(count, _IDS_PER_SAMPLE, generator=generator)
        ids = (uniform**_ID_SKEW * _NUM_IDS).long()
        return ids, classes[ids[:, 0]]

    held_out = draw(torch.Generator().manual_seed(_VALIDATION_SEED), 4096)
    return Task(
        name="embedding",
        source="random ids, labelled by a hidden table",
        metric="nats per sample",
        global_batch=_SAMPLES_PER_RANK * num_ranks,
        default_steps=400,
        learning_rate=1e-3,
        build_model=EmbeddingNetwork,
        draw=draw,
        validation=in_batches(*held_out, 512),
    )
