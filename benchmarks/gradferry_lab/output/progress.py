"""What a command is doing: a status on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console

from gradferry_lab.output.table import print_line

_PLAIN_LINE_EVERY_S = 10.0  # where there is no status line


class Doing(NamedTuple):
    """What is being done, and how much of all work is done, from 0 to 1."""

    text: str
    share: float


class StatusLine:
    """Shows what is being done: every text, or Doing, it is called with. A context manager.

    Args:
        console: without a terminal, gets a line for each text.
        every_s: leaves out lines that come sooner after the one before.
        clock: in seconds.
    """

    def __init__(
        self,
        console: Console,
        every_s: float = _PLAIN_LINE_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._every_s = every_s
        self._clock = clock
        self._started = clock()
        self._status = console.status("") if console.is_terminal else None
        self._next_line = float("-inf")

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, what: str | Doing) -> None:
        text = what if isinstance(what, str) else self._with_time_left(what)
        if self._status:
            self._status.start()
            self._status.update(text)
        elif self._clock() >= self._next_line:
            self.print(text)

    def print(self, text: str) -> None:
        """Prints a line that stays."""
        self._next_line = self._clock() + self._every_s
        print_line(self._console, text)

    def close(self) -> None:
        """Takes the status away."""
        if self._status:
            self._status.stop()

    def closing(self, report: Callable[..., int]) -> Callable[..., int]:
        """`report`, with the status taken away first."""

        def closed(*values: Any) -> int:
            self.close()
            return report(*values)

        return closed

    def _with_time_left(self, what: Doing) -> str:
        seconds = self._clock() - self._started
        if what.share <= 0:
            return what.text
        return f"{what.text}; {about(seconds * (1 - what.share) / what.share)} left"


def about(seconds: float) -> str:
    """A time for people: "about 40 s", or "about 3 min" from 90 s on."""
    if round(seconds) < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min"
