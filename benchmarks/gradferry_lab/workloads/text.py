"""Tasks `text`, `tiny_text` and `text_10m`: byte-level causal transformers on source code, which
`corpus` has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from gradferry_lab.workloads.corpus import SYMPY_VERSION, source_files
from gradferry_lab.workloads.task import Batch, Task, in_batches

_NUM_BYTES = 256  # the vocabulary: every byte value
_VALIDATION_FILES = 10  # every 10th file is kept for validation
_VALIDATION_BATCH = 32


@dataclass(frozen=True)
class TextSize:
    """How large the model is, and how much text it sees."""

    context: int  # bytes a prediction may look back on
    width: int
    layers: int
    heads: int
    global_batch: int  # windows of `context` bytes per step, over all ranks
    learning_rate: float
    validation_windows: int


SMALL = TextSize(
    context=128,
    width=128,
    layers=4,
    heads=4,
    global_batch=16,
    learning_rate=2e-3,
    validation_windows=256,
)

# Hundreds of trainings of this one fit into an hour.
TINY = TextSize(
    context=64,
    width=128,
    layers=2,
    heads=4,
    global_batch=16,
    learning_rate=2e-3,
    validation_windows=256,
)


# 10.9 M parameters, of which all but 2 % are in blocks, as in models that people train.
TEN_MILLION = TextSize(
    context=128,
    width=384,
    layers=6,
    heads=6,
    global_batch=32,
    learning_rate=1e-3,
    validation_windows=512,
)


class Transformer(nn.Module):
    """Scores for the next byte: int64 (batch, time <= context) in, float (batch, time, 256) out."""

    def __init__(self, size: TextSize = SMALL) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_NUM_BYTES, size.width)
        self.position = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, _NUM_BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs) + self.position[: inputs.shape[1]]
        scores: torch.Tensor = self.head(self.norm(self.blocks(hidden)))
        return scores


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron; each normed before and added after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = _from_zero(nn.Linear(width, width, bias=False))
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            _from_zero(nn.Linear(4 * width, width, bias=False)),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden))
        result: torch.Tensor = hidden + self.perceptron(hidden)
        return result

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, time, width = hidden.shape
        heads = self.query_key_value(hidden).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = self.attention_out(mixed.transpose(1, 2).reshape(hidden.shape))
        return result


def _from_zero(linear: nn.Linear) -> nn.Linear:
    """What a block adds is 0 at first: training gets further in few steps than from random
    outputs.
    """
    nn.init.zeros_(linear.weight)
    return linear


def load_text(size: TextSize = SMALL, name: str = "text") -> Task:
    """A transformer of that size on the corpus. Raises ConfigError as `source_files` does."""
    files, last = source_files(), _VALIDATION_FILES - 1
    kept = files[last::_VALIDATION_FILES]
    others = [file for i, file in enumerate(files) if i % _VALIDATION_FILES != last]
    training, held_out = (
        torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in (others, kept)
    )
    megabytes = (len(training) + len(held_out)) / 1e6
    # Windows at equal distances.
    starts = torch.linspace(0, len(held_out) - size.context - 1, size.validation_windows).long()

    def draw(generator: torch.Generator) -> Batch:
        last = len(training) - size.context
        starts = torch.randint(last, (size.global_batch,), generator=generator)
        return _windows(training, starts, size.context)

    return Task(
        name=name,
        source=f"{len(files)} source files ({megabytes:.1f} MB) of sympy {SYMPY_VERSION}",
        metric="nats per byte",
        global_batch=size.global_batch,
        default_steps=400,
        learning_rate=size.learning_rate,
        sgd_learning_rate=0.025,
        build_model=lambda: Transformer(size),
        draw=draw,
        validation=in_batches(*_windows(held_out, starts, size.context), _VALIDATION_BATCH),
    )


def _windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> Batch:
    """Inputs and targets, int64 (number of starts, context): a target is what follows."""
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
