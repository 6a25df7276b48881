"""Gradient compression for PyTorch, overlapped with backward.

>>> ddp = DistributedDataParallel(model)
>>> state = gradferry.attach(ddp, "q4")
"""

from gradferry._compat import check_torch

check_torch()

import atexit

from gradferry import _native, checkpoint, fsdp, optim
from gradferry._build_info import PACKAGE_VERSION
from gradferry.averaging.step_numbers import Stats
from gradferry.core.options import Options
from gradferry.ddp.attach import attach, hook
from gradferry.ddp.state import HookState
from gradferry.diagnosis import doctor
from gradferry.diloco import DiLoCo
from gradferry.errors import (
    ConfigError,
    DivergedError,
    GradferryError,
    GradferryWarning,
    PeerError,
    ProtocolError,
    RankMismatchError,
    StateError,
)
from gradferry.reducer import Reducer, Work
from gradferry.tensor import accumulate, decode, encode

__version__ = PACKAGE_VERSION

# Work in flight when Python exits gets one second; then the process ends without it.
atexit.register(_native.shutdown, 1.0)

__all__ = [
    "ConfigError",
    "DiLoCo",
    "DivergedError",
    "GradferryError",
    "GradferryWarning",
    "HookState",
    "Options",
    "PeerError",
    "ProtocolError",
    "RankMismatchError",
    "Reducer",
    "StateError",
    "Stats",
    "Work",
    "__version__",
    "accumulate",
    "attach",
    "checkpoint",
    "decode",
    "doctor",
    "encode",
    "fsdp",
    "hook",
    "optim",
]
