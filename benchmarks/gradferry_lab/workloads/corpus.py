"""The text that tasks and examples train on: the same bytes on every machine and every Python.

It is the source of sympy, which torch requires, so that nothing is downloaded for it: the .py files
that lie directly in a sub-package (`sympy/*/*.py`).
"""

from __future__ import annotations

import hashlib
from importlib import metadata, util
from pathlib import Path

from gradferry.errors import ConfigError

SYMPY_VERSION = "1.14.0"
_SHA256 = "0a0f8348ee3990cf3faa3a5fa3d0ed3b051eb33c0599408e83d882f444ae8667"  # of all files in turn


def source_files() -> list[bytes]:
    """The files of the corpus in the order of their POSIX paths, 456 with 10.2 MB.

    Raises ConfigError when sympy is missing, has another version, or was changed.
    """
    folder = _sympy_folder()
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*.py"))
    files = [(folder / path).read_bytes() for path in paths]
    digest = hashlib.sha256(b"".join(files)).hexdigest()
    if digest != _SHA256:
        version = _installed_version()
        raise _other_text(
            f"sympy {version} in {folder} with {len(files)} files of SHA-256 {digest}",
            # pip leaves a changed installation of the right version alone, unless it is told not to
            "--force-reinstall " if version == SYMPY_VERSION else "",
        )
    return files


def _sympy_folder() -> Path:
    """Found without importing sympy, which takes long."""
    spec = util.find_spec("sympy")
    if spec is None or spec.origin is None:
        raise _other_text("no sympy")
    return Path(spec.origin).parent


def _installed_version() -> str:
    try:
        return metadata.version("sympy")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _other_text(found: str, pip_flag: str = "") -> ConfigError:
    return ConfigError(
        f"the text to train on is the files sympy/*/*.py of sympy {SYMPY_VERSION}, of SHA-256 "
        f"{_SHA256}; this Python has {found}: run `pip install {pip_flag}sympy=={SYMPY_VERSION}`"
    )
