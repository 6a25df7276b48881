"""Runs a call beside another one, stopped between any two lines of some modules."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from typing import Any


def run_with(
    files: Collection[str], before_line: Callable[[int], None], call: Callable[[], Any]
) -> Any:
    """Calls `call`, and before each line of the files `before_line` with the line's number."""
    count = 0

    def trace_lines(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            sys.settrace(None)
            try:
                before_line(count)
            finally:
                sys.settrace(trace)
            count += 1
        return trace_lines

    def trace(frame: Any, event: str, _: Any) -> Any:
        return trace_lines if frame.f_code.co_filename in files else None

    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(None)


class Beside:
    """A call in a thread of its own, which rests before one of its lines until `finish`."""

    def __init__(self, files: Collection[str], rest_before: int, call: Callable[[], Any]) -> None:
        self._rests, self._goes_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(files, rest_before, call))
        self._thread.start()
        self._rests.wait()

    def _run(self, files: Collection[str], rest_before: int, call: Callable[[], Any]) -> None:
        def rest(line: int) -> None:
            if line == rest_before:
                self._rests.set()
                self._goes_on.wait()

        try:
            run_with(files, rest, call)
        finally:
            self._rests.set()  # where it has fewer lines

    def finish(self) -> None:
        self._goes_on.set()
        self._thread.join()
