"""Compressed all-reduce of one tensor against the backend's own, taking turns in one run, with the
columns and flags of nccl-tests. Every result is checked to the bit before it is timed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from statistics import median
from typing import Any

from gradferry import _native
from gradferry.ddp.trial import coverage_of
from gradferry.diagnosis import TORCH_DTYPES
from gradferry.errors import ConfigError
from rich.console import Console

from gradferry_lab import flags
from gradferry_lab.bench.collective_turns import (
    CollectiveOptions,
    CollectiveOutcome,
    compare_collectives,
)
from gradferry_lab.bench.device_clock import environment_on
from gradferry_lab.output.json_file import save_rows
from gradferry_lab.output.paired import (
    coverage_note,
    coverage_text,
    interval_keys,
    interval_text,
    paired_ratio,
)
from gradferry_lab.output.progress import StatusLine
from gradferry_lab.output.table import Column, Row, Table, marked, number, print_table
from gradferry_lab.ranks.everywhere import add_rank_arguments, check_ranks, run_everywhere
from gradferry_lab.ranks.exchanges import add_exchange, exchange_columns
from gradferry_lab.ranks.hosts import Where, ranks_text
from gradferry_lab.ranks.place import add_device
from gradferry_lab.workloads.hooks import all_reduce_bytes

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SMOKE: dict[str, Any] = {
    "codecs": ["q4", "topk"],
    "minbytes": "64K",
    "maxbytes": "256K",
    "iters": 2,
    "warmup_iters": 1,
}

_ENCODE = "enc: encode, on the calling thread."
_NETWORK = (
    "dec: reduce and decode; net: waiting for messages, both on the finishing thread of rank 0; "
    "these times overlap, and are known on hosts alone."
)
_ERROR = "rel.err: |result - exact mean| / |exact mean| in the first turn."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry bench collective`."""
    flags.add_codecs(parser, f", beside {' '.join(TORCH_DTYPES)}")
    parser.add_argument(
        "-b", "--minbytes", default="256K", metavar="SIZE", help="smallest size (default: 256K)"
    )
    parser.add_argument(
        "-e", "--maxbytes", default="16M", metavar="SIZE", help="largest size (default: 16M)"
    )
    parser.add_argument(
        "-f",
        "--stepfactor",
        type=int,
        default=4,
        metavar="N",
        help="each size is so many times the one before (default: 4)",
    )
    parser.add_argument(
        "-n", "--iters", type=int, default=20, metavar="N", help="timed turns (default: 20)"
    )
    parser.add_argument(
        "-w",
        "--warmup_iters",
        "--warmup-iters",
        type=int,
        default=5,
        metavar="N",
        help="turns before that (default: 5)",
    )
    parser.add_argument(
        "-c",
        "--check",
        type=int,
        choices=(0, 1),
        default=1,
        help="whether results are checked to the bit; needs the gradients of all ranks in memory "
        "(default: 1)",
    )
    add_device(parser)
    add_rank_arguments(parser)
    add_exchange(parser)
    parser.add_argument(
        "--smoke", action="store_true", help="two codecs, small sizes, to see that all works"
    )
    flags.add_wide(parser)
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures and reports. 1 when an element was wrong, else 0. Raises a GradferryError when an
    option is wrong or a rank fails.
    """
    flags.apply_smoke(arguments, _SMOKE)
    options = _options(arguments)
    place = environment_on(arguments.device)
    check_ranks(arguments)
    console = Console()

    def report(outcomes: Sequence[CollectiveOutcome], where: Where) -> int:
        rows = collective_rows(outcomes, options, where)
        print_table(console, collective_table(rows), wide=arguments.wide)
        save_rows(console, arguments.json, rows, place, results_of="bench collective")
        return 1 if any(row["wrong"] for row in rows) else 0

    with StatusLine(console) as status:
        closing = status.closing(report)
        return run_everywhere(arguments, compare_collectives, (options,), status, closing)


def _options(arguments: argparse.Namespace) -> CollectiveOptions:
    codecs = [_native.canonical_codec(codec) for codec in arguments.codecs]
    smallest = parse_size("-b", arguments.minbytes)
    largest = parse_size("-e", arguments.maxbytes)
    if largest < smallest:
        raise ConfigError(f"-e {arguments.maxbytes} is less than -b {arguments.minbytes}")
    flags.require_at_least(2, arguments, "stepfactor")
    flags.require_at_least(1, arguments, "iters")
    flags.require_at_least(0, arguments, "warmup_iters")
    sizes = [smallest]
    while sizes[-1] * arguments.stepfactor <= largest:
        sizes.append(sizes[-1] * arguments.stepfactor)
    return CollectiveOptions(
        names=(*TORCH_DTYPES, *dict.fromkeys(codecs)),
        exchanges=tuple(dict.fromkeys(arguments.exchange)),
        sizes=tuple(sizes),
        iterations=arguments.iters,
        warmup=arguments.warmup_iters,
        check=bool(arguments.check),
        device=arguments.device,
    )


def parse_size(flag: str, text: str) -> int:
    """Bytes of `8`, `64K`, `1M` or `2G`, in whole fp32 elements. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text.upper())
    size = int(match[1]) * _UNITS[match[2]] // 4 * 4 if match else 0
    if size == 0:
        raise ConfigError(f"{flag} {text!r} is no size; write 4 bytes or more, as in 64K or 16M")
    return size


def collective_rows(
    outcomes: Sequence[CollectiveOutcome], options: CollectiveOptions, where: Where
) -> list[dict[str, Any]]:
    """Rows of the JSON file; docs/results/performance.md defines every key."""
    rows = []
    for outcome in outcomes:
        backend = [o for o in outcomes if o.name in TORCH_DTYPES]
        alike = [o.seconds for o in backend if o.num_elements == outcome.num_elements]
        best = min(alike, key=median)
        size = 4 * outcome.num_elements
        seconds = median(outcome.seconds)
        speedup = paired_ratio(best, outcome.seconds)
        uncompressed = all_reduce_bytes(outcome.num_elements, 4, where.ranks)
        rows.append(
            {
                "op": "all_reduce",
                "size": size,
                "count": outcome.num_elements,
                "type": "float",
                "codec": outcome.name,
                "exchange": outcome.exchange,
                "chosen": outcome.chosen,
                "time": 1e6 * seconds,
                "algbw": size / seconds / 1e9,
                "busbw": size / seconds / 1e9 * 2 * (where.ranks - 1) / where.ranks,
                "wrong": outcome.wrong,
                "wire": outcome.wire_bytes,
                "ratio": uncompressed / outcome.wire_bytes if outcome.wire_bytes else None,
                "enc": _microseconds(outcome, "encode_ms"),
                "dec": _microseconds(outcome, "reduce_ms", "decode_ms"),
                "net": _microseconds(outcome, "network_ms"),
                "rel_err": outcome.relative_error,
                **interval_keys("speedup", speedup),
                "iters": len(outcome.seconds),
                "interval_coverage": coverage_of(len(outcome.seconds)),
                "time_min": 1e6 * min(outcome.seconds),
                "time_max": 1e6 * max(outcome.seconds),
                "wire_measured": outcome.wire_measured,
                **where._asdict(),
                "device": options.device,
            }
        )
    return rows


def _microseconds(outcome: CollectiveOutcome, *phases: str) -> float | None:
    if not outcome.phase_ms:
        return None
    return 1e3 * sum(outcome.phase_ms[phase] for phase in phases)


def collective_table(rows: Sequence[Row]) -> Table:
    """Rows of `gradferry bench collective`, with its columns explained below."""
    first = rows[0]
    iters = first["iters"]
    wire = (
        "wire: bytes that the busiest rank sends; * computed for a ring all-reduce, because the "
        "backend does not count."
    )
    columns = [
        Column("size\n(B)", lambda row: str(row["size"])),
        Column("count\n(elements)", lambda row: str(row["count"]), detail=8),
        Column("type", lambda row: str(row["type"]), detail=8),
        Column("codec", lambda row: str(row["codec"]), is_number=False),
        *exchange_columns(rows),
        Column("time\n(us)", lambda row: f"{row['time']:.1f}"),
        Column(
            "algbw\n(GB/s)", lambda row: f"{row['algbw']:.3f}", detail=5, note="algbw: size / time."
        ),
        Column("busbw\n(GB/s)", lambda row: f"{row['busbw']:.3f}", detail=1),
        Column("#wrong", lambda row: "N/A" if row["wrong"] is None else str(row["wrong"])),
        Column(
            "wire\n(B)", lambda row: marked(row["wire"], row["wire_measured"]), detail=5, note=wire
        ),
        Column("ratio", lambda row: number(row["ratio"], ".2f"), detail=2),
        Column("enc\n(us)", lambda row: number(row["enc"], ".1f"), detail=7, note=_ENCODE),
        Column("dec\n(us)", lambda row: number(row["dec"], ".1f"), detail=7),
        Column("net\n(us)", lambda row: number(row["net"], ".1f"), detail=7, note=_NETWORK),
        Column("rel.err", lambda row: f"{row['rel_err']:.1e}", detail=6, note=_ERROR),
        Column("speedup", lambda row: f"{row['speedup']:.2f}"),
        Column(f"({coverage_text(iters)})", lambda row: interval_text(row, "speedup"), detail=3),
    ]
    notes = [
        "time: median over turns, of the slowest rank. busbw: size / time * 2 (W-1) / W, "
        "what links carry without compression. #wrong: elements that differ by a bit from what "
        "they must be. ratio: bytes of an fp32 ring all-reduce over those that the busiest rank "
        "sends.",
        "speedup: over the fastest of the backend's own at this size, from times of the same turn. "
        f"{coverage_note(iters)}. torch:fp16 and torch:bf16 cast, all-reduce and cast back.",
    ]
    on = "" if first.get("device", "cpu") == "cpu" else f" on {first['device']}"
    title = f"gradferry bench collective: {ranks_text(first)}{on}, link {first['link']}"
    return Table(title, columns, rows, notes)
