"""Encodes and decodes single tensors, without a process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradferry import _native
from gradferry.core.agreement import hash64
from gradferry.core.codec_spec import OFF, CodecSpec, parse_codec
from gradferry.errors import ConfigError


def encode(tensor: torch.Tensor, codec: str, *, seed: int = 0, step: int = 0) -> torch.Tensor:
    """Encodes a tensor as one message, header included.

    Args:
        tensor: float32, bfloat16 or float16 (`exact`: float64 too), contiguous, not empty, on CPU.
        codec: a codec string.
        seed: of the codec's random numbers; stored in the message.
        step: of the codec's random numbers; stored in the message.

    Returns:
        The message: uint8, one dimension, on the CPU, as docs/wire_format.md defines it.

    Raises:
        ConfigError: the codec or the tensor cannot be used.
    """
    spec = _usable(codec)
    _check_dense(tensor, "tensor")
    return _native.encode_tensor(
        tensor.detach(),
        str(spec),
        seed=seed,
        step=step,
        config_hash=hash64(str(spec)),
        layout_hash=_layout_hash(tensor.dtype, tensor.numel()),
    )


def decode(
    message: torch.Tensor, codec: str, *, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Decodes a message of `encode`.

    Args:
        message: what `encode` returned.
        codec: the codec string it was encoded with.
        shape: of the tensor that was encoded.
        dtype: of the tensor that was encoded.

    Returns:
        A new contiguous tensor on CPU.

    Raises:
        ConfigError: codec, shape or dtype cannot be used.
        ProtocolError: the bytes are not such a message: too short or long, damaged, or encoded
            with another codec, size or dtype.
    """
    spec = _usable(codec)
    _check_dense(message, "message")
    out = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    _native.decode_tensor(
        message.detach(),
        str(spec),
        out,
        config_hash=hash64(str(spec)),
        layout_hash=_layout_hash(dtype, out.numel()),
    )
    return out


def _usable(codec: str) -> CodecSpec:
    spec = parse_codec(codec)
    if spec.name == OFF:
        raise ConfigError("codec 'off' has no format: it leaves gradients to the backend")
    return spec


def _check_dense(tensor: torch.Tensor, what: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ConfigError(f"{what} has layout {tensor.layout}; call .to_dense() first")
    if tensor.device.type != "cpu":
        raise ConfigError(f"{what} is on {tensor.device}; move it to the CPU")


def _layout_hash(dtype: torch.dtype, num_elements: int) -> int:
    return hash64(f"{str(dtype).removeprefix('torch.')}|{num_elements}")
