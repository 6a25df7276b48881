"""Refuses to load the native module with another torch than the one it was built against."""

import torch

from gradferry._build_info import TORCH_VERSION


def check_torch(running: str = torch.__version__, built_against: str = TORCH_VERSION) -> None:
    """Compares the major and minor numbers of two torch versions.

    The C++ interface of DDP differs between minor versions of torch, so one build serves one of
    them. Call this before the native module is imported.

    Args:
        running: `torch.__version__` of the process.
        built_against: the version this copy of gradferry was built against.

    Raises:
        ImportError: they differ; the message names both and the command that rebuilds.
    """
    if running.split(".")[:2] != built_against.split(".")[:2]:
        raise ImportError(
            f"gradferry was built against torch {built_against} but runs with torch {running}: "
            "rebuild it with `pip install --no-build-isolation --force-reinstall --no-deps .`"
        )
