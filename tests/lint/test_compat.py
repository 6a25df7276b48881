"""gradferry._compat: one build of gradferry serves one minor version of torch."""

import pytest
import torch
from gradferry import _build_info, _compat
from gradferry._compat import check_torch
from gradferry.core import device
from gradferry_lab.info import facts

pytestmark = pytest.mark.torch_core


def test_check_torch_accepts_the_running_torch():
    check_torch(torch.__version__)


@pytest.mark.parametrize("running", ["2.11.0", "2.11.1", "2.11.0+cpu", "2.11.0a0+git1"])
def test_check_torch_accepts_the_same_minor_version(running):
    check_torch(running, built_against="2.11.0+cu130")


def refused(running: str, built_against: str) -> str:
    with pytest.raises(ImportError) as error:
        check_torch(running, built_against)
    message = str(error.value)
    assert "\n" not in message
    assert f"built against torch {built_against} but runs with torch {running}: " in message
    return message


@pytest.mark.parametrize(
    ("running", "built_against"), [("2.12.0", "2.11.0"), ("2.11.1+cpu", "2.15.0+cu132")]
)
def test_check_torch_advises_a_wheel_or_a_build_for_a_torch_that_is_supported(
    running, built_against
):
    message = refused(running, built_against)
    assert f"version ends in +torch{running[:4]}," in message
    assert "pip install --no-build-isolation --force-reinstall --no-deps ." in message


@pytest.mark.parametrize("running", ["2.1.0", "2.10.2", "3.11.0"])
def test_check_torch_advises_another_torch_where_no_build_can_help(running, monkeypatch):
    monkeypatch.setattr(_compat, "OLDEST_TORCH", "2.11")
    monkeypatch.setattr(_compat, "NEWEST_TORCH", "2.15")
    message = refused(running, "2.14.0")
    assert "supports torch 2.11 to 2.15, and no build of it torch" in message
    assert "install torch 2.14" in message
    assert ("newer gradferry" in message) == (running == "3.11.0")
    assert "pip install" not in message


def test_build_info_describes_this_build():
    assert _build_info.TORCH_VERSION == torch.__version__
    assert _build_info.WIRE_VERSION == 2


def test_cuda_kernels_load_without_a_gpu_or_there_are_none():
    if _build_info.CUDA_COMPILER:
        device.load_kernels("cuda")
        assert (
            f"{_build_info.CUDA_COMPILER} for {_build_info.CUDA_ARCHITECTURES}" in facts()["CUDA"]
        )
    else:
        assert facts()["CUDA"].startswith("no kernels in this build")
    assert f"{torch.cuda.device_count()} devices" in facts()["CUDA"]
