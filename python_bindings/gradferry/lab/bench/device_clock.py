"""How long work on a device takes, by its own clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from gradferry.errors import ConfigError
from gradferry.forecast.clock import HEAD_START_CYCLES
from gradferry.lab.output.environment import environment, occasion

Pass = Callable[[], object]


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
    device = torch.device(wanted)
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--device {wanted}: torch {torch.__version__} sees no GPU on this machine; run this "
            "where there is one, or leave the option out to measure the CPU"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {wanted}: this machine has GPUs 0 to {torch.cuda.device_count() - 1}"
        )
    torch.cuda.set_device(index)
    properties = torch.cuda.get_device_properties(index)
    return TimedDevice(
        device=torch.device("cuda", index),
        cache_bytes=properties.L2_cache_size,
        clock=_seconds_by_events,
        environment={
            "gpu": properties.name,
            "cuda": torch.version.cuda,
            "cuda driver": torch._C._cuda_getDriverVersion(),  # type: ignore[attr-defined]
        },
    )


def environment_on(device: str) -> dict[str, Any]:
    """The environment for the JSON file, with the GPU if `device` is "cuda". Raises ConfigError
    where there is none.
    """
    gpu = {} if device == "cpu" else find_gpu(device).environment
    return {**environment(), **occasion(), **gpu}


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _seconds_by_events(passes: Sequence[Pass]) -> list[float]:
    marks = [_timing_event() for _ in range(len(passes) + 1)]
    torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    marks[0].record()
    for work, mark in zip(passes, marks[1:], strict=True):
        work()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
