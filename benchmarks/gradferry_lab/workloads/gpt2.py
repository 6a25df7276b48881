"""Task `gpt2_small`: the network of GPT-2 small (Radford et al. 2019), 124 M parameters, on source
code (`corpus`).

GPT-2's vocabulary cannot be had without a download. One of the same size stands in: the 256 bytes,
and the 50,001 pieces of the text that save most tokens, where a piece is a word, a number, a run of
blanks or of other signs, with the blank before it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from gradferry_lab.workloads.corpus import SYMPY_VERSION, source_files
from gradferry_lab.workloads.task import Task
from gradferry_lab.workloads.text import Added, Block, TextSize, draw, split, validation_batches

_VOCABULARY, _POSITIONS, _LAYERS = 50257, 1024, 12
_SIZE = TextSize(
    context=256,  # tokens of a sample, of 1024 that the network can take
    width=768,
    layers=_LAYERS,
    heads=12,
    global_batch=32,
    learning_rate=6e-4,
    validation_windows=128,
)
_VALIDATION_BATCH = 8  # scores of more would take gigabytes
_PIECE = re.compile(rb" ?[A-Za-z_]+| ?[0-9]+|\s+| ?[^\sA-Za-z_0-9]+")


class Gpt2(nn.Module):
    """Scores for the next token: int64 (batch, time <= 1024) in, float (batch, time, 50257) out."""

    def __init__(self) -> None:
        super().__init__()
        width, heads = _SIZE.width, _SIZE.heads
        self.embedding = nn.Embedding(_VOCABULARY, width)  # also of the output, as in GPT-2
        self.position = nn.Embedding(_POSITIONS, width)
        blocks = (Block(width, heads, bias=True, approximate="tanh") for _ in range(_LAYERS))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.apply(_initialize)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        times = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.blocks(self.embedding(inputs) + self.position(times))
        return functional.linear(self.norm(hidden), self.embedding.weight)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        scale = (2 * _LAYERS) ** -0.5 if isinstance(module, Added) else 1.0
        nn.init.normal_(module.weight, std=0.02 * scale)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def load_gpt2_small() -> Task:
    """GPT-2 small on the corpus. Raises ConfigError as `source_files` does."""
    pieces = [_PIECE.findall(file) for file in source_files()]
    numbers = _vocabulary(piece for file in pieces for piece in file)
    training, held_out = (_tokens(part, numbers) for part in split(pieces))
    millions = (len(training) + len(held_out)) / 1e6
    return Task(
        name="gpt2_small",
        source=f"{len(pieces)} source files ({millions:.1f} M tokens) of sympy {SYMPY_VERSION}",
        metric="nats per token",
        global_batch=_SIZE.global_batch,
        default_steps=300,
        learning_rate=_SIZE.learning_rate,
        build_model=Gpt2,
        draw=lambda generator: draw(training, _SIZE, generator),
        validation=validation_batches(held_out, _SIZE, _VALIDATION_BATCH),
    )


def _vocabulary(pieces: Iterable[bytes]) -> dict[bytes, int]:
    """Numbers of the pieces that are one token. Every single byte is."""
    counts = Counter(piece for piece in pieces if len(piece) > 1)
    saved = sorted(counts, key=lambda piece: (-counts[piece] * (len(piece) - 1), piece))
    singles = [bytes([byte]) for byte in range(256)]
    kept = singles + saved[: _VOCABULARY - len(singles)]
    return {piece: number for number, piece in enumerate(kept)}


def _tokens(files: Iterable[list[bytes]], numbers: dict[bytes, int]) -> torch.Tensor:
    found: list[int] = []
    for file in files:
        for piece in file:
            number = numbers.get(piece)
            found.extend(piece if number is None else (number,))
    return torch.tensor(found)
