"""Devices other than the CPU: their kernels, and how bytes are sent from them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gradferry import _native
from gradferry.core.config import Config
from gradferry.errors import ConfigError

# Most payload bytes per owner, stage and chunk where collectives are enqueued on streams. A chunk
# costs a dozen launches, so it should be megabytes.
STREAM_CHUNK_BYTES = 4 << 20
# For tests: a world of one exchanges with itself, so that a single device runs the whole path.
EXCHANGE_WHEN_ALONE = False
CPU = torch.device("cpu")

_REBUILD = (
    "install gradferry again where nvcc is found "
    "(pip install --no-build-isolation --config-settings=cmake.define.GRADFERRY_CUDA=ON .), "
    "or move the model to the CPU"
)


def _cuda_library() -> object:
    if importlib.util.find_spec("gradferry._cuda") is None:
        raise ConfigError(f"this installation of gradferry has no CUDA kernels; {_REBUILD}")
    try:
        return importlib.import_module("gradferry._cuda").device_library()
    except ImportError as error:
        raise ConfigError(
            f"gradferry's CUDA kernels cannot be loaded: {error}; {_REBUILD}"
        ) from error


# By device type: loads its kernels.
LIBRARIES: dict[str, Callable[[], object]] = {"cuda": _cuda_library}
_loaded: str | None = None


def load_kernels(device_type: str) -> None:
    """Makes the kernels of a device available to the engine.

    Args:
        device_type: such as ``"cuda"``.

    Raises:
        ConfigError: there are none for it, or they cannot be loaded.
    """
    global _loaded
    if _loaded == device_type:
        return
    if device_type not in LIBRARIES:
        raise ConfigError(
            f"there are no codecs for gradients on {device_type!r}; move the model to the CPU or a "
            "CUDA device"
        )
    _native.use_device_library(LIBRARIES[device_type]())
    _loaded = device_type


def is_staged(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group's collectives for the device wait on the host: gloo's do, NCCL's do not."""
    return group._get_backend(device).name() == "gloo"


@dataclass(frozen=True)
class Transport:
    """How the bytes of a model's gradients reach the other ranks.

    Attributes:
        device: where the gradients are.
        exchanges: whether anything is sent at all.
        streams: whether the group's collectives run in the order of the device's streams; else
            bytes are sent from host memory.
    """

    device: torch.device
    exchanges: bool
    streams: bool

    @property
    def on_host(self) -> bool:
        """Whether gradients are on the CPU."""
        return self.device.type == "cpu"

    def adapted(self, config: Config) -> Config:
        """The configuration with chunks of the size that suits this transport."""
        return replace(config, chunk_bytes=STREAM_CHUNK_BYTES) if self.streams else config


def transport_of(device: torch.device, group: dist.ProcessGroup) -> Transport:
    """The transport of gradients on `device` that are averaged over `group`."""
    on_host = device.type == "cpu"
    alone = dist.get_world_size(group) == 1
    return Transport(
        device=device,
        exchanges=not alone or (EXCHANGE_WHEN_ALONE and not on_host),
        streams=not on_host and not is_staged(group, device),
    )
