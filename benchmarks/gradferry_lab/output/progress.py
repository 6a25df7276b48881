"""Progress: bars and a status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradferry.ddp.schedule import about
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import TimeRemainingColumn as TimeLeft

from gradferry_lab.output.table import print_line

_PLAIN_LINES = 5  # per training
_PLAIN_LINE_EVERY_S = 10.0  # where there is no bar or status line


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
        self.close()

    def close(self) -> None:
        """Ends the bars, which stay on the screen."""
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
    """Shows what is being done: every text it is called with. A context manager.

    Args:
        console: without a terminal, gets a line for each text.
        every_s: leaves out lines that come sooner after the one before.
    """

    def __init__(self, console: Console, every_s: float = _PLAIN_LINE_EVERY_S) -> None:
        self._console = console
        self._every_s = every_s
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
            self._next_line = time.monotonic() + self._every_s
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


@dataclass(frozen=True)
class PartDone:
    """How far a worker is with its present piece of work."""

    worker: int
    title: str
    share: float  # 0 to 1
    cost: float  # of the whole piece, in any unit


@dataclass(frozen=True)
class PieceDone:
    """A worker has finished a piece of work."""

    worker: int
    title: str  # with its result
    cost: float


class WorkProgress:
    """Bars on a terminal: all of the work, and each worker's piece. Elsewhere a line for every
    finished piece, and, where none is finished, one every few seconds.

    What is left is estimated from the cost of what is done and the time it took, as soon as a piece
    is finished: before that, most of the time went into starting. A context manager: leaving it
    ends the bars.
    """

    def __init__(
        self,
        console: Console,
        num_pieces: int,
        cost: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._num_pieces = num_pieces
        self._num_done = 0
        self._cost = cost
        self._cost_done = 0.0  # of finished pieces
        self._under_way: dict[int, float] = {}  # cost done, by worker
        self._clock = clock
        self._started = clock()
        self._last_line = float("-inf")
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[remark]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._all = self._bars.add_task(self._count(), total=max(cost, 1e-9), remark="")
        self._workers: dict[int, TaskID] = {}

    def __enter__(self) -> WorkProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def part_done(self, part: PartDone) -> None:
        """Moves the worker's bar and the one of all work; where there are none, prints a line when
        none was printed for long.
        """
        self._under_way[part.worker] = part.share * part.cost
        if part.worker not in self._workers:
            self._workers[part.worker] = self._bars.add_task(part.title, total=1, remark="")
        self._bars.update(self._workers[part.worker], description=part.title, completed=part.share)
        self._show()
        if self._clock() >= self._last_line + _PLAIN_LINE_EVERY_S:
            self._print_line(f"{part.title}: {part.share:.0%}")

    def piece_done(self, piece: PieceDone) -> None:
        """Counts the piece; where there are no bars, prints a line."""
        self._under_way.pop(piece.worker, None)
        self._cost_done += piece.cost
        self._num_done += 1
        self._show()
        self._print_line(piece.title)

    def time_left(self) -> str:
        """An estimate for people; empty until one means something."""
        if self._cost_done <= 0:
            return ""
        done = self._cost_done + sum(self._under_way.values())
        seconds = (self._clock() - self._started) * max(0.0, self._cost - done) / done
        return f"{about(seconds)} left"

    def _count(self) -> str:
        return f"{self._num_done}/{self._num_pieces}"

    def _print_line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._last_line = self._clock()
            left = self.time_left()
            print_line(self._console, f"{self._count()} {text}{f'; {left}' if left else ''}")

    def _show(self) -> None:
        done = self._cost_done + sum(self._under_way.values())
        self._bars.update(
            self._all, description=self._count(), completed=done, remark=self.time_left()
        )
