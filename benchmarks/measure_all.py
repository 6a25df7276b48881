"""Measures files of benchmarks/results, all but those that take a GPU, other packages or hours: one
file, one command, one after the other, on a machine that does nothing else.

    python benchmarks/measure_all.py                          # all; as root, for the links
    python benchmarks/measure_all.py train_1gbit growth       # these
    python benchmarks/measure_all.py --since 2026-12-01T09:30 # those that are older than this

A file is replaced when its measurement is done. After an interruption `--since` with the date of
the beginning goes on. Afterwards tools/figures.py and tools/draw_step.py renew the pages. `--help`
names the other files, with their commands.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path("benchmarks/results")  # from there, so that a file names no folder of a machine
_MODULE = ("-m", "gradferry")
_SIGN1, _TOPK = "sign1+momentum=0.8", "topk+momentum=0.8"
# On a slow link every round of an uncompressed hook takes many seconds.
_FEW = ("torch:fp32", "torch:fp16", "q8", "q4", "rht:bits=3", _SIGN1, _TOPK)
_ALL = ("torch:fp32", "torch:fp16", "torch:bf16", "torch:powersgd:4", *_FEW[2:])
_CASTS = ("torch:fp32", "torch:fp16")


@dataclass(frozen=True)
class Measurement:
    """A command, without --json, and about how many minutes it takes on two cores."""

    words: Sequence[str]
    minutes: float


def _train(link: str, hooks: Sequence[str], rounds: int, *more: str) -> Sequence[str]:
    turns = ("--rounds", str(rounds), "--steps", "2")
    words = ("--link", link, *more, *turns, "--hooks", "none", *hooks)
    return (*_MODULE, "bench", "train", *words)


def _on_hosts(link: str, ranks_per_host: int, rounds: int, *hooks: str) -> Sequence[str]:
    """Every hook takes 0.45 GB of each rank, so that few fit beside each other."""
    shared = ("--hosts", "2", "--ranks-per-host", str(ranks_per_host), "--bucket-caps", "25")
    exchanges = ("--exchange", "flat", "two-level")
    return _train(link, (*hooks, "q4"), rounds, *shared, *exchanges)


_BUCKETS = ("--bucket-caps", "4")
_CODECS = ("q4", "q8", "sign1", "rht:bits=4", "topk:ratio=0.01")
_UNDER_HSDP = ("--parallel", "hsdp", "--hosts", "2", "--ranks-per-host", "2")

MEASUREMENTS = {
    # The first, because it needs a program of C++ and says at once if that is not built.
    "growth": Measurement(("benchmarks/growth.py",), 6),
    "train_1gbit": Measurement(_train("1gbit", ("sync", *_ALL, "auto"), 16, *_BUCKETS), 5),
    "train_100mbit": Measurement(_train("100mbit", ("sync", *_FEW, "auto"), 6, *_BUCKETS), 6),
    "train_10gbit": Measurement(_train("10gbit", ("sync", *_ALL, "auto"), 12, *_BUCKETS), 3),
    "train_unshaped": Measurement(_train("unshaped", ("sync", *_FEW, "auto"), 12, *_BUCKETS), 3),
    "train_1gbit_2x2": Measurement(_on_hosts("1gbit", 2, 6, *_CASTS), 2),
    "train_1gbit_2x4": Measurement(_on_hosts("1gbit", 4, 6, "torch:fp32"), 3),
    "train_100mbit_2x2": Measurement(_on_hosts("100mbit", 2, 4, *_CASTS), 3),
    "train_100mbit_2x4": Measurement(_on_hosts("100mbit", 4, 4, "torch:fp32"), 5),
    "train_1gbit_hsdp": Measurement(
        _train("1gbit", ("torch:fp32", "q8", "q4", _SIGN1), 6, *_UNDER_HSDP), 2
    ),
    "train_1gbit_fsdp": Measurement(
        (*_MODULE, "bench", "train", "--parallel", "fsdp", "--link", "1gbit"), 9
    ),
    "codec_cpu": Measurement(
        (*_MODULE, "bench", "codec", "--codecs", *_CODECS, "--isas", "avx512", "avx2"), 3
    ),
    "local_stage": Measurement(("benchmarks/local_stage.py",), 1),
    "demo": Measurement((*_MODULE, "demo", "--out", "build/demo"), 2),
    "diloco": Measurement(("benchmarks/diloco.py", "--seeds", "2"), 3),
    "doctor": Measurement((*_MODULE, "doctor", "--link", "1gbit"), 1),
}

# The other files: what makes each, with --json, or what else it needs.
_GPU = "on an H100"
ELSEWHERE = {
    "convergence": "gradferry converge --full (an hour)",
    "convergence_sharded": "gradferry converge --sharded (an hour)",
    "small_matrices": "python benchmarks/small_matrices.py (an hour; trains what its file lacks)",
    "ef21_muon": "python benchmarks/ef21_muon.py (forty minutes)",
    "convergence_large": f"gradferry converge --large --device cuda ({_GPU})",
    "aggregate_error": f"python benchmarks/aggregate_error.py --device cuda ({_GPU})",
    "codec_peers": f"gradferry bench codec --codecs {' '.join(_CODECS)} --peers (its rows with a "
    "peer; needs pypiquant, bitsandbytes, hivemind)",
    "diloco_text_10m": "python benchmarks/diloco.py --task text_10m --seeds 1 --codecs off q4 "
    "rht:bits=2 torchft torchft:q4 (5 minutes; needs torchft)",
    "diloco_two_hosts": "python benchmarks/diloco.py --task text_10m --hosts 2 --seeds 1 --codecs "
    "off q4 rht:bits=2 (3 minutes)",
    "soak": "make soak HOURS=2",
    "gpu_check_h100": f"make gpu-check ({_GPU})",
    "codec_h100": "gradferry bench codec --device cuda --dtypes float32 --sizes-mb 8 100 --rounds "
    f"20 ({_GPU})",
    "codec_h100_bf16": "gradferry bench codec --device cuda --dtypes bfloat16 --sizes-mb 8 100 "
    f"--rounds 10 ({_GPU})",
    "train_h100": "gradferry bench train --device cuda --hooks none sync torch:fp32 torch:bf16 q4 "
    f"--rounds 2 ({_GPU})",
    "doctor_h100": f"gradferry doctor --device cuda ({_GPU})",
    "collective_h100": f"gradferry bench collective --device cuda -b 1M -e 64M -f 8 -n 10 ({_GPU})",
}


def main() -> None:
    """Runs the measurements that were asked for; ends with the first that fails."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["other files:", *(f"  {n}: {how}" for n, how in ELSEWHERE.items())]),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {' '.join(MEASUREMENTS)}")
    parser.add_argument(
        "--since",
        type=_date,
        metavar="DATE",
        help="skip files that were measured at this date, UTC, or later",
    )
    parser.add_argument("--dry-run", action="store_true", help="only show the commands")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in MEASUREMENTS]
    if unknown:
        parser.error(f"there is no measurement {unknown[0]}; choose from {' '.join(MEASUREMENTS)}")
    asked = arguments.names or list(MEASUREMENTS)
    names = [n for n in MEASUREMENTS if n in asked and not _is_new(n, arguments.since)]
    minutes = sum(MEASUREMENTS[name].minutes for name in names)
    print(f"{len(names)} measurements, about {minutes:.0f} minutes on two cores", flush=True)
    for name in names:
        print(f"{name}: {' '.join(command(name)[1:])}", flush=True)
        if not arguments.dry_run:
            started = time.monotonic()
            subprocess.run(command(name), check=True, cwd=ROOT)
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)


def command(name: str) -> list[str]:
    """The whole command line of a measurement."""
    return [sys.executable, *MEASUREMENTS[name].words, "--json", str(RESULTS / f"{name}.json")]


def _date(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


def _is_new(name: str, since: datetime | None) -> bool:
    path = ROOT / RESULTS / f"{name}.json"
    if since is None or not path.exists():
        return False
    measured = json.loads(path.read_text())["environment"]["date"]
    return datetime.fromisoformat(measured) >= since


if __name__ == "__main__":
    main()
