"""On which GPUs, and with which drivers, the CUDA kernels of a build run.

Machine code for compute capability X.Y runs on X.Z with Z >= Y. PTX for X.Y runs on X.Y and all
newer ones: the driver translates it, which takes up to a minute and a driver that is not older than
the toolkit. Any driver of the toolkit's major version runs machine code.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

from gradferry import _build_info

Version = tuple[int, int]


@dataclass(frozen=True)
class CudaBuild:
    """What a build was made with and for.

    Attributes:
        toolkit: version of CUDA.
        machine_code: compute capabilities that it holds machine code for.
        ptx: compute capabilities that it holds PTX for.
    """

    toolkit: Version
    machine_code: tuple[Version, ...]
    ptx: tuple[Version, ...]

    def has_machine_code(self, capability: Version) -> bool:
        """Whether a GPU runs the kernels as they are."""
        major, minor = capability
        return any(has == major and least <= minor for has, least in self.machine_code)

    def has_ptx(self, capability: Version) -> bool:
        """Whether a GPU runs what a driver makes of the PTX."""
        return any(least <= capability for least in self.ptx)

    def __str__(self) -> str:
        held = [f"machine code for {shown(*self.machine_code)}"] if self.machine_code else []
        held += [f"PTX for {shown(*self.ptx)} and newer"] if self.ptx else []
        return " and ".join(held)


def parse_build(compiler: str, architectures: str) -> CudaBuild | None:
    """The build as CMake describes it; None without kernels, or for words that have no number.

    Args:
        compiler: such as ``"nvcc 13.0.88"``; empty without kernels.
        architectures: of CMAKE_CUDA_ARCHITECTURES, such as ``"80-real 90"``: ``-real`` is machine
            code alone, ``-virtual`` PTX alone, a bare number both.
    """
    toolkit = re.fullmatch(r"nvcc (\d+)\.(\d+).*", compiler)
    found = [re.fullmatch(r"(\d+)(\d)[af]?(-real|-virtual)?", a) for a in architectures.split()]
    if toolkit is None or not found or not all(found):
        return None
    kinds = [((int(m[1]), int(m[2])), m[3]) for m in found if m]
    return CudaBuild(
        toolkit=(int(toolkit[1]), int(toolkit[2])),
        machine_code=tuple(version for version, kind in kinds if kind != "-virtual"),
        ptx=tuple(version for version, kind in kinds if kind != "-real"),
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
    newest, oldest = shown(build.toolkit), min((*build.machine_code, *build.ptx))
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
    if capability < oldest:
        return (
            f"{gpu} has compute capability {shown(capability)}, and gradferry's kernels need "
            f"{shown(oldest)} or newer: train on a newer GPU, or attach with codec='off'"
        )
    again = f"install gradferry again with CUDAARCHS={capability[0]}{capability[1]} set"
    if not build.has_ptx(capability):
        return (
            f"{gpu} has compute capability {shown(capability)}, and this installation of gradferry "
            f"holds {build}: {again}"
        )
    if driver < build.toolkit:
        return (
            f"{gpu} has compute capability {shown(capability)}, for which this installation of "
            f"gradferry holds PTX only, made by CUDA {newest}, and the NVIDIA driver translates "
            f"that of CUDA {shown(driver)} and older: update the driver, or {again}"
        )
    return None


def shown(*versions: Version) -> str:
    """ "8.0, 9.0"."""
    return ", ".join(f"{major}.{minor}" for major, minor in versions)
