"""The archives of tests/kernels/golden."""

from __future__ import annotations

import tarfile
from functools import cache
from pathlib import Path


@cache
def golden(archive: str) -> dict[str, bytes]:
    """The files of an archive, by name without `.bin`."""
    path = Path(__file__).parents[1] / "kernels" / "golden" / f"{archive}.tar"
    with tarfile.open(path) as opened:
        return {
            member.name.removesuffix(".bin"): file.read()
            for member in opened
            if (file := opened.extractfile(member))
        }
