"""Other implementations of a codec's work on a GPU, called as their users call them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from gradferry import _native

Pass = Callable[[], object]

_BLOCK, _GROUP = 32, 1024
_LEAST_EXPONENT, _MOST_EXPONENT = -118, 117
_LEAST_SCALE, _LARGEST_LAST_SCALE = 2.0**-6, 320.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway between two values the even code wins: the odd ones begin just above it.
_MIDDLES = torch.tensor([(low + high) / 2 for low, high in pairwise(_E2M1)])
_ODD = torch.tensor([code % 2 == 1 for code in range(1, len(_E2M1))])
_CODE_BEGINS = torch.where(_ODD, torch.nextafter(_MIDDLES, torch.tensor(9.0)), _MIDDLES)


@dataclass(frozen=True)
class DevicePeer:
    """`passes` makes one encoding and one decoding call for a flat fp32 tensor and a residual."""

    name: str
    module: str
    codec: str  # of ours that does the same
    passes: Callable[[torch.Tensor, torch.Tensor], tuple[Pass, Pass]]

    @property
    def rival(self) -> str:
        """The codec as `measure` names it."""
        return _native.canonical_codec(self.codec)

    def is_installed(self) -> bool:
        """Whether its package is there."""
        return importlib.util.find_spec(self.module) is not None


class UnfusedQ4:
    """Codec q4 with error feedback, written in torch operators: same results, one pass each.

    Args:
        device: where it works.
    """

    def __init__(self, device: torch.device) -> None:
        self._begins = _CODE_BEGINS.to(device)
        self._values = torch.tensor(_E2M1, device=device)

    def encode(
        self, gradient: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes (two per byte), scales and exponents of gradient + residual.

        Both are flat, fp32 and finite. The residual becomes what is withheld.
        """
        total = gradient + residual
        short = -total.numel() % _GROUP
        v = torch.nn.functional.pad(total, (0, short)).view(-1, _GROUP // _BLOCK, _BLOCK)
        largest = v.abs().amax(dim=2)
        exponent = torch.frexp(largest.amax(dim=1)).exponent - 11
        exponent = exponent.clamp(min=_LEAST_EXPONENT)[:, None]
        fraction, shift = torch.frexp(torch.ldexp(largest, -exponent) / 6)
        scale = torch.ldexp(torch.round(fraction * 16) / 16, shift)
        last = (exponent == _MOST_EXPONENT) & (scale > _LARGEST_LAST_SCALE)
        scale = torch.where(last, _LARGEST_LAST_SCALE, scale)
        scale = torch.where(scale < _LEAST_SCALE, 0.0, scale)
        step = torch.ldexp(scale, exponent)
        reciprocal = torch.where(scale == 0, 0.0, 1 / step)
        codes = torch.bucketize(v.abs() * reciprocal[..., None], self._begins, right=True)
        codes = codes + 8 * (torch.signbit(v) & (codes != 0))
        residual.copy_(total - self._decode(codes, step).view(-1)[: total.numel()])
        codes = codes.to(torch.uint8)
        half = _BLOCK // 2
        return codes[..., :half] | (codes[..., half:] << 4), scale, exponent

    def decode(
        self, packed: torch.Tensor, scale: torch.Tensor, exponent: torch.Tensor, num_elements: int
    ) -> torch.Tensor:
        """The numbers that encode() has sent, flat."""
        codes = torch.cat([packed & 15, packed >> 4], dim=2).to(torch.int64)
        return self._decode(codes, torch.ldexp(scale, exponent)).view(-1)[:num_elements]

    def _decode(self, codes: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        values = self._values[codes & 7] * step[..., None]
        return torch.where(codes >= 8, -values, values)


def _unfused_q4(x: torch.Tensor, residual: torch.Tensor) -> tuple[Pass, Pass]:
    q4 = UnfusedQ4(x.device)
    sent = q4.encode(x, residual)
    return lambda: q4.encode(x, residual), lambda: q4.decode(*sent, x.numel())


def _torch_topk(x: torch.Tensor, residual: torch.Tensor) -> tuple[Pass, Pass]:
    k = max(1, x.numel() // 100)
    out = torch.zeros_like(x)

    def encode() -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.topk(x.abs(), k, sorted=False).indices
        return x[indices], indices

    values, indices = encode()
    return encode, lambda: out.zero_().scatter_(0, indices, values)


def _torch_cast(x: torch.Tensor, residual: torch.Tensor) -> tuple[Pass, Pass]:
    sent, out = x.to(torch.bfloat16), torch.empty_like(x)
    return lambda: sent.copy_(x), lambda: out.copy_(sent)


def _bitsandbytes(kind: str) -> Callable[[torch.Tensor, torch.Tensor], tuple[Pass, Pass]]:
    def passes(x: torch.Tensor, residual: torch.Tensor) -> tuple[Pass, Pass]:
        functional: Any = importlib.import_module("bitsandbytes.functional")
        quantize = getattr(functional, f"quantize_{kind}")
        dequantize = getattr(functional, f"dequantize_{kind}")
        sent = quantize(x)
        return lambda: quantize(x), lambda: dequantize(*sent)

    return passes


DEVICE_PEERS = (
    DevicePeer("torch: unfused q4 with error feedback", "torch", "q4", _unfused_q4),
    DevicePeer("torch.topk, 1 %", "torch", "topk:ratio=0.01", _torch_topk),
    DevicePeer("torch: cast to bf16 and back", "torch", "bf16", _torch_cast),
    DevicePeer("bitsandbytes: quantize_4bit", "bitsandbytes", "q4", _bitsandbytes("4bit")),
    DevicePeer(
        "bitsandbytes: quantize_blockwise", "bitsandbytes", "q8", _bitsandbytes("blockwise")
    ),
)
