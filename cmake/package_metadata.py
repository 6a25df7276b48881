"""Version and dependencies of the package, for pyproject.toml: a wheel's are those of one torch.

The C++ interface of DDP differs between minor versions of torch, so that a wheel serves one of
them: its version names it, as in 0.2.0+torch2.15, and its metadata requires it. A source archive
has the plain version and requires any supported torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def from_cmake(name: str) -> str:
    """A version that the CMakeLists.txt of this folder's parent names, such as 0.2.0 or 2.15."""
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.search(rf"\b{name} ([0-9.]+)", text)
    if found is None:
        raise SystemExit(f"{ROOT / 'CMakeLists.txt'} does not say {name}")
    return found[1]


def installed_torch() -> str:
    """Major and minor number of the torch of this Python, such as "2.15".

    Raises:
        SystemExit: there is none. It ends pip, before that downloads a torch of several gigabytes
            for the environment in which the package is to run.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise SystemExit(
            "gradferry is built against the torch it will run with, and the Python that builds it "
            "has none: install torch and scikit-build-core, then run: "
            "pip install --no-build-isolation ."
        ) from None
    return ".".join(version.split(".")[:2])


class Provider:
    """What scikit-build-core asks, entry by entry of `tool.dynamic-metadata`."""

    def build_state(self, build_state: str) -> None:
        """Called first: "sdist", or one of the ways to build a wheel."""
        self._is_sdist = build_state == "sdist"

    def dynamic_metadata(
        self, settings: Mapping[str, Any], _project: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns `version` and `dependencies`: torch, and what `settings` lists besides it."""
        version = from_cmake("gradferry VERSION")
        if self._is_sdist:
            major, minor = from_cmake("GRADFERRY_NEWEST_TORCH").split(".")
            torch = f"torch>={from_cmake('GRADFERRY_OLDEST_TORCH')},<{major}.{int(minor) + 1}"
        else:
            torch = f"torch=={installed_torch()}.*"
            # A source archive fixes the version of what is built from it.
            if not (ROOT / "PKG-INFO").exists():
                version += f"+torch{installed_torch()}"
        return {"version": version, "dependencies": [torch, *settings["besides_torch"]]}

    def dynamic_wheel(self, _settings: Mapping[str, Any]) -> dict[str, bool]:
        """Which fields of a source archive are others in a wheel that is built from it."""
        return {"dependencies": True}
