"""Tasks `text` and `small_text`: byte-level causal transformers on the source files of Python's
standard library.
"""

from __future__ import annotations

import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from gradferry.errors import ConfigError
from gradferry.workloads.task import Batch, Task, in_batches

_NUM_BYTES = 256  # the vocabulary: every byte value
_VALIDATION_FILES = 10  # every 10th file is kept for validation
_VALIDATION_WINDOWS = 256
_VALIDATION_BATCH = 32
_FEWEST_BYTES = 200_000  # below this the text is not a standard library


@dataclass(frozen=True)
class Size:
    """Of a transformer."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128  # bytes a prediction may look back on


class Transformer(nn.Module):
    """Scores for the next byte: int64 (batch, time <= context) in, float (batch, time, 256) out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_NUM_BYTES, size.width)
        self.position = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        self.blocks = nn.Sequential(*(_Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, _NUM_BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs) + self.position[: inputs.shape[1]]
        scores: torch.Tensor = self.head(self.norm(self.blocks(hidden)))
        return scores


class _Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron; each normed before and added after.

    What is added is 0 at first: training gets further in few steps than from random outputs.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = _zero_linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            _zero_linear(4 * width, width),
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


def _zero_linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    linear = nn.Linear(num_inputs, num_outputs, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


def load_text(folder: Path | None = None) -> Task:
    """Reads the .py files directly in `folder` (default: Python's standard library).

    Raises ConfigError when there is too little text.
    """
    return _load("text", folder, Size(), global_batch=16, default_steps=400)


def load_small_text(folder: Path | None = None) -> Task:
    """The same text for a model of half the size and windows of half the length: hundreds of
    trainings of it fit into an hour.
    """
    size = Size(layers=2, context=64)
    return _load("small_text", folder, size, global_batch=16, default_steps=400)


def _load(
    name: str, folder: Path | None, size: Size, *, global_batch: int, default_steps: int
) -> Task:
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    texts = [file.read_bytes() for file in files]
    training = _as_tensor(b"".join(t for i, t in enumerate(texts) if not _is_validation(i)))
    held_out = _as_tensor(b"".join(t for i, t in enumerate(texts) if _is_validation(i)))
    if len(training) + len(held_out) < _FEWEST_BYTES:
        raise ConfigError(
            f"task {name} trains on the .py files of Python's standard library, and {folder} holds "
            f"only {len(training) + len(held_out)} bytes of them: install Python with its library "
            f"sources, or use --task vision"
        )
    megabytes = (len(training) + len(held_out)) / 1e6

    def draw(generator: torch.Generator) -> Batch:
        starts = torch.randint(len(training) - size.context, (global_batch,), generator=generator)
        return _windows(training, starts, size.context)

    return Task(
        name=name,
        source=f"{len(files)} source files ({megabytes:.1f} MB) of the standard library of "
        f"Python {platform.python_version()}",
        metric="nats per byte",
        global_batch=global_batch,
        default_steps=default_steps,
        learning_rate=2e-3,
        sgd_learning_rate=0.2,
        build_model=lambda: Transformer(size),
        draw=draw,
        validation=_validation_batches(held_out, size.context),
    )


def _is_validation(index: int) -> bool:
    return index % _VALIDATION_FILES == _VALIDATION_FILES - 1


def _as_tensor(text: bytes) -> torch.Tensor:
    if not text:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> Batch:
    """Inputs and targets, int64 (number of starts, length): each target is the byte that follows
    its input.
    """
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _validation_batches(text: torch.Tensor, length: int) -> list[Batch]:
    starts = torch.linspace(0, len(text) - length - 1, _VALIDATION_WINDOWS).long()
    return in_batches(*_windows(text, starts, length), _VALIDATION_BATCH)
