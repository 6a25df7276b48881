"""Devices other than the CPU: their kernels, and how bytes are sent."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gradferry import _build_info, _native
from gradferry.core.agreement import no_backend, on_all_ranks
from gradferry.core.config import Config
from gradferry.core.rendezvous import is_known
from gradferry.errors import ConfigError, StateError

# For tests: a world of one exchanges with itself, so that a single device runs the whole path.
EXCHANGE_WHEN_ALONE = False
CPU = torch.device("cpu")


def on_streams(config: Config) -> Config:
    """The configuration with the messages that suit collectives in the order of streams."""
    return replace(config, chunk_bytes=_native.STREAM_CHUNK_BYTES, on_streams=True)


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


@contextmanager
def explaining_refusal(place: torch.device) -> Iterator[None]:
    """Makes a ConfigError of what CUDA says of kernels that do not run, such as "no kernel image is
    available for execution on the device", with what they are for.
    """
    try:
        yield
    except StateError as error:
        if place.type != "cuda":
            raise
        major, minor = torch.cuda.get_device_capability(place)
        raise ConfigError(
            f"{error}. gradferry's kernels are by {_build_info.CUDA_COMPILER} for "
            f"{_build_info.CUDA_ARCHITECTURES}, and {place} is {torch.cuda.get_device_name(place)} "
            f"of compute capability {major}.{minor}: if it is these that do not fit, update the "
            f"NVIDIA driver, or install gradferry again with CUDAARCHS={major}{minor} set"
        ) from error


def starts_in_order(device: torch.device) -> bool:
    """Whether the device starts collectives of several communicators in the order in which the host
    posts them, as NCCL 2.26 promises where its variable asks for it.
    """
    if device.type != "cuda" or os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1":
        return False
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    return version() >= (2, 26)


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


def expect_no_blocking(transport: Transport) -> None:
    """Checks that the group's collectives do not have the host wait for them.

    Raises:
        ConfigError: they do, as torch's variable asks for.
    """
    names = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
    says = {os.environ.get(name, "").lower() for name in names}
    on_streams = transport.device.type == "cuda" and transport.streams and transport.exchanges
    if on_streams and says & {"1", "y", "yes", "t", "true"}:  # as torch reads its variables
        raise ConfigError(
            "TORCH_NCCL_BLOCKING_WAIT is set, which has the host wait, by sleeps of a millisecond, "
            "for each of the hook's collectives in the middle of backward(): unset it before "
            "init_process_group(); errors and timeouts are noticed without it "
            "(TORCH_NCCL_ASYNC_ERROR_HANDLING)"
        )


def transport_of(device: torch.device, group: dist.ProcessGroup) -> Transport:
    """The transport of gradients on `device` that are averaged over `group`.

    Raises:
        ConfigError: the group has no backend for the device, or is bound to another one; or its
            collectives are on streams, and torch.distributed does not know it.
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
    alone = group.size() == 1
    backend = "" if on_host else group._get_backend(device).name()
    streams = not on_host and backend != "gloo"  # whose collectives wait on the host
    if streams and not is_known(group):
        raise ConfigError(
            f"torch.distributed does not know the process group, which has "
            f"{backend} for {device.type!r}; make it with "
            "torch.distributed.new_group(), or give it gloo for that device"
        )
    return Transport(
        device=device,
        exchanges=not alone or (EXCHANGE_WHEN_ALONE and not on_host),
        streams=streams,
    )


def agreed_transport(device: torch.device, group: dist.ProcessGroup) -> Transport:
    """Returns `transport_of` these, once every rank has kernels that run. Collective.

    Raises:
        ConfigError: of the lowest rank that has none, or whose group has no backend for its device.
    """

    def check() -> None:
        if device.type != CPU.type:
            load_kernels(device.type)
        expect_no_blocking(transport_of(device, group))

    on_all_ranks(check, group, device)
    return transport_of(device, group)
