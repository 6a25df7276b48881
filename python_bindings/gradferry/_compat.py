"""Refuses to load the native module with another torch than the one it was built against."""

import torch

from gradferry._build_info import GRADFERRY_VERSION, NEWEST_TORCH, OLDEST_TORCH, TORCH_VERSION


def check_torch(running: str = torch.__version__, built_against: str = TORCH_VERSION) -> None:
    """Compares the major and minor numbers of two torch versions.

    The C++ interface of DDP differs between minor versions of torch, so one build serves one of
    them. Call this before the native module is imported.

    Args:
        running: `torch.__version__` of the process.
        built_against: the version this copy of gradferry was built against.

    Raises:
        ImportError: they differ; the message names both, and what to install.
    """
    if _minor(running) == _minor(built_against):
        return
    raise ImportError(
        f"gradferry was built against torch {built_against} but runs with torch {running}: install "
        f"torch {_minor(built_against)}; or, if it is of those that gradferry {GRADFERRY_VERSION} "
        f"supports ({OLDEST_TORCH} to {NEWEST_TORCH}), the gradferry whose version ends in "
        f"+torch{_minor(running)}, built in its source folder with "
        "`pip install --no-build-isolation --force-reinstall --no-deps .`"
    )


def _minor(version: str) -> str:
    """Major and minor number."""
    return ".".join(version.split(".")[:2])
