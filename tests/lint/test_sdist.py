"""The source archive: all that is not built, and what is built from it."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from gradferry import _build_info

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="git knows which files the archive should hold"
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, folder], cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return path


def test_the_archive_holds_every_file_of_the_repository_and_its_metadata(archive):
    version = _build_info.GRADFERRY_VERSION
    assert archive.name == f"gradferry-{version}.tar.gz"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    expected = {name for name in files.stdout.splitlines() if (ROOT / name).exists()}
    with tarfile.open(archive) as opened:
        held = {name.partition("/")[2] for name in opened.getnames()}
        described = opened.extractfile(f"gradferry-{version}/PKG-INFO")
        assert described is not None
        metadata = email.message_from_binary_file(described)
    assert held == expected | {"PKG-INFO"}
    assert metadata["Version"] == version
    assert metadata["Dynamic"] == "Requires-Dist"
    major, minor = _build_info.NEWEST_TORCH.split(".")
    torches = f"torch<{major}.{int(minor) + 1},>={_build_info.OLDEST_TORCH}"
    assert torches in metadata.get_all("Requires-Dist")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_wheel_from_the_archive_has_its_version_and_one_torch(archive, tmp_path):
    subprocess.run(
        [
            *[sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"],
            *["--config-settings=cmake.define.GRADFERRY_CUDA=OFF", "--wheel-dir", tmp_path],
            archive,
        ],
        env={**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())},
        check=True,
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("gradferry-*.whl")
    version = _build_info.GRADFERRY_VERSION
    minor = ".".join(torch.__version__.split(".")[:2])
    with zipfile.ZipFile(wheel) as opened:
        metadata = email.message_from_bytes(opened.read(f"gradferry-{version}.dist-info/METADATA"))
        opened.extractall(tmp_path / "site")
    assert f"torch=={minor}.*" in metadata.get_all("Requires-Dist")
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            "import gradferry; print(gradferry.__file__, gradferry.__version__)",
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    path, loaded = shown.stdout.split()
    assert Path(path).is_relative_to(tmp_path)
    assert loaded == version
