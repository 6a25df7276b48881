"""Where a result was obtained."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from gradferry import _native
from gradferry._build_info import GRADFERRY_VERSION


def environment() -> dict[str, Any]:
    """Versions and machine, for the `environment` of every JSON file."""
    return {
        "gradferry": GRADFERRY_VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": _native.active_isa(),
        "os": os_name(),
    }


def occasion() -> dict[str, Any]:
    """When this is, and the command line that this process was started with."""
    name = Path(sys.argv[0]).name
    command = ["gradferry" if name == "__main__.py" else name, *sys.argv[1:]]
    now = datetime.now(timezone.utc).isoformat(timespec="minutes")
    return {"date": now, "command": shlex.join(command)}


def cpu_model() -> str:
    """The processor's name as Linux reports it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def os_name() -> str:
    """Distribution and kernel."""
    try:
        distribution = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        distribution = platform.system()
    return f"{distribution}, {platform.system()} {platform.release()}"
