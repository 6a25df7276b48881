"""Whether the processors were busy with something else, and times for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path


def busy_notes(waited: float, when: str) -> list[str]:
    """A sentence for people where threads waited for `BUSY` of their time or more; else none.

    when: what they did meanwhile, as in "in steps without communication".
    """
    if waited < BUSY:
        return []
    return [
        f"This machine is busy: {when}, threads spent {waited:.0%} of their time waiting for a "
        "CPU. All times are longer for it, some more than others: measure again when it is idle, "
        "or with fewer threads per rank."
    ]


def about(seconds: float) -> str:
    """A time for people: "about 40 s", or "about 3 min" from 90 s on."""
    if round(seconds) < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min"


BUSY = 0.2  # share of their time that threads wait for a processor
_THREADS = Path("/proc/self/task")

# By thread: nanoseconds on a processor, and ready to run without one.
ThreadTimes = Mapping[str, tuple[int, int]]


def thread_times() -> ThreadTimes:
    """Those of this process; nothing where the system does not say."""
    try:
        threads = list(_THREADS.iterdir())
    except OSError:  # another system
        return {}
    times = {}
    for thread in threads:
        try:
            on_processor, waiting, *_ = (thread / "schedstat").read_text().split()
        except (OSError, ValueError):  # the thread has ended, or the kernel does not count
            continue
        times[thread.name] = int(on_processor), int(waiting)
    return times


class ProcessorWait:
    """How much of their time the threads of this process wait for a processor, from now on."""

    def __init__(self, read: Callable[[], ThreadTimes] = thread_times) -> None:
        self._read = read
        self._before = read()

    def share(self) -> float:
        """0: they run whenever they can; near 1: others have the processors."""
        ran = waited = 0
        for thread, (on_processor, waiting) in self._read().items():
            before = self._before.get(thread, (0, 0))
            ran += on_processor - before[0]
            waited += waiting - before[1]
        return waited / (ran + waited) if waited else 0.0
