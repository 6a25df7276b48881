"""Other quantizers for the CPU, called as their users call them, beside q4 and q8.

A peer's quantizer has one scale per tensor or block and no error feedback. Ours is timed with error
feedback in the pass, so it reads and writes 8 bytes per element more.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from gradferry import _native

from gradferry_lab.output.table import Column, Table

Row = Mapping[str, Any]
Pass = Callable[[], object]


@dataclass(frozen=True)
class Peer:
    """A quantizer: `passes` makes one encoding and one decoding call for a flat fp32 tensor."""

    name: str
    module: str
    rival: str  # the codec of ours with as many bits
    passes: Callable[[torch.Tensor, int], tuple[Pass, Pass]]

    @property
    def package(self) -> str:
        """What `pip install` takes; pypiquant is imported by another name."""
        return self.name.partition(":")[0]


def _pypiquant(dtype_name: str, values_per_byte: int) -> Callable[..., tuple[Pass, Pass]]:
    def passes(x: torch.Tensor, threads: int) -> tuple[Pass, Pass]:
        piquant = importlib.import_module("piquant")
        context = piquant.Context(threads)
        kind, single = getattr(piquant.DataType, dtype_name), piquant.DataType.F32
        codes = torch.empty(x.numel() // values_per_byte, dtype=torch.uint8)
        out = torch.empty_like(x)
        scale = zero_point = None

        def encode() -> None:
            nonlocal scale, zero_point
            scale, zero_point = context.compute_quant_params_ptr_float32(
                x.data_ptr(), kind, x.numel()
            )
            context.quantize_ptr(
                x.data_ptr(), single, codes.data_ptr(), kind, x.numel(), scale, zero_point,
                piquant.RoundMode.NEAREST,
            )  # fmt: skip

        def decode() -> None:
            context.dequantize_ptr(
                codes.data_ptr(), kind, out.data_ptr(), single, x.numel(), scale, zero_point,
                piquant.ReduceOp.SET,
            )  # fmt: skip

        return encode, decode

    return passes


def _torch_quantizer(x: torch.Tensor, threads: int) -> tuple[Pass, Pass]:
    codes = None

    def encode() -> None:
        nonlocal codes
        scale = x.abs().max().item() / 127 or 1.0
        codes = torch.quantize_per_tensor(x, scale, 0, torch.qint8)

    def decode() -> torch.Tensor:
        assert codes is not None
        return codes.dequantize()

    return encode, decode


def _bitsandbytes(kind: str) -> Callable[..., tuple[Pass, Pass]]:
    def passes(x: torch.Tensor, threads: int) -> tuple[Pass, Pass]:
        functional = importlib.import_module("bitsandbytes.functional")
        quantize = getattr(functional, f"quantize_{kind}")
        dequantize = getattr(functional, f"dequantize_{kind}")
        codes: tuple[Any, ...] = ()

        def encode() -> None:
            nonlocal codes
            codes = quantize(x)

        return encode, lambda: dequantize(*codes)

    return passes


def _hivemind(x: torch.Tensor, threads: int) -> tuple[Pass, Pass]:
    compression = importlib.import_module("hivemind.compression")
    quantizer = compression.Uniform8BitQuantization()
    message = None

    def encode() -> None:
        nonlocal message
        message = quantizer.compress(x, info=None)

    return encode, lambda: quantizer.extract(message)


PEERS = (
    Peer("pypiquant:uint4", "piquant", "q4", _pypiquant("UINT4", 2)),
    Peer("pypiquant:uint8", "piquant", "q8", _pypiquant("UINT8", 1)),
    Peer("torch:quantize_per_tensor", "torch", "q8", _torch_quantizer),
    Peer("bitsandbytes:quantize_4bit", "bitsandbytes", "q4", _bitsandbytes("4bit")),
    Peer("bitsandbytes:quantize_blockwise", "bitsandbytes", "q8", _bitsandbytes("blockwise")),
    Peer("hivemind:uniform_8bit", "hivemind", "q8", _hivemind),
)


def installed_peers() -> list[Peer]:
    """Those of PEERS whose package is there."""
    return [peer for peer in PEERS if importlib.util.find_spec(peer.module) is not None]


def compare_with_peers(
    codecs: Sequence[str], num_elements: int, threads: int, rounds: int
) -> list[dict[str, Any]]:
    """Passes of ours and of each peer in turn, over the same fp32 gradient; rows for JSON.

    `speedup` is the median over rounds of the peer's time over ours, both of one round.
    """
    rows = []
    for peer in installed_peers():
        if peer.rival not in codecs:
            continue
        timer = _native.CodecTimer(
            codec=peer.rival,
            dtype=torch.float32,
            isa=_native.active_isa(),
            num_elements=num_elements,
            world_sizes=[],
            rounds=1,
            threads=threads,
        )
        x = timer.gradient().view(torch.float32)
        with _torch_threads(threads), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's quantizers are deprecated
            encode, decode = peer.passes(x, threads)
            for op, peer_op, ours, theirs in (
                ("encode_ef", "quantize", timer.encode_pass, encode),
                ("decode", "dequantize", timer.decode_pass, decode),
            ):
                rows.append(_alternate(peer, op, peer_op, ours, theirs, rounds, threads, x.numel()))
    return rows


def _alternate(
    peer: Peer,
    op: str,
    peer_op: str,
    ours: Callable[[], float],
    theirs: Pass,
    rounds: int,
    threads: int,
    num_elements: int,
) -> dict[str, Any]:
    ours()
    theirs()
    speedups, seconds = [], []
    for _ in range(rounds):
        our_s = ours()
        start = time.perf_counter()
        theirs()
        seconds.append(time.perf_counter() - start)
        speedups.append(seconds[-1] / our_s)
    return {
        "codec": peer.rival,
        "op": op,
        "dtype": "float32",
        "num_elements": num_elements,
        "threads": threads,
        "isa": _native.active_isa(),
        "peer": peer.name,
        "peer_op": peer_op,
        "peer_elements_per_second": num_elements / statistics.median(seconds),
        "speedup": statistics.median(speedups),
        "speedup_min": min(speedups),
        "speedup_max": max(speedups),
    }


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def missing_peers() -> list[str]:
    """Names of packages that are not installed, as pip knows them."""
    return sorted({peer.package for peer in PEERS} - {peer.package for peer in installed_peers()})


def peer_table(rows: Sequence[Row], missing: Sequence[str] = ()) -> Table:
    """Rows of compare_with_peers."""
    columns = (
        Column("peer", lambda row: str(row["peer"]), is_number=False),
        Column("its operation", lambda row: str(row["peer_op"]), is_number=False, detail=2),
        Column(
            "M elements\nper s",
            lambda row: f"{row['peer_elements_per_second'] / 1e6:,.0f}",
            detail=1,
        ),
        Column("ours", lambda row: f"{row['codec']} {row['op']}", is_number=False),
        Column("ours is\nfaster by", lambda row: f"{row['speedup']:.2f}x"),
        Column("(min)", lambda row: f"{row['speedup_min']:.2f}", detail=3),
        Column("(max)", lambda row: f"{row['speedup_max']:.2f}", detail=3),
    )
    notes = [
        "Same fp32 buffer, same number of threads, in turns; median of the ratios of each turn. "
        "Ours keeps a scale per block, and its encoding includes error feedback: 8 bytes more of "
        "traffic per element. Peers write into memory they allocate, where they offer nothing else."
    ]
    if missing:
        notes.append(f"Not installed, so not compared: {' '.join(missing)}.")
    return Table("Other quantizers", columns, rows, notes)
