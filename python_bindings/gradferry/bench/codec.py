"""Speed of codecs on the CPU: encode, decode and reduce against the fastest plain loop that moves
the same bytes with as many threads, in the same run. Results are validated before they are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gradferry import _native
from gradferry.bench.peers import compare_with_peers, missing_peers, peer_table
from gradferry.errors import ConfigError
from gradferry.reporting.json_file import write_json
from gradferry.reporting.table import Column, Table, print_line, print_table

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MEMCPY_BYTES = 1 << 26

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
        "--isas",
        nargs="+",
        default=[_native.active_isa()],
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
        default=[1],
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
    parser.add_argument(
        "--num-elements",
        type=int,
        default=1 << 24,
        metavar="N",
        help="elements of the gradient; arrays should not fit the caches (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        metavar="N",
        help="repetitions of (roof, case, roof), or of (codec, peer) (default: %(default)s)",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also compare with pypiquant, torch's quantizers, bitsandbytes and hivemind, those "
        "that are installed, on the same buffers",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measures and reports. 1 when a result was wrong, else 0; ConfigError for a wrong option."""
    _check(arguments)
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
        memcpy = _native.memcpy_gbps(_MEMCPY_BYTES, arguments.rounds)
        peers: list[dict[str, Any]] = []
        if arguments.peers:
            status.update("peers")
            peers = compare_with_peers(
                arguments.codecs, arguments.num_elements, arguments.threads[0], arguments.rounds
            )
    print_table(console, codec_table(rows, memcpy))
    if arguments.peers:
        console.print()
        print_table(console, peer_table(peers, missing_peers()))
    if arguments.json:
        write_json(arguments.json, [*rows, *peers])
        print_line(console, f"Written: {arguments.json}")
    return 1 if any(row["wrong"] for row in rows) else 0


def codec_table(rows: Sequence[Row], memcpy_gbps: float | None = None) -> Table:
    """Rows of `gradferry bench codec`, with its columns explained below."""
    columns = (
        Column("codec", lambda row: str(row["codec"]), is_number=False),
        Column("operation", _operation, is_number=False),
        Column("dtype", lambda row: str(row["dtype"]), is_number=False),
        Column("isa", lambda row: str(row["isa"]), is_number=False),
        Column("threads", lambda row: str(row["threads"])),
        Column("GB/s", lambda row: f"{row['gbps']:.1f}"),
        Column("M elements\nper s", lambda row: f"{row['elements_per_second'] / 1e6:,.0f}"),
        Column("ratio\nto roof", lambda row: f"{row['roof_ratio']:.2f}"),
        Column("(min)", lambda row: f"{row['roof_ratio_min']:.2f}"),
        Column("(max)", lambda row: f"{row['roof_ratio_max']:.2f}"),
        Column("bits per\nelement", lambda row: f"{row['bits_per_element']:.2f}"),
        Column("NMSE", lambda row: f"{100 * row['nmse']:.3g} %"),
        Column("#wrong", lambda row: str(row["wrong"])),
    )
    notes = [
        "GB/s: bytes read plus bytes written. Ratio to roof: time of the fastest plain loop with "
        "the same reads, writes and threads over the time of the operation; medians of sections "
        "over alternating passes, minimum and maximum of whole passes.",
        "encode_ef: with error feedback, that is with the residual read and written in the same "
        "pass. reduce/W: sum of W payloads plus residual, encoded again. NMSE: of Gaussian "
        "numbers, without residual. #wrong: bytes that differ from the scalar kernels; such a "
        "case is not timed.",
    ]
    if memcpy_gbps is not None:
        notes.append(f"memcpy of {_MEMCPY_BYTES >> 20} MB, one thread: {memcpy_gbps:.1f} GB/s.")
    return Table("Codecs on the CPU", columns, rows, notes)


def _operation(row: Row) -> str:
    return f"{row['op']}/{row['world_size']}" if row["op"] == "reduce" else str(row["op"])


def _check(arguments: argparse.Namespace) -> None:
    arguments.codecs = [_native.canonical_codec(codec) for codec in arguments.codecs]
    for isa in arguments.isas:
        if isa not in _native.available_isas():
            raise ConfigError(
                f"--isas: '{isa}' is none that this machine can run; choose from "
                f"{' '.join(_native.available_isas())}"
            )
    for option in ("threads", "world_sizes"):
        for value in getattr(arguments, option):
            if value < 1:
                raise ConfigError(f"--{option.replace('_', '-')}: {value} must be at least 1")
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds: {arguments.rounds} must be at least 1")
    if arguments.num_elements < 1:
        raise ConfigError(f"--num-elements: {arguments.num_elements} must be at least 1")


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
        rows.append(
            {"codec": codec, "dtype": dtype, "threads": threads, "isa": isa, **timed}
            | {"elements_per_second": per_second}
        )
    return rows
