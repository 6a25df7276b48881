"""Encodes, decodes and averages single tensors, without a process group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        The message: uint8, one dimension, on the CPU, as docs/reference/wire_format.md defines it.

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


def accumulate(
    messages: Iterable[torch.Tensor],
    codec: str,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    divisor: int | None = None,
) -> torch.Tensor:
    """Decodes messages of `encode` and averages them: what a parameter server does with gradients.

    Gives the fp32 sum (of float64 the fp64 sum) in the order of the messages, times 1 / divisor,
    rounded once to dtype. Besides the result it allocates at most 16 KiB per message.

    Args:
        messages: what `encode` returned, at least one, for tensors of this size and dtype with
            this codec. Their seeds and steps may differ.
        codec: the codec string they were encoded with.
        shape: of every tensor that was encoded, and of the result.
        dtype: of every tensor that was encoded, and of the result.
        divisor: of the sum: by default the number of messages, which gives the mean; 1 gives the
            sum.

    Returns:
        A new contiguous tensor on CPU.

    Raises:
        ConfigError: codec, shape, dtype or divisor cannot be used, or there are no messages.
        ProtocolError: as of `decode`; says which message, counted from 0.
    """
    spec = _usable(codec)
    if isinstance(messages, torch.Tensor):
        raise ConfigError("messages is a single tensor; pass a sequence of messages")
    listed = list(messages)
    if not listed:
        raise ConfigError("there are no messages; pass at least one")
    for index, message in enumerate(listed):
        _check_dense(message, f"message {index}")
    divisor = len(listed) if divisor is None else divisor
    whole = isinstance(divisor, int) and not isinstance(divisor, bool)
    if not whole or not 1 <= divisor < 2**32:
        found = repr(divisor)[:40]
        raise ConfigError(f"divisor must be a positive integer below 2**32, not {found}")
    try:
        out = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    except (TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"shape and dtype describe no tensor: {reason}") from None
    _native.accumulate_tensors(
        [message.detach() for message in listed],
        str(spec),
        out,
        divisor=divisor,
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
