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
    has, needs = _minor(running), _minor(built_against)
    if has == needs:
        return
    name = ".".join(map(str, has))
    back = f"install torch {'.'.join(map(str, needs))}"
    if _minor(OLDEST_TORCH) <= has <= _minor(NEWEST_TORCH):
        advice = (
            f"install the gradferry whose version ends in +torch{name}, or build it in its source "
            "folder with `pip install --no-build-isolation --force-reinstall --no-deps .`"
        )
    else:
        supports = f"gradferry {GRADFERRY_VERSION} supports torch {OLDEST_TORCH} to {NEWEST_TORCH}"
        newer = has > _minor(NEWEST_TORCH)
        advice = f"{supports}, and no build of it torch {name}; {back}" + (
            ", or a newer gradferry, which may support it" if newer else ""
        )
    raise ImportError(
        f"gradferry was built against torch {built_against} but runs with torch {running}: {advice}"
    )


def _minor(version: str) -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(map(int, version.split(".")[:2]))
