"""Task `text`: a byte-level causal transformer on the source files of Python's standard library."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from gradferry.errors import ConfigError
from gradferry.workloads.task import Batch, Task, in_batches

_NUM_BYTES = 256  # the vocabulary: every byte value
_CONTEXT = 128  # bytes a prediction may look back on
_WIDTH = 128
_LAYERS = 4
_HEADS = 4
_GLOBAL_BATCH = 16  # windows of 128 bytes
_VALIDATION_FILES = 10  # every 10th file is kept for validation
_VALIDATION_WINDOWS = 256
_VALIDATION_BATCH = 32
_FEWEST_BYTES = 200_000  # below this the text is not a standard library


class Transformer(nn.Module):
    """Scores for the next byte: int64 (batch, time <= 128) in, float (batch, time, 256) out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_NUM_BYTES, _WIDTH)
        self.position = nn.Parameter(torch.randn(_CONTEXT, _WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(_Block() for _ in range(_LAYERS)))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _NUM_BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs) + self.position[: inputs.shape[1]]
        scores: torch.Tensor = self.head(self.norm(self.blocks(hidden)))
        return scores


class _Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron; each normed before and added after.

    What is added is 0 at first: training gets further in few steps than from random outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.attention_out = _zero_linear(_WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, 4 * _WIDTH),
            nn.GELU(),
            _zero_linear(4 * _WIDTH),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden))
        result: torch.Tensor = hidden + self.perceptron(hidden)
        return result

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, time, width = hidden.shape
        heads = self.query_key_value(hidden).view(batch, time, 3, _HEADS, width // _HEADS)
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = self.attention_out(mixed.transpose(1, 2).reshape(hidden.shape))
        return result


def _zero_linear(num_inputs: int) -> nn.Linear:
    linear = nn.Linear(num_inputs, _WIDTH, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


def load_text(folder: Path | None = None) -> Task:
    """Reads the .py files directly in `folder` (default: Python's standard library).

    Raises ConfigError when there is too little text.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    texts = [file.read_bytes() for file in files]
    training = _as_tensor(b"".join(t for i, t in enumerate(texts) if not _is_validation(i)))
    held_out = _as_tensor(b"".join(t for i, t in enumerate(texts) if _is_validation(i)))
    if len(training) + len(held_out) < _FEWEST_BYTES:
        raise ConfigError(
            f"task text trains on the .py files of Python's standard library, and {folder} holds "
            f"only {len(training) + len(held_out)} bytes of them: install Python with its library "
            f"sources, or use --task vision"
        )
    megabytes = (len(training) + len(held_out)) / 1e6
    return Task(
        name="text",
        source=f"{len(files)} source files ({megabytes:.1f} MB) of the standard library of "
        f"Python {platform.python_version()}",
        metric="nats per byte",
        global_batch=_GLOBAL_BATCH,
        default_steps=400,
        learning_rate=2e-3,
        build_model=Transformer,
        draw=lambda generator: _draw(training, generator),
        validation=_validation_batches(held_out),
    )


def _is_validation(index: int) -> bool:
    return index % _VALIDATION_FILES == _VALIDATION_FILES - 1


def _as_tensor(text: bytes) -> torch.Tensor:
    if not text:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor) -> Batch:
    """Inputs and targets, int64 (number of starts, 128): each target is the byte that follows."""
    windows = text[starts[:, None] + torch.arange(_CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _draw(text: torch.Tensor, generator: torch.Generator) -> Batch:
    starts = torch.randint(len(text) - _CONTEXT, (_GLOBAL_BATCH,), generator=generator)
    return _windows(text, starts)


def _validation_batches(text: torch.Tensor) -> list[Batch]:
    starts = torch.linspace(0, len(text) - _CONTEXT - 1, _VALIDATION_WINDOWS).long()
    return in_batches(*_windows(text, starts), _VALIDATION_BATCH)
