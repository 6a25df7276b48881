"""The source archive: all that is not built."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from gradferry import _build_info

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="git knows which files the archive should hold"
)


def test_the_archive_holds_every_file_of_the_repository_and_its_metadata(tmp_path: Path) -> None:
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", build, tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.iterdir()
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
