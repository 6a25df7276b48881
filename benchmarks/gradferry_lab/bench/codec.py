"""Speed of codecs on a GPU: the kernels that encode, reduce and decode a chunk of one parameter,
headers and checks included, against a device copy that moves the same bytes, in the same run.
Buffers take turns, so that the cache holds none of them; results are validated before they are
timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from gradferry import _native
from gradferry.core import device
from rich.console import Console

from gradferry_lab import flags
from gradferry_lab.bench.device_clock import Pass, TimedDevice, find_gpu
from gradferry_lab.output.json_file import environment, occasion, save_rows
from gradferry_lab.output.table import Column, Table, number, print_table

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry bench codec`."""
    flags.add_codecs(parser)
    parser.add_argument(
        "--device", default="cuda", metavar="DEVICE", help="the GPU, as in cuda:1 (default: cuda)"
    )
    sizes, what = [1.0, 8.0, 25.0, 100.0], "sizes of the gradient, in units of 2^20 bytes"
    flags.add_several(parser, "--sizes-mb", sizes, "MB", what)
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=_DTYPES,
        default=["float32"],
        help="dtypes of the gradient (default: float32)",
    )
    what = "payloads that `reduce` sums, a row each"
    flags.add_several(parser, "--world-sizes", [2, 8], "W", what)
    parser.add_argument(
        "--rounds",
        type=int,
        default=100,
        metavar="N",
        help="repetitions of (copy, case, copy) (default: %(default)s)",
    )
    flags.add_wide(parser)
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures and reports. 1 when a result was wrong, else 0; ConfigError for a wrong option."""
    flags.require_more_than_zero("--sizes-mb", arguments.sizes_mb)
    flags.require_at_least(1, arguments, "world_sizes", "rounds")
    options = DeviceOptions(
        codecs=[_native.canonical_codec(codec) for codec in arguments.codecs],
        dtypes=[_DTYPES[name] for name in arguments.dtypes],
        sizes_mb=arguments.sizes_mb,
        world_sizes=arguments.world_sizes,
        rounds=arguments.rounds,
    )
    gpu = find_gpu(arguments.device)
    console = Console()
    with console.status("") as status:
        rows = list(measure(options, gpu, status.update))
    print_table(console, codec_table(rows, gpu.environment["gpu"]), wide=arguments.wide)
    place = {**environment(), **occasion(), **gpu.environment}
    save_rows(console, arguments.json, rows, place, results_of="bench codec")
    return 1 if any(row["wrong"] for row in rows) else 0


def measure(
    options: DeviceOptions, timed: TimedDevice, on_case: Callable[[str], None]
) -> Iterator[Row]:
    """Rows, case by case; `on_case` hears what comes next. Raises ConfigError as load_kernels."""
    device.load_kernels(timed.device.type)
    for name in options.codecs:
        for dtype in options.dtypes:
            wrong = wrong_bytes(name, dtype, timed.device)
            for size_mb in options.sizes_mb:
                for misaligned in (False, True):
                    case = {
                        "codec": name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "device": timed.device.type,
                        "size_mb": size_mb,
                        "misaligned": misaligned,
                        "wrong": wrong,
                    }
                    place = "misaligned" if misaligned else "aligned"
                    on_case(f"{name}, {dtype}, {size_mb:g} MB, {place}")
                    yield from _time_codec(case, dtype, options, timed)


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
    case: Row, dtype: torch.dtype, options: DeviceOptions, timed: TimedDevice
) -> Iterator[Row]:
    """A row of every operation, which begins with what all of the case begin with."""
    num_elements = max(1, int(case["size_mb"] * 2**20) // dtype.itemsize)
    gradient = _gaussian(num_elements, dtype).to(timed.device)
    new = partial(
        _Buffers, case["codec"], gradient, case["misaligned"], max([1, *options.world_sizes])
    )
    # So many that, by the turn of one, the cache holds none of it.
    sets = [new()]
    count = num_buffers(gradient.nbytes + sets[0].codec.worker_bytes, timed.cache_bytes)
    sets += [new() for _ in range(count - 1)]
    for op, world_size, moved, payload_bytes, work in _operations(sets[0], options.world_sizes):
        row = {**case, "num_elements": num_elements, "op": op, "world_size": world_size}
        if case["wrong"] == 0:
            passes: list[Pass] = [partial(work, buffers) for buffers in sets]
            row |= _compare_with_copy(passes, moved, timed, options.rounds)
            row["bytes_per_element"] = moved / num_elements
            row["bits_per_element"] = 8 * payload_bytes / num_elements
        yield row
    for buffers in sets:
        buffers.codec.expect_no_findings()


def _operations(
    one: _Buffers, world_sizes: Sequence[int]
) -> Iterator[tuple[str, int, int, int, Callable[[_Buffers], object]]]:
    """What is timed: its name, how many ranks' messages it reduces, bytes moved, and those of the
    payload written by encode, read by decode, of each rank by reduce.
    """
    gradient, residual = one.gradient.nbytes, 2 * one.residual.nbytes
    worker, owner = one.codec.worker_bytes, one.codec.owner_bytes
    yield "encode", 1, gradient + worker, worker, lambda b: b.codec.encode(b.gradient, None)
    moved = gradient + residual + worker
    yield "encode_ef", 1, moved, worker, lambda b: b.codec.encode(b.gradient, b.residual)
    for w in world_sizes:
        moved = w * worker + residual + owner
        yield "reduce", w, moved, worker, lambda b, w=w: b.codec.reduce(b.residual, w)  # type: ignore[misc]
    # Last: they overwrite the gradient. Without a momentum the residual is not touched, nor is what
    # was sent.
    moved = owner + gradient
    yield "decode", 1, moved, owner, lambda b: b.codec.decode(b.gradient, None)
    yield "decode_ef", 1, moved, owner, lambda b: b.codec.decode(b.gradient, b.residual)


def _compare_with_copy(
    passes: Sequence[Pass], moved: int, timed: TimedDevice, rounds: int
) -> dict[str, Any]:
    shape, count = (2, max(1, moved // 2)), num_buffers(moved, timed.cache_bytes)
    pairs = [torch.zeros(shape, dtype=torch.uint8, device=timed.device) for _ in range(count)]
    copies: list[Pass] = [partial(b.copy_, a) for a, b in pairs]
    for work in (*copies, *passes):
        work()
    seconds, roofs, ratios = [], [], []
    for turn in range(rounds):
        before, taken, after = timed.clock(
            [
                copies[2 * turn % len(copies)],
                passes[turn % len(passes)],
                copies[(2 * turn + 1) % len(copies)],
            ]
        )
        seconds.append(taken)
        roofs += [before, after]
        ratios.append(0.5 * (before + after) / taken)
    return {
        "gbps": moved / median(seconds) / 1e9,
        "roof_gbps": moved / median(roofs) / 1e9,
        "roof_ratio": median(ratios),
        "roof_ratio_min": min(ratios),
        "roof_ratio_max": max(ratios),
        "us_median": median(seconds) * 1e6,
        "rounds": rounds,
        "buffers": len(passes),
    }


def num_buffers(num_bytes: int, cache_bytes: int) -> int:
    """Buffers of this size that must take turns, so that none is in the cache by its turn."""
    return max(FEWEST_BUFFERS, -(-_CACHES * cache_bytes // num_bytes))


def _gaussian(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    # Without -0, which a zero residual would make +0.
    return torch.randn(num_elements, generator=generator).mul_(1e-3).to(dtype).add_(0.0)


def _differences(on_device: torch.Tensor, expected: torch.Tensor) -> int:
    got = on_device.cpu().contiguous().view(torch.uint8)
    return int((got != expected.contiguous().view(torch.uint8)).sum())


def codec_table(rows: Sequence[Mapping[str, Any]], name: str) -> Table:
    """Rows of `measure`, with the columns explained below. `name`: of the device."""

    def figure(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: number(row.get(key), form)

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
