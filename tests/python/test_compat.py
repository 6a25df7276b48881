"""gradferry._compat: one build of gradferry serves one minor version of torch."""

import pytest
import torch
from gradferry import _build_info
from gradferry._compat import check_torch

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
    assert _build_info.WIRE_VERSION == 1
