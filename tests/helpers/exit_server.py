"""Pairs of ranks that end in the middle of a training, each as its Ending says.

Reads a pair of Endings per line of standard input, forks both ranks from this process, which has
imported torch, and prints what became of each: exit code, and what it said. The forked ranks return
to the interpreter, which finalizes them as if it had started them. The timeout of their group is an
hour: what waits for a peer that stays silent hangs, and is aborted.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import functools
import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from killing import Executioner, Place
from resumable import Job, Training, case_train

TIMEOUT_SECONDS = 3600.0  # of the group
HUNG_SECONDS = 300.0
POLL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Ending:
    """How rank 0 ends, and what rank 1 does meanwhile.

    Attributes:
        how: "return", "sys.exit", "exception", "interrupt" and "os._exit" at `place`; "SIGTERM" and
            "SIGINT" from outside, `after` seconds of training.
        peer: "stays" and never answers what rank 0 has in flight; "goes on"; or ends "together".
        destroys: the process group, on the way out.
    """

    job: Job
    how: str
    place: Place
    after: float
    peer: str
    destroys: bool

    @property
    def from_outside(self) -> bool:
        return self.how.startswith("SIG")


EXIT_CODES = {
    "return": 0,
    "sys.exit": 7,
    "exception": 1,
    "interrupt": -signal.SIGINT,
    "os._exit": 9,
    "SIGTERM": -signal.SIGTERM,
    "SIGINT": -signal.SIGINT,
}


USERS_ERROR = "ValueError: of the user's own code"


class _Return(BaseException):
    """Unwinds to main(), which then returns. No Exception, of which save() tells all ranks."""


def _act(how: str) -> None:
    if how == "return":
        raise _Return
    if how == "sys.exit":
        sys.exit(EXIT_CODES[how])
    if how == "exception":
        raise ValueError("of the user's own code")
    if how == "interrupt":
        raise KeyboardInterrupt
    os._exit(EXIT_CODES[how])


def rank_main(rank: int, ending: Ending, folder: Path, release: int) -> int:
    """A rank's program. `release`: a file that ends when rank 0 has ended."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS),
    )
    act = functools.partial(_act, ending.how)
    place = ending.place
    if rank == 1 and ending.peer == "stays":
        act = functools.partial(os.read, release, 1)
        if place.name == "in backward":
            place = dataclasses.replace(place, name="before backward")
    keeps = ending.from_outside or (rank == 1 and ending.peer == "goes on")
    onlooker = functools.partial(Executioner, rank=2 if keeps else rank, place=place, act=act)

    def remember(made: Training) -> Executioner:
        global training  # alive until the interpreter has gone
        training = made
        # Only from here on do both know of each other, and the peer need not wait for the timeout.
        (folder / f"trains{rank}").touch()
        return onlooker(made)

    try:
        case_train(ending.job, str(folder / "checkpoint"), remember)
    except _Return:
        return 0
    finally:
        if ending.destroys:
            dist.destroy_process_group()
    return 0


class Child:
    """The server's side of a rank."""

    def __init__(self, rank: int, pid: int, folder: Path) -> None:
        self.pid = pid
        self.code: int | None = None
        self.log = folder / f"says{rank}"

    def has_ended(self) -> bool:
        if self.code is None and (ended := os.waitpid(self.pid, os.WNOHANG)) != (0, 0):
            self.code = os.waitstatus_to_exitcode(ended[1])
        return self.code is not None


def watch(
    children: list[Child], ending: Ending, folder: Path, close: Callable[[], None]
) -> dict[str, Any]:
    """Sends the signal of the Ending, and waits for both."""
    deadline = time.monotonic() + HUNG_SECONDS
    send_at: float | None = None
    while left := [child for child in children if not child.has_ended()]:
        now = time.monotonic()
        if len(left) == 1:
            close()
        trains = all((folder / f"trains{rank}").exists() for rank in range(2))
        if ending.from_outside and send_at is None and trains:
            send_at = now + ending.after
        if send_at is not None and now >= send_at and children[0].code is None:
            os.kill(children[0].pid, getattr(signal, ending.how))
            send_at = math.inf
        if now > deadline:
            for child in left:
                os.kill(child.pid, signal.SIGABRT)  # with its stacks, by faulthandler
        signal.sigtimedwait({signal.SIGCHLD}, POLL_SECONDS)
    return {
        "codes": [child.code for child in children],
        "says": [child.log.read_text(errors="replace") for child in children],
    }


def serve() -> int:
    """The server's loop. In a child: what its rank returns."""
    import gradferry  # noqa: F401 (forked with this process)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    faulthandler.enable()
    gc.freeze()  # what was imported: no child looks through it again
    for line in sys.stdin:
        given = json.loads(line)
        folder = Path(given.pop("folder"))
        job, place = Job(**given.pop("job")), Place(**given.pop("place"))
        ending = Ending(job=job, place=place, **given)
        ours, theirs = os.pipe()
        children = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                os.close(theirs)
                _speak_into(folder / f"says{rank}")
                return rank_main(rank, ending, folder, ours)
            children.append(Child(rank, pid, folder))
        os.close(ours)
        close = functools.cache(functools.partial(os.close, theirs))
        print(json.dumps(watch(children, ending, folder, close)), flush=True)
    return 0


def _speak_into(path: Path) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    with path.open("wb") as out, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)


if __name__ == "__main__":
    sys.exit(serve())
