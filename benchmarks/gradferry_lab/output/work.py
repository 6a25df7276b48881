"""Progress of many pieces of work, several at a time, with an estimate of what is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from gradferry_lab.output.progress import PLAIN_LINE_EVERY_S
from gradferry_lab.output.table import print_line


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

    What is left is estimated from the cost of what is done and the time it took. A context
    manager: leaving it ends the bars.
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
        if self._clock() >= self._last_line + PLAIN_LINE_EVERY_S:
            self._print_line(f"{part.title}: {part.share:.0%}")

    def piece_done(self, piece: PieceDone) -> None:
        """Counts the piece; where there are no bars, prints a line."""
        self._under_way.pop(piece.worker, None)
        self._cost_done += piece.cost
        self._num_done += 1
        self._show()
        self._print_line(piece.title)

    def time_left(self) -> str:
        """An estimate for people."""
        done = self._cost_done + sum(self._under_way.values())
        if done <= 0:
            return "time left unknown"
        seconds = (self._clock() - self._started) * max(0.0, self._cost - done) / done
        return (
            f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"
        )

    def _count(self) -> str:
        return f"{self._num_done}/{self._num_pieces}"

    def _print_line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._last_line = self._clock()
            print_line(self._console, f"{self._count()} {text}; {self.time_left()}")

    def _show(self) -> None:
        done = self._cost_done + sum(self._under_way.values())
        self._bars.update(
            self._all, description=self._count(), completed=done, remark=self.time_left()
        )
