"""gradferry._compat: one build of gradferry serves one minor version of torch."""

import pytest
import torch
from gradferry import ConfigError, _build_info, _native
from gradferry._compat import check_torch
from gradferry.core import device
from gradferry.lab.info import facts

pytestmark = pytest.mark.torch_core


def test_check_torch_accepts_the_running_torch():
    check_torch(torch.__version__)


@pytest.mark.parametrize("running", ["2.11.0", "2.11.1", "2.11.0+cpu", "2.11.0a0+git1"])
def test_check_torch_accepts_the_same_minor_version(running):
    check_torch(running, built_against="2.11.0+cu130")


@pytest.mark.parametrize("running", ["2.1.0", "2.12.0", "3.11.0"])
def test_check_torch_refuses_another_minor_version_in_one_line(running):
    with pytest.raises(ImportError) as error:
        check_torch(running, built_against="2.11.0")
    message = str(error.value)
    assert "\n" not in message
    assert "torch 2.11.0" in message
    assert f"torch {running}" in message
    assert "pip install --no-build-isolation" in message


def test_build_info_describes_this_build():
    assert _build_info.TORCH_VERSION == torch.__version__
    assert _build_info.WIRE_VERSION == 2


def test_cuda_kernels_are_all_there_and_named_or_there_are_none():
    if _build_info.CUDA_COMPILER:
        device.load_kernels("cuda")  # needs no GPU
    on_cuda = [codec["name"] for codec in _native.codecs("cuda")]
    if _build_info.CUDA_COMPILER:
        assert on_cuda == [codec["name"] for codec in _native.codecs("cpu")]
        assert (
            f"{_build_info.CUDA_COMPILER} for {_build_info.CUDA_ARCHITECTURES}" in facts()["CUDA"]
        )
    else:
        assert on_cuda == []
        assert facts()["CUDA"].startswith("no kernels in this build")
    assert f"{torch.cuda.device_count()} devices" in facts()["CUDA"]


def test_codecs_refuses_an_unknown_device():
    with pytest.raises(ConfigError, match="'cpu' or 'cuda', not 'tpu'"):
        _native.codecs("tpu")
