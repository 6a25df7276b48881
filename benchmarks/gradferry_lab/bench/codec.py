"""Speed of codecs: encode, decode and reduce against what memory allows, in the same run. On the
CPU that is the fastest plain loop that moves the same bytes with as many threads, on a GPU a copy
of as many bytes. Results are validated before they are timed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gradferry import _native
from gradferry.errors import ConfigError
from rich.console import Console

from gradferry_lab import flags
from gradferry_lab.bench.device_clock import find_gpu
from gradferry_lab.bench.device_codec import (
    DeviceOptions,
    device_codec_table,
    device_peer_table,
    measure,
)
from gradferry_lab.bench.peers import compare_with_peers, missing_peers, peer_table
from gradferry_lab.output.json_file import environment, occasion, save_rows
from gradferry_lab.output.table import Column, Table, print_table

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MEMCPY_BYTES = 1 << 26
_AVERAGED_ELEMENTS = 1 << 20  # of each rank, for the error of a mean
_ROUNDS = {"cpu": 9, "gpu": 100}
_CPU_ONLY = ("isas", "threads", "num_elements")

_NMSE_NOTE = (
    "NMSE: of Gaussian numbers, without residual; reduce/W: of the mean that W ranks get, which is "
    "encoded twice."
)

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry bench codec`."""
    names = [codec["name"] for codec in _native.codecs()]
    parser.add_argument(
        "--codecs",
        nargs="+",
        default=names,
        metavar="CODEC",
        help=f"codecs as listed by `gradferry info` (default: {' '.join(names)})",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="cpu, or cuda for the kernels of a GPU (default: cpu)",
    )
    parser.add_argument(
        "--sizes-mb",
        nargs="+",
        type=float,
        metavar="MB",
        help="with a GPU: sizes of the gradient, in units of 2^20 bytes (default: 1 8 25 100)",
    )
    parser.add_argument(
        "--isas",
        nargs="+",
        metavar="ISA",
        help=f"instruction sets, of {' '.join(_native.available_isas())} "
        f"(default: {_native.active_isa()})",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=_DTYPES,
        default=["float32"],
        help="dtypes of the gradient (default: float32)",
    )
    parser.add_argument(
        "--threads",
        nargs="+",
        type=int,
        metavar="N",
        help="threads, each with its own share of the elements; several counts are measured one "
        "after the other (default: 1)",
    )
    parser.add_argument(
        "--world-sizes",
        nargs="+",
        type=int,
        default=[2, 8],
        metavar="W",
        help="payloads that `reduce` sums, a row each (default: 2 8)",
    )
    _add_ways(parser)
    flags.add_wide(parser)
    flags.add_json(parser)


def _add_ways(parser: argparse.ArgumentParser) -> None:
    """Declares how much, how often, and beside what."""
    parser.add_argument(
        "--num-elements",
        type=int,
        metavar="N",
        help=f"elements of the gradient; arrays should not fit the caches (default: {1 << 24})",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="repetitions of (roof, case, roof), or of (codec, peer) (default: "
        f"{_ROUNDS['cpu']}, with a GPU {_ROUNDS['gpu']})",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also compare with pypiquant, torch's quantizers, bitsandbytes and hivemind, on a GPU "
        "with torch.topk, torch's casts, an unfused q4 and bitsandbytes, those that are installed",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures and reports. 1 when a result was wrong, else 0; ConfigError for a wrong option."""
    _check(arguments)
    return _run_on_cpu(arguments) if arguments.device == "cpu" else _run_on_gpu(arguments)


def _run_on_gpu(arguments: argparse.Namespace) -> int:
    gpu = find_gpu(arguments.device)
    options = DeviceOptions(
        codecs=arguments.codecs,
        dtypes=[_DTYPES[name] for name in arguments.dtypes],
        sizes_mb=arguments.sizes_mb,
        world_sizes=arguments.world_sizes,
        rounds=arguments.rounds,
        peers=arguments.peers,
    )
    console = Console()
    with console.status("") as status:
        rows = list(measure(options, gpu, status.update))
    ours = [row for row in rows if "peer" not in row]
    table = device_codec_table(ours, gpu.environment["gpu"])
    print_table(console, table, wide=arguments.wide)
    if arguments.peers:
        console.print()
        table = device_peer_table([row for row in rows if "peer" in row])
        print_table(console, table, wide=arguments.wide)
    place = {**environment(), **occasion(), **gpu.environment}
    save_rows(console, arguments.json, rows, place, results_of="bench codec")
    return 1 if any(row["wrong"] for row in ours) else 0


def _run_on_cpu(arguments: argparse.Namespace) -> int:
    console = Console()
    rows: list[dict[str, Any]] = []
    cases = [
        (codec, isa, dtype, threads)
        for codec in arguments.codecs
        for isa in arguments.isas
        for dtype in arguments.dtypes
        for threads in arguments.threads
    ]
    with console.status("") as status:
        for number, (codec, isa, dtype, threads) in enumerate(cases, 1):
            status.update(f"{number}/{len(cases)}: {codec}, {isa}, {dtype}, {threads} threads")
            rows += _time(arguments, codec, isa, dtype, threads)
        _compare_core_rates(rows)
        memcpy = _native.memcpy_gbps(_MEMCPY_BYTES, arguments.rounds)
        peers: list[dict[str, Any]] = []
        if arguments.peers:
            status.update("peers")
            peers = compare_with_peers(
                arguments.codecs, arguments.num_elements, arguments.threads[0], arguments.rounds
            )
    print_table(console, codec_table(rows, memcpy), wide=arguments.wide)
    if arguments.peers:
        console.print()
        print_table(console, peer_table(peers, missing_peers()), wide=arguments.wide)
    save_rows(console, arguments.json, [*rows, *peers], results_of="bench codec")
    return 1 if any(row["wrong"] for row in rows) else 0


def codec_table(rows: Sequence[Row], memcpy_gbps: float | None = None) -> Table:
    """Rows of `gradferry bench codec`, with its columns explained below."""
    facts = [_fact(name, rows) for name in ("dtype", "isa", "threads")]
    columns = (
        Column("codec", lambda row: str(row["codec"]), is_number=False),
        Column("operation", _operation, is_number=False),
        *facts,
        Column("GB/s", lambda row: f"{row['gbps']:.1f}", detail=1),
        Column("M elements\nper s", _million_elements_per_second, detail=6),
        Column("ratio\nto roof", lambda row: f"{row['roof_ratio']:.2f}"),
        Column("(min)", lambda row: f"{row['roof_ratio_min']:.2f}", detail=5),
        Column("(max)", lambda row: f"{row['roof_ratio_max']:.2f}", detail=5),
        Column("bits per\nelement", _bits_per_element, detail=3),
        Column("NMSE", _nmse, detail=3, note=_NMSE_NOTE),
        Column("core", _core, detail=7, note=_core_note(rows)),
        Column("#wrong", lambda row: str(row["wrong"])),
    )
    notes = [
        "GB/s: bytes read plus bytes written. Ratio to roof: time of the fastest plain loop with "
        "the same reads, writes and threads, before and after, over the time of the operation: of "
        "every round the median of its sections of 1 MB; median, minimum and maximum of rounds.",
        "encode_ef: with error feedback, that is with the residual read and written in the same "
        "pass. reduce/W: sum of W payloads plus residual, encoded again. "
        "#wrong: bytes that differ from the scalar kernels; such a "
        "case is not timed.",
    ]
    if memcpy_gbps is not None:
        notes.append(f"memcpy of {_MEMCPY_BYTES >> 20} MB, one thread: {memcpy_gbps:.1f} GB/s.")
    shared = [f"{fact.title} {fact.cell(rows[0])}" for fact in facts if fact.detail]
    return Table(", ".join(["Codecs on the CPU", *shared]), columns, rows, notes)


def _core_note(rows: Sequence[Row]) -> str:
    alone = [row["core_gfmas"] / row["core_share"] for row in rows if row.get("core_share")]
    if not alone:
        return ""
    return (
        "core: multiply-adds per second of a loop without memory traffic, between passes of the "
        f"row, over the best of the run, {alone[0]:.1f} G/s. 1: the core was alone; about 0.5: a "
        "neighbour computed on its other hardware thread, and so the ratio to roof of what the "
        "processor limits is too low."
    )


def _fact(name: str, rows: Sequence[Row]) -> Column:
    """A column that is a detail where all rows have the same."""
    detail = 8 if len({row[name] for row in rows}) == 1 else 0
    return Column(name, lambda row: str(row[name]), name == "threads", detail=detail)


def _million_elements_per_second(row: Row) -> str:
    return f"{row['elements_per_second'] / 1e6:,.0f}"


def _nmse(row: Row) -> str:
    return f"{100 * row['nmse']:.3g} %"


def _bits_per_element(row: Row) -> str:
    return f"{row['bits_per_element']:.2f}"


def _core(row: Row) -> str:
    share = row.get("core_share")
    return "-" if share is None else f"{share:.2f}"


def _compare_core_rates(rows: Sequence[dict[str, Any]]) -> None:
    """Replaces the rates of rows by `core_gfmas` and `core_share`, None for what was not timed."""
    best = max((row["best_core_rate"] for row in rows), default=0.0)
    for row in rows:
        rate = row.pop("core_rate")
        del row["best_core_rate"]
        row["core_gfmas"] = rate / 1e9 if rate else None
        row["core_share"] = rate / best if rate else None


def _operation(row: Row) -> str:
    return f"{row['op']}/{row['world_size']}" if row["op"] == "reduce" else str(row["op"])


def _check(arguments: argparse.Namespace) -> None:
    """Checks options and fills in their defaults."""
    on_cpu = arguments.device == "cpu"
    for option in _CPU_ONLY if not on_cpu else ("sizes_mb",):
        if getattr(arguments, option) is not None:
            where = "the CPU" if not on_cpu else "a GPU (--device cuda)"
            raise ConfigError(f"--{option.replace('_', '-')} is for {where} only; leave it out")
    arguments.isas = arguments.isas or [_native.active_isa()]
    arguments.threads = arguments.threads or [1]
    arguments.sizes_mb = arguments.sizes_mb or [1.0, 8.0, 25.0, 100.0]
    if arguments.num_elements is None:
        arguments.num_elements = 1 << 24
    if arguments.rounds is None:
        arguments.rounds = _ROUNDS["cpu" if on_cpu else "gpu"]
    flags.require_more_than_zero("--sizes-mb", arguments.sizes_mb)
    arguments.codecs = [_native.canonical_codec(codec) for codec in arguments.codecs]
    for isa in arguments.isas:
        if isa not in _native.available_isas():
            raise ConfigError(
                f"--isas: '{isa}' is none that this machine can run; choose from "
                f"{' '.join(_native.available_isas())}"
            )
    flags.require_at_least_one(arguments, "threads", "world_sizes", "rounds", "num_elements")


@functools.cache
def _error_of_mean(codec: str, world_size: int) -> float:
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(world_size, _AVERAGED_ELEMENTS, generator=generator)
    exact = gradients.mean(0, dtype=torch.float64)
    mean = _native.compressed_mean(
        list(gradients), codec, seed=0, worker_residual=False, owner_residual=False
    )
    return float((mean.double() - exact).square().sum() / exact.square().sum())


def _time(
    arguments: argparse.Namespace, codec: str, isa: str, dtype: str, threads: int
) -> list[dict[str, Any]]:
    timer = _native.CodecTimer(
        codec=codec,
        dtype=_DTYPES[dtype],
        isa=isa,
        num_elements=arguments.num_elements,
        world_sizes=arguments.world_sizes,
        rounds=arguments.rounds,
        threads=threads,
    )
    rows = []
    for timed in timer.rows():
        seconds = timed.pop("seconds")
        per_second = timed["num_elements"] / seconds if seconds else 0.0
        if timed["op"] == "reduce":
            timed["nmse"] = _error_of_mean(codec, timed["world_size"])
        rows.append(
            {"codec": codec, "dtype": dtype, "threads": threads, "isa": isa, **timed}
            | {"elements_per_second": per_second}
        )
    return rows
