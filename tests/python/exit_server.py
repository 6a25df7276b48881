"""Pairs of ranks that end in the middle of a training, each as its Ending says.

Reads a pair of Endings per line of standard input, forks both ranks from this process, which has
imported torch, and prints what became of each: exit code, seconds that its end took, and what it
said. The forked ranks return to the interpreter, which finalizes them as if it had started them.
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

TIMEOUT_SECONDS = 60.0  # of the group
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


class _Return(BaseException):
    """Unwinds to main(), which then returns. No Exception, of which save() tells all ranks."""


def _act(how: str, began: Path) -> None:
    began.write_text(str(time.monotonic() - queued(os.getpid())))
    if how == "return":
        raise _Return
    if how == "sys.exit":
        sys.exit(EXIT_CODES[how])
    if how == "exception":
        raise ValueError("not caught")
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
    (folder / f"trains{rank}").touch()
    act = functools.partial(_act, ending.how, folder / f"began{rank}")
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
        return onlooker(made)

    try:
        case_train(ending.job, str(folder / "checkpoint"), remember)
    except _Return:
        return 0
    finally:
        if ending.destroys:
            dist.destroy_process_group()
    return 0


def queued(pid: int) -> float:
    """Seconds that a process's first thread has waited for a processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


class Child:
    """The server's side of a rank. Its times are without those in which it waited for a processor,
    which on a busy machine are most.
    """

    def __init__(self, rank: int, pid: int, folder: Path) -> None:
        self.rank, self.pid, self.folder = rank, pid, folder
        self.code: int | None = None
        self.since: float | None = None
        self.ended = 0.0

    def time(self, now: float) -> float:
        return now - queued(self.pid)

    def poll(self, now: float) -> bool:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self.code is None and os.waitid(os.P_PID, self.pid, flags) is not None:
            self.ended = self.time(now)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code is not None

    def says(self) -> str:
        return (self.folder / f"says{self.rank}").read_text(errors="replace")

    def seconds(self) -> float:
        """From when it began to end: by itself, by a signal, or since the other one had ended."""
        began = self.folder / f"began{self.rank}"
        if began.exists():
            return self.ended - float(began.read_text())
        # Without it both were found ended at once.
        return 0.0 if self.since is None else self.ended - self.since


def watch(children: list[Child], ending: Ending, close: Callable[[], None]) -> dict[str, Any]:
    """Sends the signal of the Ending, and waits for both."""
    folder, deadline = children[0].folder, time.monotonic() + HUNG_SECONDS
    send_at, sent = math.inf, None
    late = 0.0
    while True:
        now = time.monotonic() - late
        left = [child for child in children if not child.poll(now)]
        if not left:
            break
        if len(left) == 1 and left[0].since is None:
            left[0].since = left[0].time(now)
            close()
        trains = all((folder / f"trains{rank}").exists() for rank in range(2))
        if ending.from_outside and send_at == math.inf and trains:
            send_at = now + ending.after
        if now >= send_at and children[0].code is None and sent is None:
            sent = children[0].since = children[0].time(now)
            os.kill(children[0].pid, getattr(signal, ending.how))
        if now > deadline:
            for child in left:
                os.kill(child.pid, signal.SIGABRT)  # with its stacks, by faulthandler
        before = queued(os.getpid())
        signal.sigtimedwait({signal.SIGCHLD}, POLL_SECONDS)
        # So much later than the end of a child does this process see it.
        late = queued(os.getpid()) - before
    return {
        "codes": [child.code for child in children],
        "seconds": [child.seconds() for child in children],
        "says": [child.says() for child in children],
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
        print(json.dumps(watch(children, ending, close)), flush=True)
    return 0


def _speak_into(path: Path) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    with path.open("wb") as out, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)


if __name__ == "__main__":
    sys.exit(serve())
