"""What gradferry costs with more and more ranks, all on this machine and over loopback.

`python benchmarks/growth.py` trains 4 M parameters under DistributedDataParallel, plain and with
q4, on 2 to 32 processes. Then 64 to 256 ranks of the C++ Reducer average 1 M numbers, 16 ranks to a
process; where their program is not built, it says at once how to. All takes about 6 minutes on two
cores.

Counted per rank, as the mean over ranks: what attaching adds in memory and open sockets, and the
processor time of a step. Beyond the processors' number the time of a step means nothing: it is left
out. Seconds of attaching contain the wait for other ranks' turns.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from gradferry.ddp.attach import attach
from gradferry.errors import GradferryError
from gradferry_lab.flags import add_json
from gradferry_lab.output.json_file import write_json
from gradferry_lab.ranks.launch import Emit, gather_from_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_ROOT = Path(__file__).parents[1]
_PROGRAM = "build/torch-*/*/tests/reducer/gradferry_growth_ranks"
WAYS = {"plain": "DDP, plain", "q4": "DDP, `q4`", "reducer": "C++ Reducer, `q4`"}
_WIDTH, _LAYERS = 512, 16  # 4 M parameters
_STEPS = 5
_NUMBERS = 1 << 20  # of the C++ Reducer
_RANKS_PER_PROCESS = 16


def main() -> None:
    """Measures, prints a line for every world, writes the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8, 16, 32])
    parser.add_argument("--reducer-ranks", nargs="*", type=int, default=[64, 128, 256])
    add_json(parser)
    options = parser.parse_args()
    if any(ranks % _RANKS_PER_PROCESS for ranks in options.reducer_ranks):
        parser.error(f"--reducer-ranks must be multiples of {_RANKS_PER_PROCESS}")
    program = max(_ROOT.glob(_PROGRAM), key=lambda path: path.stat().st_mtime, default=None)
    if options.reducer_ranks and program is None:
        folder = f"build/torch-{torch.__version__.partition('+')[0]}/*"  # as `make setup` has it
        parser.error(
            f"there is no {_PROGRAM}; build it with 'make setup' and 'cmake --build {folder} "
            f"--target gradferry_growth_ranks', or give --reducer-ranks no number"
        )
    rows: list[dict[str, Any]] = []
    try:
        for ranks in options.ranks:
            rows += run_ranks(_trained, (), ranks, print)
            _show(rows[-2:])
        for ranks in options.reducer_ranks:
            assert program is not None
            rows.append(_reduced(program, ranks))
            _show(rows[-1:])
    except GradferryError as error:
        raise SystemExit(str(error)) from error
    rows.sort(key=lambda row: (list(WAYS.values()).index(row["way"]), row["ranks"]))
    if options.json is not None:
        write_json(options.json, rows, results_of="growth")


def _show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def _trained(emit: Emit) -> list[dict[str, Any]]:
    """Runs on every rank: a row of DDP as it is, and one with q4."""
    _row("plain")  # what torch and gloo allocate once is no model's
    return [_row(way) for way in ("plain", "q4")]


def _row(way: str) -> dict[str, Any]:
    gc.collect()  # DDP objects sit in reference cycles
    ctypes.CDLL(None).malloc_trim(0)  # freed memory is given back, which is counted when used again
    before = _memory_mib(), _sockets()
    torch.manual_seed(0)
    layers = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS))
    ddp = DistributedDataParallel(nn.Sequential(*layers))
    seconds = None
    if way == "q4":
        dist.barrier()
        started = time.monotonic()
        attach(ddp, "q4", nodes="flat")
        seconds = time.monotonic() - started
    inputs = torch.randn(1, _WIDTH)
    used = [_step(ddp, inputs) for _ in range(2 + _STEPS)][2:]
    mine = {
        "attach_s": seconds,
        "cpu_ms": median(used),
        "memory_mib": _memory_mib() - before[0],
        "sockets": _sockets() - before[1],
    }
    ranks = gather_from_ranks(mine)
    return {
        "way": WAYS[way],
        "ranks": len(ranks),
        "attach_s": None if seconds is None else max(rank["attach_s"] for rank in ranks),
        "cpu_ms": fmean(rank["cpu_ms"] for rank in ranks),
        "memory_mib": fmean(rank["memory_mib"] for rank in ranks),
        "sockets": max(rank["sockets"] for rank in ranks),
    }


def _step(ddp: nn.Module, inputs: torch.Tensor) -> float:
    """Milliseconds of processor time, of all threads of this rank."""
    dist.barrier()
    before = time.process_time()
    ddp(inputs).square().mean().backward()
    dist.barrier()
    return 1000 * (time.process_time() - before)


def _memory_mib() -> float:
    """Memory of this process that no file backs; what it shares counts in part."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    kib = sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
    return kib / 1024


def _sockets() -> int:
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found += str(descriptor.readlink()).startswith("socket:")
        except OSError:  # the folder's own, which is closed again
            continue
    return found


def _reduced(program: Path, ranks: int) -> dict[str, Any]:
    """The row that the processes of the C++ program print together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [str(program), *map(str, (ranks, first, _RANKS_PER_PROCESS, _NUMBERS, port))],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in range(0, ranks, _RANKS_PER_PROCESS)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"{program} failed with {ranks} ranks")
    found = [[float(number) for number in each.split()] for each in printed]
    attach_s, cpu_ms, memory_mib, sockets = zip(*found, strict=True)
    return {
        "way": WAYS["reducer"],
        "ranks": ranks,
        "attach_s": max(attach_s),
        "cpu_ms": fmean(cpu_ms),
        "memory_mib": fmean(memory_mib),
        "sockets": round(max(sockets)),
    }


if __name__ == "__main__":
    main()
