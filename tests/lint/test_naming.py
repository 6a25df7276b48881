"""What the package is called, and which torch its metadata asks for."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType

import gradferry
import pytest
import torch
from gradferry import _build_info
from gradferry_lab.info import facts

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"besides_torch": ["numpy>=1.26"]}


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "package_metadata", ROOT / "cmake/package_metadata.py"
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def described(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, object]]:
    """The version and dependencies of a build of gradferry 3.4 for torch 2.7 to 2.9."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(gradferry VERSION 3.4.5 LANGUAGES CXX)\n"
        "set(GRADFERRY_OLDEST_TORCH 2.7)\nset(GRADFERRY_NEWEST_TORCH 2.9)\n"
    )
    monkeypatch.setattr(tool, "ROOT", tmp_path)

    def of(build_state: str, torch_version: str | None) -> dict[str, object]:
        def version(name: str) -> str:
            assert name == "torch"
            if torch_version is None:
                raise metadata.PackageNotFoundError(name)
            return torch_version

        monkeypatch.setattr(tool.metadata, "version", version)
        provider = tool.Provider()
        provider.build_state(build_state)
        return provider.dynamic_metadata(SETTINGS, {})

    return of


@pytest.mark.parametrize("state", ["wheel", "editable", "metadata_wheel", "metadata_editable"])
@pytest.mark.parametrize("torch_version", ["2.9.0", "2.9.1+cu132", "2.9.0a0+git1"])
def test_a_wheel_names_and_requires_the_torch_it_was_built_with(described, state, torch_version):
    assert described(state, torch_version) == {
        "version": "3.4.5+torch2.9",
        "dependencies": ["torch==2.9.*", "numpy>=1.26"],
    }


@pytest.mark.parametrize("torch_version", [None, "2.9.0"])
def test_a_source_archive_has_the_plain_version_and_every_supported_torch(described, torch_version):
    assert described("sdist", torch_version) == {
        "version": "3.4.5",
        "dependencies": ["torch>=2.7,<2.10", "numpy>=1.26"],
    }


def test_a_wheel_from_a_source_archive_has_its_version_and_requires_one_torch(described, tmp_path):
    (tmp_path / "PKG-INFO").touch()
    assert described("wheel", "2.9.0") == {
        "version": "3.4.5",
        "dependencies": ["torch==2.9.*", "numpy>=1.26"],
    }


def test_without_torch_there_is_no_wheel_but_advice(described):
    with pytest.raises(SystemExit, match=r"install torch .* pip install --no-build-isolation"):
        described("metadata_wheel", None)


@pytest.mark.torch_core
def test_everything_names_the_same_version():
    torch_minor = ".".join(torch.__version__.split(".")[:2])
    assert re.fullmatch(r"\d+\.\d+\.\d+", _build_info.GRADFERRY_VERSION)
    assert gradferry.__version__ == f"{_build_info.GRADFERRY_VERSION}+torch{torch_minor}"
    assert metadata.version("gradferry") == gradferry.__version__
    assert facts()["gradferry"].startswith(f"{gradferry.__version__}, ")
    requirements = metadata.requires("gradferry")
    assert requirements is not None
    assert f"torch=={torch_minor}.*" in requirements
