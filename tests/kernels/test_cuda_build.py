"""On which GPUs and drivers a build runs, and what is said where it does not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gradferry import ConfigError, _build_info
from gradferry.core import device
from gradferry.core.device import CudaBuild, Target, parse_build, this_build, why_not

BUILD = CudaBuild(
    toolkit=(13, 0),
    machine_code=(Target((8, 0)), Target((9, 0)), Target((10, 0))),
    ptx=(Target((10, 0)),),
)


@pytest.mark.parametrize(
    ("architectures", "machine_code", "ptx"),
    [
        ("80-real 90-real 100", BUILD.machine_code, BUILD.ptx),
        ("80-virtual", (), (Target((8, 0)),)),
        (
            "90a-real 120f",
            (Target((9, 0), "a"), Target((12, 0), "f")),
            (Target((12, 0), "f"),),
        ),
    ],
)
def test_what_cmake_lists_is_understood(architectures, machine_code, ptx):
    build = parse_build("nvcc 13.0.88", architectures)
    assert build == CudaBuild((13, 0), machine_code, ptx)


@pytest.mark.parametrize(
    ("architectures", "runs", "translated", "neither"),
    [
        ("90-real", [(9, 0), (9, 1)], [], [(8, 9), (10, 0)]),
        ("90-virtual", [], [(9, 0), (9, 1), (10, 0), (12, 1)], [(8, 9)]),
        ("103-real", [(10, 3)], [], [(10, 0), (11, 0)]),
        # "a": this capability alone, PTX too.
        ("90a-real", [(9, 0)], [], [(8, 9), (9, 1), (10, 0)]),
        ("90a-virtual", [], [(9, 0)], [(8, 9), (9, 1), (10, 0)]),
        # "f": its family.
        ("100f-real", [(10, 0), (10, 3)], [], [(9, 0), (11, 0), (12, 0)]),
        ("103f-real", [(10, 3)], [], [(10, 0), (12, 0)]),
        ("100f-virtual", [], [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("90a 100-virtual", [(9, 0)], [(9, 0), (10, 0), (12, 0)], [(8, 0)]),
    ],
)
def test_code_runs_where_cuda_says(architectures, runs, translated, neither):
    build = parse_build("nvcc 13.0.88", architectures)
    assert build is not None
    for capability in {*runs, *translated, *neither}:
        assert build.has_machine_code(capability) == (capability in runs), capability
        assert build.has_ptx(capability) == (capability in translated), capability
        reason = why_not(build, (13, 0), capability, "it")
        assert (reason is None) == (capability not in neither), capability


def test_what_a_build_holds_is_said_with_its_limits():
    build = parse_build("nvcc 13.0.88", "80-real 90a 100f-virtual 120-virtual")
    assert str(build) == (
        "machine code for 8.0, 9.0a and PTX for 9.0a, 10.0f and PTX for 12.0 and newer"
    )


@pytest.mark.parametrize(
    ("compiler", "architectures"), [("", ""), ("nvcc 13.0.88", "native"), ("nvcc 13.0.88", "")]
)
def test_what_has_no_numbers_is_not_judged(compiler, architectures):
    assert parse_build(compiler, architectures) is None


def test_this_build_is_understood():
    assert (this_build() is None) == (not _build_info.CUDA_COMPILER)


@pytest.mark.parametrize(
    ("driver", "capability"),
    [
        ((13, 0), (8, 0)),
        ((13, 0), (8, 9)),  # machine code for 8.0
        ((13, 0), (10, 3)),
        ((13, 0), (12, 0)),  # PTX for 10.0
        ((13, 2), (9, 0)),
        ((14, 0), (12, 1)),
    ],
)
def test_what_runs_is_not_refused(driver, capability):
    assert why_not(BUILD, driver, capability, "cuda:0") is None


PTX_OF_13_2 = dataclasses.replace(BUILD, toolkit=(13, 2))
MACHINE_CODE_ALONE = dataclasses.replace(BUILD, ptx=())


@pytest.mark.parametrize(
    ("build", "driver", "capability", "says", "advises"),
    [
        (BUILD, None, (9, 0), "no NVIDIA driver", "install one, or move the model to the CPU"),
        (
            BUILD,
            (12, 8),
            (9, 0),
            "driver supports CUDA up to 12.8, and gradferry's kernels were built with CUDA 13.0",
            "update the driver, or install gradferry again with nvcc of CUDA 12",
        ),
        (
            BUILD,
            (13, 0),
            (7, 0),
            "cuda:0 has compute capability 7.0, and gradferry's kernels need 8.0 or newer",
            "train on a newer GPU, or attach with codec='off'",
        ),
        (
            MACHINE_CODE_ALONE,
            (13, 0),
            (12, 0),
            "capability 12.0, and this installation of gradferry holds machine code for 8.0, 9.0, "
            "10.0",
            "with CUDAARCHS=120 set",
        ),
        (
            PTX_OF_13_2,
            (13, 0),
            (12, 0),
            "holds PTX only, made by CUDA 13.2, and the NVIDIA driver translates that of CUDA 13.0",
            "update the driver, or install gradferry again with CUDAARCHS=120 set",
        ),
    ],
)
def test_what_does_not_run_is_refused_with_advice(build, driver, capability, says, advises):
    reason = why_not(build, driver, capability, "cuda:0")
    assert reason is not None
    before, colon, after = reason.rpartition(": ")
    assert colon
    assert says in before
    assert advises in after


def test_machine_code_needs_the_major_version_of_the_driver_alone():
    assert why_not(PTX_OF_13_2, (13, 0), (9, 0), "cuda:0") is None


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
