"""What a call did, in a form that travels between processes: for tests of errors."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


@dataclasses.dataclass(frozen=True)
class Outcome:
    error: str | None  # name of the exception's class
    is_ours: bool  # a GradferryError
    text: str

    @property
    def headline(self) -> str:
        """What is the same on all ranks: below it are a rank's own last buckets."""
        return self.text.partition("\n")[0]


def attempt(call: Callable[[], Any]) -> Outcome:
    import gradferry

    try:
        call()
    except Exception as error:
        ours = isinstance(error, gradferry.GradferryError)
        return Outcome(type(error).__name__, ours, str(error))
    return Outcome(None, False, "")


@contextlib.contextmanager
def interrupted(wait: Callable[[], object] = lambda: time.sleep(0.3)) -> Iterator[None]:
    """Ctrl-C comes when `wait` has returned, which another thread calls."""

    entered = threading.Event()

    def interrupt() -> None:
        wait()
        entered.wait()  # else it could come before the caller is ready for it
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        entered.set()
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def little_patience() -> Iterator[None]:
    """Ranks that attach wait for others for a second."""
    from gradferry.core import rendezvous

    with mock.patch.object(rendezvous, "MOST_PATIENCE", datetime.timedelta(seconds=1)):
        yield
