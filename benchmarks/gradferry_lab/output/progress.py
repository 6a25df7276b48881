"""Progress: bars and a status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from gradferry_lab.output.table import print_line

_PLAIN_LINES = 5  # per training
PLAIN_LINE_EVERY_S = 10.0  # where there is no bar or status line


@dataclass(frozen=True)
class StepDone:
    """One step of one training. The loss is that of rank 0's batch."""

    hook: str
    step: int
    steps: int
    loss: float


class TrainingProgress:
    """Shows every StepDone it is called with. A context manager: leaving it ends the bars."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TimeLeft(compact=True, elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> TrainingProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, done: StepDone) -> None:
        if done.step == 1:
            self._started[done.hook] = time.monotonic()
            self._tasks[done.hook] = self._bars.add_task(
                done.hook, total=done.steps, loss=done.loss
            )
        self._bars.update(self._tasks[done.hook], completed=done.step, loss=done.loss)
        if not self._console.is_terminal and self._deserves_line(done):
            seconds = time.monotonic() - self._started[done.hook]
            print_line(
                self._console,
                f"{done.hook}: step {done.step}/{done.steps}, loss {done.loss:.3f}, "
                f"{seconds:.0f} s",
            )

    def _deserves_line(self, done: StepDone) -> bool:
        every = max(1, done.steps // _PLAIN_LINES)
        return done.step == 1 or done.step % every == 0


class StatusLine:
    """Shows what is being done: every text it is called with. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("") if console.is_terminal else None
        self._next_line = 0.0

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, text: str) -> None:
        if self._status:
            self._status.start()
            self._status.update(text)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_LINE_EVERY_S
            print_line(self._console, text)

    def close(self) -> None:
        """Takes the line away."""
        if self._status:
            self._status.stop()

    def closing(self, report: Callable[..., int]) -> Callable[..., int]:
        """`report`, with the line taken away first."""

        def closed(*values: Any) -> int:
            self.close()
            return report(*values)

        return closed
