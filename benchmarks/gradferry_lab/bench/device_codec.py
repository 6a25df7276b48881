"""Speed of codecs on a GPU: the kernels that encode, reduce and decode a chunk of one parameter,
headers and checks included, against a device copy that moves the same bytes, in the same run.
Buffers take turns, so that the cache holds none of them; results are validated before they are
timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from gradferry import _native
from gradferry.core import device

from gradferry_lab.bench.device_clock import Pass, TimedDevice
from gradferry_lab.bench.device_peers import DEVICE_PEERS, DevicePeer
from gradferry_lab.output.table import Column, Table

FEWEST_BUFFERS = 4
_CACHES = 4  # all buffers together are so many times the cache
_CHECKED_ELEMENTS = 17 * _native.TILE_ELEMENTS + 1000

Row = dict[str, Any]


@dataclass(frozen=True)
class DeviceOptions:
    """What is measured."""

    codecs: Sequence[str]  # canonical
    dtypes: Sequence[torch.dtype]
    sizes_mb: Sequence[float]  # of the gradient
    world_sizes: Sequence[int]
    rounds: int
    peers: bool


@dataclass(frozen=True)
class _Case:
    op: str
    world_size: int
    bytes_moved: int
    payload_bytes: int  # written by encode, read by decode, of each rank by reduce
    passes: Sequence[Pass]  # the same work on buffers that take turns


class _Buffers:
    """A codec with its messages, and what it works on, once."""

    def __init__(
        self, name: str, gradient: torch.Tensor, misaligned: bool = False, ranks: int = 1
    ) -> None:
        place, n = gradient.device, gradient.numel()
        shift = 1 if misaligned else 0
        self.gradient = torch.empty(n + shift, dtype=gradient.dtype, device=place)[shift:]
        self.gradient.copy_(gradient)
        self.residual = torch.zeros(n, device=place)
        self.codec = _native.DeviceCodec(
            codec=name, dtype=gradient.dtype, num_elements=n, device=place, world_size=ranks
        )
        self.codec.encode(self.gradient, None)
        for rank in range(ranks):
            self.codec.receive(rank)
        self.codec.reduce(None, 1)


def measure(
    options: DeviceOptions, timed: TimedDevice, on_case: Callable[[str], None]
) -> Iterator[Row]:
    """Rows, case by case; `on_case` hears what comes next. Raises ConfigError as load_kernels."""
    device.expect_runnable(timed.device)
    device.load_kernels(timed.device.type)
    for name in options.codecs:
        for dtype in options.dtypes:
            wrong = wrong_bytes(name, dtype, timed.device)
            for size_mb in options.sizes_mb:
                for misaligned in (False, True):
                    place = "misaligned" if misaligned else "aligned"
                    on_case(f"{name}, {dtype}, {size_mb:g} MB, {place}")
                    yield from _time_codec(options, timed, name, dtype, size_mb, misaligned, wrong)
    if options.peers:
        for peer in DEVICE_PEERS:
            if peer.rival in options.codecs and peer.is_installed():
                for size_mb in options.sizes_mb:
                    on_case(f"{peer.name}, {size_mb:g} MB")
                    yield from _time_peer(options, timed, peer, size_mb)


def wrong_bytes(name: str, dtype: torch.dtype, place: torch.device) -> int:
    """How many bytes differ from what the CPU makes of the same numbers."""
    gradient = _gaussian(_CHECKED_ELEMENTS, dtype)
    buffers = _Buffers(name, gradient.to(place), misaligned=True, ranks=2)
    codec = buffers.codec
    hashes = {"config_hash": 0, "layout_hash": 0}
    message = _native.encode_tensor(gradient, name, seed=0, step=0, **hashes)
    wrong = _differences(_payload(codec.sent), _payload(message))
    residual = torch.zeros(_CHECKED_ELEMENTS, device=place)
    codec.encode(buffers.gradient, residual)
    wrong += _differences(_payload(codec.sent), _payload(message))
    if dtype == torch.float32:
        sent = torch.empty_like(gradient)
        _native.decode_tensor(message, name, sent, **hashes)
        wrong += _differences(residual, gradient - sent)
    residual.zero_()
    codec.reduce(residual, 2)
    codec.decode(buffers.gradient, None)
    codec.expect_no_findings()
    mean = _native.compressed_mean(
        [gradient, gradient], name, seed=0, worker_residual=False, owner_residual=True
    )
    return wrong + _differences(buffers.gradient, mean)


def _payload(message: torch.Tensor) -> torch.Tensor:
    return message[_native.HEADER_BYTES :]


def _time_codec(
    options: DeviceOptions,
    timed: TimedDevice,
    name: str,
    dtype: torch.dtype,
    size_mb: float,
    misaligned: bool,
    wrong: int,
) -> Iterator[Row]:
    num_elements = _elements(size_mb, dtype)
    gradient = _gaussian(num_elements, dtype).to(timed.device)
    ranks = max([1, *options.world_sizes])
    sets = _sets(timed, name, gradient, misaligned, ranks)
    common = {
        "codec": name,
        "dtype": str(dtype).removeprefix("torch."),
        "device": timed.device.type,
        "size_mb": size_mb,
        "num_elements": num_elements,
        "misaligned": misaligned,
        "wrong": wrong,
    }
    for case in _cases(sets, options.world_sizes):
        row = {**common, "op": case.op, "world_size": case.world_size}
        if wrong == 0:
            row |= _compare_with_copy(case, num_elements, timed, options.rounds)
        yield row
    for buffers in sets:
        buffers.codec.expect_no_findings()


def _sets(
    timed: TimedDevice,
    name: str,
    gradient: torch.Tensor,
    misaligned: bool = False,
    ranks: int = 1,
) -> list[_Buffers]:
    """So many that, by the turn of one, the cache holds none of it."""
    first = _Buffers(name, gradient, misaligned, ranks)
    count = num_buffers(gradient.nbytes + first.codec.worker_bytes, timed.cache_bytes)
    return [first, *(_Buffers(name, gradient, misaligned, ranks) for _ in range(count - 1))]


def _cases(sets: Sequence[_Buffers], world_sizes: Sequence[int]) -> list[_Case]:
    gradient, residual = sets[0].gradient.nbytes, 2 * sets[0].residual.nbytes
    worker, owner = sets[0].codec.worker_bytes, sets[0].codec.owner_bytes

    def passes(work: Callable[[_Buffers], object]) -> list[Pass]:
        return [lambda b=b: work(b) for b in sets]  # type: ignore[misc]

    def reduce(world_size: int) -> Callable[[_Buffers], object]:
        return lambda b: b.codec.reduce(b.residual, world_size)

    return [
        _Case("encode", 1, gradient + worker, worker,
              passes(lambda b: b.codec.encode(b.gradient, None))),
        _Case("encode_ef", 1, gradient + residual + worker, worker,
              passes(lambda b: b.codec.encode(b.gradient, b.residual))),
        *(_Case("reduce", w, w * worker + residual + owner, worker, passes(reduce(w)))
          for w in world_sizes),
        # Last: they overwrite the gradient.
        _Case("decode", 1, owner + gradient, owner,
              passes(lambda b: b.codec.decode(b.gradient, None))),
        # Without a momentum the residual is not touched, nor is what was sent.
        _Case("decode_ef", 1, owner + gradient, owner,
              passes(lambda b: b.codec.decode(b.gradient, b.residual))),
    ]  # fmt: skip


def _compare_with_copy(
    case: _Case, num_elements: int, timed: TimedDevice, rounds: int
) -> dict[str, Any]:
    copies = _copies(case.bytes_moved, timed)
    for work in (*copies, *case.passes):
        work()
    seconds, roofs, ratios = [], [], []
    for turn in range(rounds):
        copy_again = copies[(2 * turn + 1) % len(copies)]
        before, taken, after = timed.clock(
            [copies[2 * turn % len(copies)], case.passes[turn % len(case.passes)], copy_again]
        )
        seconds.append(taken)
        roofs += [before, after]
        ratios.append(0.5 * (before + after) / taken)
    middle = median(seconds)
    return {
        "gbps": case.bytes_moved / middle / 1e9,
        "roof_gbps": case.bytes_moved / median(roofs) / 1e9,
        "roof_ratio": median(ratios),
        "roof_ratio_min": min(ratios),
        "roof_ratio_max": max(ratios),
        "us_median": middle * 1e6,
        "us_p99": _percentile_99(seconds) * 1e6,
        "bytes_per_element": case.bytes_moved / num_elements,
        "bits_per_element": 8 * case.payload_bytes / num_elements,
        "elements_per_second": num_elements / middle,
        "rounds": rounds,
        "buffers": len(case.passes),
    }


def _copies(bytes_moved: int, timed: TimedDevice) -> list[Pass]:
    """Copies that read and write so many bytes together."""
    half = max(1, bytes_moved // 2)
    pairs = [
        (_bytes(half, timed.device), _bytes(half, timed.device))
        for _ in range(num_buffers(bytes_moved, timed.cache_bytes))
    ]
    return [lambda a=a, b=b: b.copy_(a) for a, b in pairs]  # type: ignore[misc]


def _time_peer(
    options: DeviceOptions, timed: TimedDevice, peer: DevicePeer, size_mb: float
) -> Iterator[Row]:
    num_elements = _elements(size_mb, torch.float32)
    gradient = _gaussian(num_elements, torch.float32).to(timed.device)
    sets = _sets(timed, peer.rival, gradient)
    count = len(sets)
    theirs = [peer.passes(gradient.clone(), torch.zeros_like(gradient)) for _ in range(count)]
    ours = {case.op: case for case in _cases(sets, ())}
    for op, peer_passes in (
        ("encode_ef", [encode for encode, _ in theirs]),
        ("decode", [decode for _, decode in theirs]),
    ):
        for work in (*ours[op].passes, *peer_passes):
            work()
        speedups, seconds = [], []
        for turn in range(options.rounds):
            our_s, other_s = timed.clock([ours[op].passes[turn % count], peer_passes[turn % count]])
            seconds.append(other_s)
            speedups.append(other_s / our_s)
        yield {
            "codec": peer.rival,
            "op": op,
            "dtype": "float32",
            "device": timed.device.type,
            "size_mb": size_mb,
            "num_elements": num_elements,
            "peer": peer.name,
            "peer_elements_per_second": num_elements / median(seconds),
            "speedup": median(speedups),
            "speedup_min": min(speedups),
            "speedup_max": max(speedups),
        }
    for buffers in sets:
        buffers.codec.expect_no_findings()


def num_buffers(num_bytes: int, cache_bytes: int) -> int:
    """Buffers of this size that must take turns, so that none is in the cache by its turn."""
    return max(FEWEST_BUFFERS, -(-_CACHES * cache_bytes // num_bytes))


def _elements(size_mb: float, dtype: torch.dtype) -> int:
    return max(1, int(size_mb * 2**20) // dtype.itemsize)


def _gaussian(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    # Without -0, which a zero residual would make +0.
    return torch.randn(num_elements, generator=generator).mul_(1e-3).to(dtype).add_(0.0)


def _bytes(num_bytes: int, place: torch.device) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=place)


def _differences(on_device: torch.Tensor, expected: torch.Tensor) -> int:
    got = on_device.cpu().contiguous().view(torch.uint8)
    return int((got != expected.contiguous().view(torch.uint8)).sum())


def _percentile_99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def device_codec_table(rows: Sequence[Mapping[str, Any]], name: str) -> Table:
    """Rows of `measure` but those of peers, with the columns explained below."""

    def figure(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: format(row[key], form) if key in row else "-"

    columns = (
        Column("codec", lambda row: str(row["codec"]), is_number=False),
        Column(
            "operation",
            lambda row: (
                f"{row['op']}/{row['world_size']}" if row["op"] == "reduce" else str(row["op"])
            ),
            is_number=False,
        ),
        Column("dtype", lambda row: str(row["dtype"]), is_number=False, detail=2),
        Column("MB", lambda row: f"{row['size_mb']:g}"),
        Column(
            "aligned",
            lambda row: "no" if row["misaligned"] else "yes",
            is_number=False,
            detail=3,
            note="Not aligned: the gradient begins one element off.",
        ),
        Column("us", figure("us_median", ".1f"), detail=1),
        Column("us, p99", figure("us_p99", ".1f"), detail=6),
        Column("GB/s", figure("gbps", ",.0f"), detail=1),
        Column("ratio\nto copy", figure("roof_ratio", ".2f")),
        Column("(min)", figure("roof_ratio_min", ".2f"), detail=5),
        Column("(max)", figure("roof_ratio_max", ".2f"), detail=5),
        Column("bits per\nelement", figure("bits_per_element", ".2f"), detail=4),
        Column("#wrong", lambda row: str(row["wrong"])),
    )
    notes = (
        "GB/s: bytes read plus bytes written. Ratio to copy: time of a device copy of as many "
        "bytes, read and written together, over the time of the operation, before and after it in "
        "every round; median, minimum and maximum of rounds. MB are 2^20 bytes, of the gradient.",
        "#wrong: bytes that differ from the CPU's; such a case is not timed.",
    )
    return Table(f"Codecs on {name}", columns, rows, notes)


def device_peer_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows of `measure` that compare with another implementation."""
    columns = (
        Column("peer", lambda row: str(row["peer"]), is_number=False),
        Column("MB", lambda row: f"{row['size_mb']:g}"),
        Column(
            "M elements\nper s",
            lambda row: f"{row['peer_elements_per_second'] / 1e6:,.0f}",
            detail=1,
        ),
        Column("ours", lambda row: f"{row['codec']} {row['op']}", is_number=False),
        Column("ours is\nfaster by", lambda row: f"{row['speedup']:.2f}x"),
        Column("(min)", lambda row: f"{row['speedup_min']:.2f}", detail=2),
        Column("(max)", lambda row: f"{row['speedup_max']:.2f}", detail=2),
    )
    missing = [peer.name for peer in DEVICE_PEERS if not peer.is_installed()]
    notes = [
        "Same fp32 numbers, in turns; median of the ratios of each turn. Our encoding includes "
        "error feedback; of the peers only unfused q4 has it."
    ]
    if missing:
        notes.append(f"Not installed, so not compared: {' '.join(missing)}.")
    return Table("Other implementations", columns, rows, notes)
