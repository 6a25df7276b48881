"""Tasks `text`, `tiny_text`, `text_10m` and `gpt2_small`: causal transformers on source code, which
`corpus` has, as bytes or as the tokens of a larger vocabulary.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from gradferry_lab.workloads.corpus import SYMPY_VERSION, source_files
from gradferry_lab.workloads.task import Batch, Task, in_batches

_NUM_BYTES = 256  # the smallest vocabulary: every byte value
_VALIDATION_FILES = 10  # every 10th file is kept for validation
_VALIDATION_BATCH = 32
_PIECE = re.compile(rb" ?[A-Za-z_]+| ?[0-9]+|\s+| ?[^\sA-Za-z_0-9]+")


@dataclass(frozen=True)
class TextSize:
    """How large the model is, and how much text it sees."""

    context: int  # tokens a prediction may look back on
    width: int
    layers: int
    heads: int
    global_batch: int  # windows of `context` tokens per step, over all ranks
    learning_rate: float
    validation_windows: int = 256
    vocabulary: int = _NUM_BYTES  # if larger, embedding and head are one matrix


SMALL = TextSize(context=128, width=128, layers=4, heads=4, global_batch=16, learning_rate=2e-3)
TINY = replace(SMALL, context=64, layers=2)  # hundreds of trainings of it fit into an hour
# 10.9 M parameters, of which all but 2 % are in blocks, as in models that people train.
TEN_MILLION = replace(
    SMALL, width=384, layers=6, heads=6, global_batch=32, learning_rate=1e-3, validation_windows=512
)
# The matrices of GPT-2 small (Radford et al. 2019) with 256 of its 1,024 positions: 123.8 M.
GPT2_SMALL = replace(
    TEN_MILLION, context=256, width=768, layers=12, heads=12, learning_rate=6e-4, vocabulary=50257
)


class Transformer(nn.Module):
    """Scores for the next token: int64 (batch, time <= context) in, float (batch, time, vocabulary)
    out.
    """

    def __init__(self, size: TextSize = SMALL) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if size.vocabulary > _NUM_BYTES:
            self.head.weight = self.embedding.weight

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
    pieces = _common_pieces(files, size.vocabulary - _NUM_BYTES)
    training, held_out = (_tokens(b"".join(part), pieces) for part in (others, kept))
    megabytes = sum(map(len, files)) / 1e6
    # Windows at equal distances.
    starts = torch.linspace(0, len(held_out) - size.context - 1, size.validation_windows).long()

    def draw(generator: torch.Generator) -> Batch:
        last = len(training) - size.context
        starts = torch.randint(last, (size.global_batch,), generator=generator)
        return _windows(training, starts, size.context)

    return Task(
        name=name,
        source=f"{len(files)} source files ({megabytes:.1f} MB) of sympy {SYMPY_VERSION}",
        metric=f"nats per {'byte' if size.vocabulary == _NUM_BYTES else 'token'}",
        global_batch=size.global_batch,
        default_steps=400,
        learning_rate=size.learning_rate,
        sgd_learning_rate=0.025,
        build_model=lambda: Transformer(size),
        draw=draw,
        validation=in_batches(*_windows(held_out, starts, size.context), _VALIDATION_BATCH),
    )


def _common_pieces(files: Sequence[bytes], number: int) -> list[bytes]:
    """Those that save most tokens. A piece is a word, a number, blanks or other signs, with the
    blank before it: GPT-2's own vocabulary would be a download.
    """
    counts = Counter(p for file in files if number for p in _PIECE.findall(file) if len(p) > 1)
    return sorted(counts, key=lambda piece: (-counts[piece] * (len(piece) - 1), piece))[:number]


def _tokens(text: bytes, pieces: Sequence[bytes]) -> torch.Tensor:
    """Numbers of the pieces, which follow those of the bytes that all else consists of."""
    if not pieces:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    numbers = {piece: (number,) for number, piece in enumerate(pieces, _NUM_BYTES)}
    return torch.tensor([n for p in _PIECE.findall(text) for n in numbers.get(p, p)])


def _windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> Batch:
    """Inputs and targets, int64 (number of starts, context): a target is what follows."""
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
