"""The GPU that a benchmark is to use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gradferry.errors import ConfigError


@dataclass(frozen=True)
class TimedDevice:
    """A device and what is said about it.

    Attributes:
        device: where tensors are.
        environment: for the JSON file.
    """

    device: torch.device
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
    return TimedDevice(
        device=torch.device("cuda", index),
        environment={
            "gpu": torch.cuda.get_device_properties(index).name,
            "cuda": torch.version.cuda,
            "cuda driver": torch._C._cuda_getDriverVersion(),  # type: ignore[attr-defined]
        },
    )
