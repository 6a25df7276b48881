"""Devices other than the CPU: their kernels, where these run, and how bytes are sent.

Machine code for compute capability X.Y runs on X.Z with Z >= Y. PTX for X.Y runs on X.Y and all
newer ones: the driver translates it, which takes up to a minute and a driver that is not older than
the toolkit. Any driver of the toolkit's major version runs machine code (CUDA C++ Programming
Guide, "Feature Availability").
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from gradferry import _build_info, _native
from gradferry.core.agreement import no_backend, on_all_ranks
from gradferry.core.config import Config
from gradferry.core.rendezvous import is_known
from gradferry.errors import ConfigError

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
            expect_runnable(device)
        expect_no_blocking(transport_of(device, group))

    on_all_ranks(check, group, device)
    return transport_of(device, group)


Version = tuple[int, int]


@dataclass(frozen=True)
class CudaBuild:
    """What a build was made with and for.

    Attributes:
        toolkit: version of CUDA.
        machine_code: compute capabilities that it holds machine code for.
        ptx: those that it holds PTX for.
    """

    toolkit: Version
    machine_code: tuple[Version, ...]
    ptx: tuple[Version, ...]

    def has_machine_code(self, capability: Version) -> bool:
        """Whether a GPU runs the kernels as they are."""
        major, minor = capability
        return any(has == major and least <= minor for has, least in self.machine_code)

    def __str__(self) -> str:
        held = [f"machine code for {shown(*self.machine_code)}"] if self.machine_code else []
        held += [f"PTX for {shown(*self.ptx)} and newer"] if self.ptx else []
        return " and ".join(held)


def parse_build(compiler: str, architectures: str) -> CudaBuild | None:
    """The build as CMake describes it; None without kernels, or for words that are no numbers, such
    as the "90a" of code for one GPU alone.

    Args:
        compiler: such as ``"nvcc 13.0.88"``; empty without kernels.
        architectures: of CMAKE_CUDA_ARCHITECTURES, such as ``"80-real 90"``: ``-real`` is machine
            code alone, ``-virtual`` PTX alone, without either it is both.
    """
    toolkit = re.fullmatch(r"nvcc (\d+)\.(\d+).*", compiler)
    found = [re.fullmatch(r"(\d+)(\d)(-real|-virtual)?", a) for a in architectures.split()]
    if toolkit is None or not found or not all(found):
        return None
    kinds = [((int(m[1]), int(m[2])), m[3]) for m in found if m]
    return CudaBuild(
        toolkit=(int(toolkit[1]), int(toolkit[2])),
        machine_code=tuple(target for target, kind in kinds if kind != "-virtual"),
        ptx=tuple(target for target, kind in kinds if kind != "-real"),
    )


def this_build() -> CudaBuild | None:
    """What this installation was built for; None without CUDA kernels."""
    return parse_build(_build_info.CUDA_COMPILER, _build_info.CUDA_ARCHITECTURES)


def driver_version() -> Version | None:
    """The newest CUDA that this machine's driver supports; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def why_not(build: CudaBuild, driver: Version | None, capability: Version, gpu: str) -> str | None:
    """Why the kernels of a build cannot run, and what to do; None if they can.

    Args:
        build: which holds the kernels.
        driver: the newest CUDA that the driver supports; None without a driver.
        capability: of the GPU.
        gpu: what to call it.
    """
    newest = shown(build.toolkit)
    oldest = min((*build.machine_code, *build.ptx))
    if driver is None:
        return "this machine has no NVIDIA driver: install one, or move the model to the CPU"
    if driver[0] < build.toolkit[0]:
        return (
            f"the NVIDIA driver supports CUDA up to {shown(driver)}, and gradferry's kernels were "
            f"built with CUDA {newest}: update the driver, or install gradferry again with nvcc of "
            f"CUDA {driver[0]}"
        )
    if build.has_machine_code(capability):
        return None
    found = f"{gpu} has compute capability {shown(capability)}, and gradferry's kernels are {build}"
    if capability < oldest:
        return f"{found}: train on a newer GPU, or attach with codec='off'"
    again = f"install gradferry again with CUDAARCHS={capability[0]}{capability[1]} set"
    if not any(target <= capability for target in build.ptx):
        return f"{found}: {again}"
    if driver < build.toolkit:
        return (
            f"{found}, made by CUDA {newest}, and the NVIDIA driver translates PTX of CUDA "
            f"{shown(driver)} and older: update the driver, or {again}"
        )
    return None


def shown(*versions: Version) -> str:
    """ "8.0, 9.0"."""
    return ", ".join(f"{major}.{minor}" for major, minor in versions)
