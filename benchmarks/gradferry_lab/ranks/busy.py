"""Whether other programs use this machine's processors, so that measured times are too long."""

from __future__ import annotations

import os
from pathlib import Path

_LOAD = Path("/proc/loadavg")  # "1.52 0.80 0.61 3/412 9173": the fourth has runnable threads first
_BUSY_SHARE = 0.5  # of the processors, in the last minute


def busy_note() -> str | None:
    """A sentence for people; None on an idle machine, or where the kernel does not tell.

    Call it before ranks are started. The load of the last minute also counts what has just ended,
    such as a compilation, so another thread must be runnable at this instant, too.
    """
    try:
        load, _, _, threads, _ = _LOAD.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    processors = len(os.sched_getaffinity(0))
    others = int(threads.partition("/")[0]) - 1  # without the thread that reads
    if float(load) < _BUSY_SHARE * processors or others < 1:
        return None
    return (
        f"This machine is busy (load {load} on {processors} processors): times will be too long, "
        f"and differences between hooks uncertain."
    )
