"""How long work on a device takes, by its own clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from gradferry.errors import ConfigError

from gradferry_lab.output.json_file import environment, occasion
from gradferry_lab.ranks.launch import torchrun_placement
from gradferry_lab.ranks.place import gpu_of_rank

Pass = Callable[[], object]

# A GPU sleeps so long (some 2 ms) before it is timed: meanwhile the host hands over all work, so
# that none of it waits for the host.
_HEAD_START_CYCLES = 4_000_000


@dataclass(frozen=True)
class TimedDevice:
    """A device and what a benchmark must know of it.

    Attributes:
        device: where tensors are.
        cache_bytes: of its largest cache; what is timed must not be found there.
        clock: seconds of each pass, enqueued one after the other.
        environment: for the JSON file.
    """

    device: torch.device
    cache_bytes: int
    clock: Callable[[Sequence[Pass]], list[float]]
    environment: dict[str, Any]


def find_gpu(wanted: str) -> TimedDevice:
    """The GPU that `wanted` ("cuda", "cuda:1") names. Raises ConfigError where there is none."""
    _expect_gpu(wanted)
    device = torch.device(wanted)
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {wanted}: this machine has GPUs 0 to {torch.cuda.device_count() - 1}"
        )
    torch.cuda.set_device(index)
    return TimedDevice(
        device=torch.device("cuda", index),
        cache_bytes=torch.cuda.get_device_properties(index).L2_cache_size,
        clock=_seconds_by_events,
        environment=_describe(torch.device("cuda", index)),
    )


def _expect_gpu(wanted: str) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device {wanted}: torch {torch.__version__} sees no GPU on this machine; run this "
            "where there is one; codec_bench of the build times the codecs of the CPU"
        )


def _describe(place: torch.device) -> dict[str, Any]:
    """A GPU, for the JSON file."""
    return {"gpu": torch.cuda.get_device_properties(place).name, "cuda": torch.version.cuda}


def environment_on(device: str) -> dict[str, Any]:
    """The environment for the JSON file, with this rank's GPU if `device` is "cuda": that of rank 0
    in a process that starts the ranks. Makes no GPU the current one, which would take memory there.
    Raises ConfigError where there is none.
    """
    gpu = {}
    if device != "cpu":
        _expect_gpu(device)
        placement = torchrun_placement()
        gpu = _describe(gpu_of_rank(placement.rank if placement else 0))
    return {**environment(), **occasion(), **gpu}


def _seconds_by_events(passes: Sequence[Pass]) -> list[float]:
    new_event = partial(torch.cuda.Event, enable_timing=True)
    marks = [new_event() for _ in range(len(passes) + 1)]
    torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    marks[0].record()
    for work, mark in zip(passes, marks[1:], strict=True):
        work()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
