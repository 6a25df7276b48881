"""Devices other than the CPU: their kernels, and how bytes are sent from them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gradferry import _native
from gradferry.core.agreement import (
    Record,
    error_record,
    gather_records,
    meeting_place,
    no_backend,
    raise_first_error,
)
from gradferry.core.config import Config
from gradferry.core.cuda_build import driver_version, this_build, why_not
from gradferry.errors import ConfigError, GradferryError

# Most payload bytes per owner, stage and chunk, in small worlds, where collectives are enqueued on
# streams. A chunk costs launches and two collectives, so it should be megabytes.
STREAM_CHUNK_BYTES = 4 << 20
# For tests: a world of one exchanges with itself, so that a single device runs the whole path.
EXCHANGE_WHEN_ALONE = False
CPU = torch.device("cpu")


def on_streams(config: Config) -> Config:
    """The configuration with the messages that suit collectives in the order of streams."""
    return replace(config, chunk_bytes=STREAM_CHUNK_BYTES, equal_scatter=True)


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


def expect_runnable(place: torch.device) -> None:
    """Checks that the kernels of this installation run on a device.

    Raises:
        ConfigError: its GPU, or the driver, is too old for them.
    """
    build = this_build() if place.type == "cuda" else None
    if build is None:
        return
    capability = torch.cuda.get_device_capability(place)
    gpu = f"{place} ({torch.cuda.get_device_name(place)})"
    reason = why_not(build, driver_version(), capability, gpu)
    if reason is not None:
        raise ConfigError(reason)


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
        """The configuration with chunks and messages that suit this transport."""
        return on_streams(config) if self.streams else config


def transport_of(device: torch.device, group: dist.ProcessGroup) -> Transport:
    """The transport of gradients on `device` that are averaged over `group`.

    Raises:
        ConfigError: the group has no backend for the device, or is bound to another one.
    """
    on_host = device.type == "cpu"
    if device.type not in {kind.type for kind in group._device_types}:
        raise no_backend(group, device)
    bound = group.bound_device_id
    if bound is not None and bound.type == device.type and bound != device:
        raise ConfigError(
            f"the model is on {device}, the process group on {bound}: call "
            f"torch.cuda.set_device() and init_process_group(device_id=torch.device('{device}')) "
            "before anything else, on every rank with its own GPU"
        )
    alone = dist.get_world_size(group) == 1
    return Transport(
        device=device,
        exchanges=not alone or (EXCHANGE_WHEN_ALONE and not on_host),
        streams=not on_host and not is_staged(group, device),
    )


def agreed_transport(device: torch.device, group: dist.ProcessGroup) -> Transport:
    """Returns `transport_of` these, once every rank has kernels that run. Collective.

    Raises:
        ConfigError: of the lowest rank that has none, or whose group has no backend for its device.
    """
    record: Record = {}
    try:
        if device.type != CPU.type:
            load_kernels(device.type)
            expect_runnable(device)
        transport = transport_of(device, group)
    except GradferryError as error:
        record = error_record(error)
    raise_first_error(gather_records(record, group, meeting_place(group, device)), group)
    return transport
