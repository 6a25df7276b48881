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
from gradferry_lab.workloads.task import Batch, Task, in_batches

_VOCABULARY, _CONTEXT, _WIDTH, _LAYERS, _HEADS = 50257, 1024, 768, 12, 12
_WINDOW = 256  # tokens of a training sample
_GLOBAL_BATCH = 32  # windows per step, over all ranks
_VALIDATION_WINDOWS = 128
_VALIDATION_FILES = 10  # every 10th file is kept for validation
_PIECE = re.compile(rb" ?[A-Za-z_]+| ?[0-9]+|\s+| ?[^\sA-Za-z_0-9]+")


class Gpt2(nn.Module):
    """Scores for the next token: int64 (batch, time <= 1024) in, float (batch, time, 50257) out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)  # also of the output, as in GPT-2
        self.position = nn.Embedding(_CONTEXT, _WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(_LAYERS)))
        self.norm = nn.LayerNorm(_WIDTH)
        self.apply(_initialize)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        times = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.blocks(self.embedding(inputs) + self.position(times))
        return functional.linear(self.norm(hidden), self.embedding.weight)


class _Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron; each normed before and added after."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.attention_out = _Last(_WIDTH, _WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, 4 * _WIDTH),
            nn.GELU(approximate="tanh"),
            _Last(4 * _WIDTH, _WIDTH),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, time, width = hidden.shape
        normed = self.attention_norm(hidden)
        heads = self.query_key_value(normed).view(batch, time, 3, _HEADS, width // _HEADS)
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(hidden.shape))
        result: torch.Tensor = hidden + self.perceptron(hidden)
        return result


class _Last(nn.Linear):
    """Gives what is added: smaller at first, the more of them there are."""


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        scale = (2 * _LAYERS) ** -0.5 if isinstance(module, _Last) else 1.0
        nn.init.normal_(module.weight, std=0.02 * scale)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def load_gpt2_small() -> Task:
    """GPT-2 small on the corpus. Raises ConfigError as `source_files` does."""
    pieces = [_PIECE.findall(file) for file in source_files()]
    numbers = _vocabulary(piece for file in pieces for piece in file)
    training = _tokens((file for i, file in enumerate(pieces) if not _is_validation(i)), numbers)
    held_out = _tokens((file for i, file in enumerate(pieces) if _is_validation(i)), numbers)
    starts = torch.linspace(0, len(held_out) - _WINDOW - 1, _VALIDATION_WINDOWS).long()
    millions = (len(training) + len(held_out)) / 1e6
    return Task(
        name="gpt2_small",
        source=f"{len(pieces)} source files ({millions:.1f} M tokens) of sympy {SYMPY_VERSION}",
        metric="nats per token",
        global_batch=_GLOBAL_BATCH,
        default_steps=300,
        learning_rate=6e-4,
        build_model=Gpt2,
        draw=lambda generator: _draw(training, generator),
        validation=in_batches(*_windows(held_out, starts), 8),
    )


def _is_validation(index: int) -> bool:
    return index % _VALIDATION_FILES == _VALIDATION_FILES - 1


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


def _windows(tokens: torch.Tensor, starts: torch.Tensor) -> Batch:
    windows = tokens[starts[:, None] + torch.arange(_WINDOW + 1)]
    return windows[:, :-1], windows[:, 1:]


def _draw(tokens: torch.Tensor, generator: torch.Generator) -> Batch:
    starts = torch.randint(len(tokens) - _WINDOW, (_GLOBAL_BATCH,), generator=generator)
    return _windows(tokens, starts)
