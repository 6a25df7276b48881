"""Warnings, attributed to the user's code."""

from __future__ import annotations

import logging
import sys
import warnings

import torch.distributed as dist

from gradferry.errors import GradferryWarning

_TRAINERS = (
    "accelerate",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "torchft",
    "transformers",
)
# Their frames are passed over. Trainers filter warnings that seem to come from torch's schedules,
# and copy calls the methods with which models and hooks copy themselves.
_INSIDE = ("gradferry", "torch", "copy", *_TRAINERS)
_log = logging.getLogger("gradferry")


def warn(text: str) -> None:
    """Warns with a `GradferryWarning` at the first frame outside torch, gradferry and trainers.

    In a thread that has only their frames, at the outermost one.
    """
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        if frame.f_back is None:
            break
        frame = frame.f_back
    warnings.warn_explicit(
        text,
        GradferryWarning,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def warn_or_log(text: str) -> None:
    """Warns like `warn`, but never raises: where the user's filters make the warning an error, it
    is logged. For places where an error would hide another one, or undo what is complete.
    """
    try:
        warn(text)
    except GradferryWarning:
        _log.warning(text)


def warn_and_log(text: str) -> None:
    """Warns like `warn`, and on rank 0 of the world logs the text. For what spoils a whole
    training: warnings may be filtered.
    """
    if dist.is_initialized() and dist.get_rank() == 0:
        _log.warning(text)
    warn(text)
