"""Where kernels come from, on which GPUs and drivers a build runs, and what is said otherwise."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.util

import pytest
import torch
from gradferry import ConfigError, _build_info, _native
from gradferry.core import device
from gradferry.core.device import CudaBuild, parse_build, this_build, why_not

BUILD = CudaBuild(
    toolkit=(13, 0),
    machine_code=((8, 0), (9, 0), (10, 0)),
    ptx=((10, 0),),
)


@pytest.mark.parametrize(
    ("architectures", "held"),
    [
        ("80-real 90-real 100", "machine code for 8.0, 9.0, 10.0 and PTX for 10.0 and newer"),
        ("80-virtual", "PTX for 8.0 and newer"),
        ("native", None),  # these have no numbers to judge by
        ("90a", None),
        ("", None),
    ],
)
def test_what_cmake_lists_is_understood(architectures, held):
    build = parse_build("nvcc 13.0.88", architectures)
    assert (build and str(build)) == held
    assert build is None or build.toolkit == (13, 0)


@pytest.mark.parametrize(
    ("architectures", "runs", "translated", "neither"),
    [
        ("90-real", [(9, 0), (9, 1)], [], [(8, 9), (10, 0)]),
        ("90-virtual", [], [(9, 0), (9, 1), (10, 0), (12, 1)], [(8, 9)]),
        ("103-real", [(10, 3)], [], [(10, 0), (11, 0)]),
        ("90 100-virtual", [(9, 0)], [(10, 0), (12, 0)], [(8, 0)]),
    ],
)
def test_code_runs_where_cuda_says(architectures, runs, translated, neither):
    build = parse_build("nvcc 13.0.88", architectures)
    assert build is not None
    for capability in {*runs, *translated, *neither}:
        assert build.has_machine_code(capability) == (capability in runs), capability
        reason = why_not(build, (13, 0), capability, "it")
        assert (reason is None) == (capability not in neither), capability


def test_this_build_is_understood():
    assert (this_build() is None) == (not _build_info.CUDA_COMPILER)


PTX_OF_13_2 = dataclasses.replace(BUILD, toolkit=(13, 2))
MACHINE_CODE_ALONE = dataclasses.replace(BUILD, ptx=())


@pytest.mark.parametrize(
    ("build", "driver", "capability", "named"),
    [
        (BUILD, None, (9, 0), ["no NVIDIA driver"]),
        (BUILD, (12, 8), (9, 0), ["12.8", "13.0", "nvcc of CUDA 12"]),
        (BUILD, (13, 0), (7, 0), ["cuda:0", "7.0", "8.0", "codec='off'"]),
        (MACHINE_CODE_ALONE, (13, 0), (12, 0), ["12.0", "8.0, 9.0, 10.0", "CUDAARCHS=120"]),
        (PTX_OF_13_2, (13, 0), (12, 0), ["PTX", "13.2", "13.0", "CUDAARCHS=120"]),
        (PTX_OF_13_2, (13, 0), (9, 0), []),  # machine code needs the driver's major version alone
        (BUILD, (14, 0), (12, 1), []),
    ],
)
def test_what_does_not_run_is_refused_with_advice(build, driver, capability, named):
    reason = why_not(build, driver, capability, "cuda:0")
    assert (reason is None) == (not named)
    if reason is None:
        return
    assert ": " in reason  # what it is, and what to do
    assert all(name in reason for name in named), reason


def test_a_gpu_too_old_is_refused_before_kernels_are_loaded(monkeypatch):
    monkeypatch.setattr(device, "this_build", lambda: BUILD)
    monkeypatch.setattr(device, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "an old one")
    with pytest.raises(ConfigError, match=r"cuda:3 \(an old one\) has compute capability 6.1"):
        device.expect_runnable(torch.device("cuda", 3))


def test_other_devices_and_builds_without_numbers_are_not_judged(monkeypatch):
    device.expect_runnable(torch.device("meta"))
    monkeypatch.setattr(device, "this_build", lambda: None)
    device.expect_runnable(torch.device("cuda", 0))


def test_a_machine_without_a_driver_says_so(monkeypatch):
    def fail(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(device.ctypes, "CDLL", fail)
    assert device.driver_version() is None


def test_a_build_without_cuda_kernels_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="no CUDA kernels; install gradferry again where nvcc"):
        device.LIBRARIES["cuda"]()


def test_kernels_that_cannot_be_loaded_are_named_with_the_reason(monkeypatch):
    def fail(name: str) -> None:
        raise ImportError("undefined symbol: cudaLaunchKernel")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigError) as error:
        device.LIBRARIES["cuda"]()
    assert "cannot be loaded: undefined symbol: cudaLaunchKernel" in str(error.value)
    assert "cmake.define.GRADFERRY_CUDA=ON" in str(error.value)


def test_a_device_without_kernels_is_refused_by_name():
    with pytest.raises(ConfigError, match="no codecs for gradients on 'meta'; move the model to"):
        device.load_kernels("meta")


def test_only_a_device_library_is_taken():
    with pytest.raises(ConfigError, match="not a device library: a capsule named 'datetime"):
        _native.use_device_library(datetime.datetime_CAPI)
