"""Codec strings, such as ``q4`` or ``topk:ratio=0.01``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradferry import _native
from gradferry.errors import ConfigError

OFF = "off"
AUTO = "auto"  # chooses a codec of the table, or OFF


@dataclass(frozen=True)
class CodecSpec:
    """A codec and its options, checked against the codec table.

    Attributes:
        name: a codec of the table, or ``off``: the backend's own all-reduce.
        options: ``(option, value)`` pairs, every option of the codec written out.
    """

    name: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}:{','.join(f'{key}={value}' for key, value in self.options)}"

    def bits(self, dtype: torch.dtype = torch.float32) -> float:
        """Bits per element that a worker sends for a full tile of this dtype."""
        if self.name == OFF:
            return 8.0 * dtype.itemsize
        n = _native.TILE_ELEMENTS
        return 8 * _native.payload_bytes(str(self), n, dtype, "worker") / n

    @property
    def lossy(self) -> bool:
        """Whether decoding can give other numbers than were encoded."""
        return any(row["name"] == self.name and row["lossy"] for row in _native.codecs())


def parse_codec(text: str) -> CodecSpec:
    """Parses a codec string.

    Args:
        text: ``name`` or ``name:option=value,option=value``.

    Raises:
        ConfigError: unknown codec or option (the message names the closest match), or a value out
            of its range.
    """
    if not isinstance(text, str):
        raise ConfigError(
            f"codec must be a string such as 'q4', not {type(text).__name__}: {text!r}"
        )
    if text == OFF:
        return CodecSpec(OFF)
    # What is no UTF-8 arrives as an unknown name.
    canonical = _native.canonical_codec(text.encode(errors="backslashreplace").decode())
    name, _, options = canonical.partition(":")
    pairs = (option.partition("=") for option in options.split(",") if option)
    return CodecSpec(name, tuple((key, value) for key, _, value in pairs))
