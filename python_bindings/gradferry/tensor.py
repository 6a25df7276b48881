"""Encodes, decodes and averages single tensors, without a process group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gradferry import _native
from gradferry.core.agreement import hash64
from gradferry.core.codec_spec import OFF, CodecSpec, parse_codec
from gradferry.core.config import count
from gradferry.core.values import as_whole, shown
from gradferry.errors import ConfigError, StateError
from gradferry.reducer import expect_plain


def encode(tensor: torch.Tensor, codec: str, *, seed: int = 0, step: int = 0) -> torch.Tensor:
    """Encodes a tensor as one message, header included.

    Args:
        tensor: float32, bfloat16 or float16 (`exact`: float64 too), contiguous, not empty, on CPU.
        codec: a codec string.
        seed: of the codec's random numbers, 0 to 2**64 - 1; stored in the message.
        step: of the codec's random numbers, 0 to 2**64 - 1; stored in the message.

    Returns:
        The message: uint8, one dimension, on the CPU, as docs/reference/wire_format.md defines it.

    Raises:
        ConfigError: codec, tensor, seed or step cannot be used.
    """
    spec = _usable(codec)
    numbers = _dense(tensor, "tensor")
    return _native.encode_tensor(
        numbers,
        str(spec),
        seed=count("seed", seed),
        step=count("step", step),
        **_hashes(spec, numbers),
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
        ConfigError: message, codec, shape or dtype cannot be used.
        ProtocolError: the bytes are not such a message: too shown or long, damaged, or encoded
            with another codec, size or dtype.
    """
    spec = _usable(codec)
    encoded = _dense(message, "message")
    out = _empty(shape, dtype)
    _native.decode_tensor(
        encoded,
        str(spec),
        out,
        **_hashes(spec, out),
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
        ConfigError: messages, codec, shape, dtype or divisor cannot be used, or there are no
            messages.
        ProtocolError: as of `decode`; says which message, counted from 0.
    """
    spec = _usable(codec)
    if isinstance(messages, torch.Tensor):
        raise ConfigError("messages is a single tensor; pass a sequence of messages")
    if not isinstance(messages, Iterable):
        raise ConfigError(f"messages is {shown(messages)}; pass a sequence of messages")
    listed = [_dense(message, f"message {index}") for index, message in enumerate(messages)]
    if not listed:
        raise ConfigError("there are no messages; pass at least one")
    whole = as_whole(len(listed) if divisor is None else divisor)
    if whole is None or not 1 <= whole < 2**32:
        found = repr(divisor)[:40]
        raise ConfigError(f"divisor must be a positive integer below 2**32, not {found}")
    out = _empty(shape, dtype)
    _native.accumulate_tensors(
        listed,
        str(spec),
        out,
        divisor=whole,
        **_hashes(spec, out),
    )
    return out


def _usable(codec: str) -> CodecSpec:
    spec = parse_codec(codec)
    if spec.name == OFF:
        raise ConfigError("codec 'off' has no format: it leaves gradients to the backend")
    return spec


def _dense(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A tensor whose memory holds its values, for C++."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}")
    try:
        expect_plain(what, tensor)
    except StateError as error:
        raise ConfigError(str(error)) from None
    if tensor.layout != torch.strided:
        raise ConfigError(f"{what} has layout {tensor.layout}; call .to_dense() first")
    if tensor.device.type != "cpu":
        raise ConfigError(f"{what} is on {tensor.device}; move it to the CPU")
    try:
        has_values = tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        has_values = False
    if not has_values:
        raise ConfigError(
            f"{what} is a {type(tensor).__name__} without values, with which torch traces a "
            "function; call this outside of torch.func and FakeTensorMode"
        )
    # Views such as z.conj().imag share z's memory, in which the sign is another.
    return tensor.detach().resolve_conj().resolve_neg()


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor for a result."""
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype={shown(dtype)} must be a torch.dtype, such as torch.float32")
    try:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"shape={shown(shape)} is of no tensor on this host: {reason}") from None


def _hashes(spec: CodecSpec, tensor: torch.Tensor) -> dict[str, int]:
    """What a message says of its codec and its tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout_hash = hash64(f"{dtype}|{tensor.numel()}")
    return {"config_hash": hash64(str(spec)), "layout_hash": layout_hash}
