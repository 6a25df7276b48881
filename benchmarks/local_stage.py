"""What ranks of one host spend on giving each other gradients: through sockets and shared memory.

`python benchmarks/local_stage.py` prints, per rank and step, the time and the processor time of the
local stage of an exchange on two levels, without a network and without codecs:

pack       copy the gradients of the siblings' columns to where they are sent from
scatter    local scatter: every sibling gets those of its column
sum        add what came to the own gradients
forward    every sibling gets what was gathered of a column, of q4's size

Chunks follow one another, so waiting is not hidden. Both ways take turns in the same processes, on
the engine's lanes and memory; `pack` and `sum` are the same loops of torch for both, where the
engine has its own. "exchange" is scatter and forward: what the way is answerable for. The kernel's
part of the processor time counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from gradferry.core.engine import make_lanes
from gradferry.core.meeting import store_of
from gradferry.core.node_memory import share_memory
from gradferry.errors import GradferryError
from gradferry_lab.flags import add_json, require_at_least_one
from gradferry_lab.output.json_file import write_json
from gradferry_lab.ranks.launch import gather_from_ranks, run_ranks
from torch._C._distributed_c10d import PrefixStore

_WAYS = ("sockets", "memory")
_PARTS = ("pack", "scatter", "sum", "forward")
_HEADER_BYTES = 64
_SLOTS = 4  # chunks whose buffers are used in turn
_MIB = 1 << 20
_SECONDS_TO_MEET = 60.0
# The bytes of q4's payload of a full tile, over the bytes of its gradients.
_GATHERED = 2192 / 16384


class _Stage:
    """The local stage of one rank, through one of the ways."""

    def __init__(self, way: str, num_bytes: int, place_bytes: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        everyone = list(range(self.world_size))
        lanes = make_lanes(group, way, {"scatter": everyone, "forward": everyone})
        self.scatter_lane, self.forward_lane = lanes
        self.place_bytes, self.forward_bytes = place_bytes, int(place_bytes * _GATHERED)
        self.num_chunks = max(1, num_bytes // (place_bytes * self.world_size))
        self.headers = torch.zeros(_HEADER_BYTES * self.world_size, dtype=torch.uint8)
        self.sum = torch.zeros(place_bytes // 4)
        self.cpu = dict.fromkeys(_PARTS, 0.0)
        places = self.world_size * place_bytes
        self.memory = None
        if way == "memory":
            store = PrefixStore("benchmark", store_of(group))
            size = _SLOTS * self.world_size * places
            memory, refusal = share_memory(store, self.rank, everyone, size, _SECONDS_TO_MEET)
            if memory is None:
                raise SystemExit(f"no shared memory: {refusal}")
            self.memory = [
                [memory.part((slot * self.world_size + each) * places, places) for each in everyone]
                for slot in range(_SLOTS)
            ]
        else:
            slots = range(_SLOTS)
            self.to_send = [torch.zeros(places, dtype=torch.uint8) for _ in slots]
            self.received = [torch.zeros(places, dtype=torch.uint8) for _ in slots]
            forwarded = self.world_size * self.forward_bytes
            self.gathered = [torch.zeros(forwarded, dtype=torch.uint8) for _ in slots]

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        begun = time.process_time()
        yield
        self.cpu[name] += time.process_time() - begun

    def _place(self, buffer: torch.Tensor, number: int) -> torch.Tensor:
        begin = number * self.place_bytes
        return buffer[begin : begin + self.place_bytes].view(torch.float32)

    def run(self, gradient: torch.Tensor) -> None:
        """A step. `sum` is then that of the last chunk."""
        columns = gradient[: self.num_chunks * self.world_size * len(self.sum)]
        for number, chunk in enumerate(columns.chunk(self.num_chunks)):
            slot = number % _SLOTS
            parts = chunk.chunk(self.world_size)
            with self._part("pack"):
                own = self.to_send[slot] if self.memory is None else self.memory[slot][self.rank]
                for column, part in enumerate(parts):
                    if column != self.rank:
                        self._place(own, column).copy_(part)
            with self._part("scatter"):
                self._scatter(slot)
            with self._part("sum"):
                for each in range(self.world_size):
                    came = parts[self.rank] if each == self.rank else self._came(slot, each)
                    self.sum.copy_(came) if each == 0 else self.sum.add_(came)
            with self._part("forward"):
                self._forward(slot)

    def _scatter(self, slot: int) -> None:
        buffers = (self.headers, self.headers)
        size = _HEADER_BYTES
        if self.memory is None:
            buffers, size = (self.received[slot], self.to_send[slot]), self.place_bytes
        receive, send = buffers
        sizes = [size] * self.world_size
        self.scatter_lane.all_to_all(receive, sizes, send, sizes).wait()

    def _came(self, slot: int, sibling: int) -> torch.Tensor:
        if self.memory is None:
            return self._place(self.received[slot], sibling)
        return self._place(self.memory[slot][sibling], self.rank)

    def _forward(self, slot: int) -> None:
        gathered = self.headers if self.memory is not None else self.gathered[slot]
        size = len(gathered) // self.world_size
        own = gathered[self.rank * size : (self.rank + 1) * size]
        self.forward_lane.all_gather(gathered, own).wait()


def _measure(_: Any, num_bytes: int, place_bytes: int, rounds: int, steps: int) -> dict[str, Any]:
    """On every rank: the medians of rounds, by way, averaged over the ranks; ms per step."""
    stages = {way: _Stage(way, num_bytes, place_bytes) for way in _WAYS}
    world_size = dist.get_world_size()
    # Whole numbers: every sum is exact.
    gradient = torch.full((max(num_bytes, world_size * place_bytes) // 4,), dist.get_rank() + 1.0)
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    for number in range(rounds + 1):
        for way, stage in stages.items():
            dist.barrier()
            stage.cpu = dict.fromkeys(_PARTS, 0.0)
            begun, cpu = time.monotonic(), time.process_time()
            for _ in range(steps):
                stage.run(gradient)
            spent = {"wall": time.monotonic() - begun, "cpu": time.process_time() - cpu}
            if bool((stage.sum != world_size * (world_size + 1) / 2).any()):
                raise SystemExit(f"wrong sums through {way}")
            if number > 0:  # the first warms up
                spent |= stage.cpu
                seen[way].append({key: 1000 * each / steps for key, each in spent.items()})
    medians = {
        way: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for way, rows in seen.items()
    }
    by_rank = gather_from_ranks(medians)
    return {
        way: {key: statistics.mean(each[way][key] for each in by_rank) for key in medians[way]}
        for way in _WAYS
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(default: 2 4)")
    parser.add_argument("--mb", type=int, default=64, help="MiB of fp32 gradients (default: 64)")
    parser.add_argument(
        "--chunk-mb", type=int, default=2, help="MiB per sibling and chunk (default: 2)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each way (default: 9)")
    parser.add_argument("--steps", type=int, default=5, help="in each turn (default: 5)")
    add_json(parser)
    options = parser.parse_args()
    try:
        require_at_least_one(options, "mb", "chunk_mb", "rounds", "steps")
        if min(options.ranks) < 2:
            parser.error("--ranks must be at least 2: one has no siblings")
        rows = _all_rows(options)
    except GradferryError as error:
        raise SystemExit(str(error)) from error
    print(_text(rows))
    if options.json is not None:
        write_json(options.json, rows, results_of="local stage")


def _all_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for num_ranks in options.ranks:
        arguments = (options.mb * _MIB, options.chunk_mb * _MIB, options.rounds, options.steps)
        found = run_ranks(_measure, arguments, num_ranks, lambda event: None)
        for way in _WAYS:
            row = {"ranks": num_ranks, "way": way} | {f"{k}_ms": v for k, v in found[way].items()}
            row["exchange_ms"] = row["scatter_ms"] + row["forward_ms"]
            rows.append(row)
    return rows


def _text(rows: list[dict[str, Any]]) -> str:
    keys = ("wall", "cpu", *_PARTS, "exchange")
    lines = ["ms per step and rank; wall: time, all others: processor time", ""]
    lines.append(f"{'ranks':>5} {'way':<8}" + "".join(f"{key:>10}" for key in keys))
    for sockets, memory in zip(rows[::2], rows[1::2], strict=True):
        for row in (sockets, memory):
            cells = "".join(f"{row[f'{key}_ms']:>10.2f}" for key in keys)
            lines.append(f"{row['ranks']:>5} {row['way']:<8}" + cells)
        ratios = "".join(f"{sockets[f'{k}_ms'] / memory[f'{k}_ms']:>10.1f}" for k in keys)
        lines += [f"{'':>5} {'ratio':<8}" + ratios, ""]
    return "\n".join(lines[:-1])


if __name__ == "__main__":
    main()
