"""Ranks for one command: processes of our own over loopback, or those torchrun has started."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from gradferry import errors
from gradferry.core.agreement import Record, gather_records
from gradferry.errors import GradferryError, PeerError
from torch.distributed import TCPStore  # type: ignore[attr-defined]

Emit = Callable[[Any], None]  # hands a picklable event of rank 0 to whoever shows progress
# body(emit, *arguments): runs on every rank, with the default process group ready.
Body = Callable[..., Any]

_GROUP_TIMEOUT = timedelta(minutes=5)
_LAST_WORDS_S = 1.0  # after a first failure, how long the others may say what they saw


class Placement(NamedTuple):
    """Which rank this process is, of how many."""

    rank: int
    num_ranks: int


def torchrun_placement() -> Placement | None:
    """Set when torchrun, or what sets the same variables, started this process as a rank."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in names):
        return None
    return Placement(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def default_group() -> dist.ProcessGroup:
    """Of all ranks, for a `Body`."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def gather_from_ranks(record: Record) -> list[Record]:
    """Every rank's record, in rank order: JSON, never pickled objects. Collective, for a `Body`."""
    return gather_records(record, default_group(), torch.device("cpu"))


def run_ranks(body: Body, arguments: Sequence[Any], num_ranks: int, on_event: Emit) -> Any:
    """Runs `body` on every rank and returns rank 0's value; None on torchrun's other ranks.

    Under torchrun this process is one rank and `num_ranks` is ignored. Otherwise `num_ranks`
    processes are started, with one thread each and a gloo group over loopback; `body` must be a
    module's function and `arguments` picklable. No process outlives the call. Raises PeerError
    with the rank's own error when a rank fails or dies; a GradferryError of a rank as it is.
    """
    if torchrun_placement():
        return _run_here(body, arguments, on_event)
    return run_worlds(body, [arguments], num_ranks, on_event)[0]


def run_worlds(
    body: Body, arguments_by_world: Sequence[Sequence[Any]], num_ranks: int, on_event: Emit
) -> list[Any]:
    """Runs, outside torchrun, several worlds of `num_ranks` processes at once, as run_ranks one.

    Every world has a process group and arguments of its own. Returns the values of their ranks 0.
    A rank that fails ends all worlds.
    """
    context = multiprocessing.get_context("spawn")
    stores: list[TCPStore] = []
    processes: list[BaseProcess] = []
    channels: list[Connection] = []
    try:
        for arguments in arguments_by_world:
            store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
            stores.append(store)
            for rank in range(num_ranks):
                channel, far_end = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(far_end, Placement(rank, num_ranks), store.port, body, tuple(arguments)),
                    daemon=True,
                )
                with _without_interrupts():
                    process.start()
                far_end.close()
                processes.append(process)
                channels.append(channel)
        return _follow(processes, channels, num_ranks, on_event)[::num_ranks]
    finally:
        for started in processes:
            started.kill()
        for started in processes:
            started.join()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started in this context ignore Ctrl-C; this process handles it and ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class _Failure:
    """The error of a rank. `kind`: a class of gradferry.errors, or empty."""

    rank: int
    kind: str
    text: str
    when: float  # seconds of the machine's monotonic clock; 0 for a rank that died without a word

    def error(self) -> GradferryError:
        if self.kind:
            error: GradferryError = getattr(errors, self.kind)(self.text)
            return error
        return PeerError(f"rank {self.rank} {self.text}")


class Outbox:
    """A folder in which ranks under torchrun report to the command that started torchrun."""

    VARIABLE = "GRADFERRY_OUTBOX"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._code = folder / "exit_code"

    @classmethod
    def of_this_rank(cls) -> Outbox | None:
        """None: a user has started torchrun, and reads what it says."""
        folder = os.environ.get(cls.VARIABLE)
        return cls(Path(folder)) if folder else None

    def leave_failure(self, failure: _Failure) -> None:
        (self.folder / f"rank{failure.rank}.json").write_text(json.dumps(asdict(failure)))

    def leave_exit_code(self, code: int) -> None:
        """The exit code of a rank that has done its work, whatever came out of it."""
        self._code.write_text(str(code))

    def exit_code(self) -> int | None:
        """None when no rank has left one."""
        return int(self._code.read_text()) if self._code.exists() else None

    def first_error(self) -> GradferryError | None:
        """The error of the rank that failed first; None when no rank has left one."""
        found = [_Failure(**json.loads(f.read_text())) for f in self.folder.glob("rank*.json")]
        return min(found, key=lambda failure: failure.when).error() if found else None


def _follow(
    processes: Sequence[BaseProcess],
    channels: Sequence[Connection],
    num_ranks: int,
    on_event: Emit,
) -> list[Any]:
    """The values of the ranks of all worlds, once all are there. Raises the first failure."""
    unheard = {channel: number for number, channel in enumerate(channels)}
    results: dict[int, Any] = {}  # by process, as the failures
    failures: dict[int, _Failure] = {}
    deadline = math.inf
    while unheard and (left := deadline - time.monotonic()) > 0:
        for channel in cast("list[Connection]", wait(list(unheard), left if failures else None)):
            number = unheard[channel]
            try:
                kind, value = channel.recv()
            except (EOFError, ConnectionResetError):
                del unheard[channel]
                if number in results or number in failures:
                    continue
                processes[number].join(_LAST_WORDS_S)
                code = processes[number].exitcode or 0
                how = (
                    f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                )
                kind = "failure"
                value = _Failure(number % num_ranks, "", f"{how} before it was done", 0.0)
            if kind == "event":
                on_event(value)
            elif kind == "result":
                results[number] = value
            else:
                failures[number] = value
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
    if failures:
        raise min(failures.values(), key=lambda failure: failure.when).error()
    return [results[number] for number in range(len(processes))]


def _rank_main(
    channel: Connection, place: Placement, store_port: int, body: Body, arguments: tuple[Any, ...]
) -> None:
    """A rank's process: `body` inside a process group, its value or its error into `channel`."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        store = TCPStore("127.0.0.1", store_port, None, is_master=False)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=place.rank,
            world_size=place.num_ranks,
            timeout=_GROUP_TIMEOUT,
        )
        is_first = place.rank == 0
        emit = (lambda event: channel.send(("event", event))) if is_first else lambda _: None
        value = body(emit, *arguments)
        channel.send(("result", value if is_first else None))
        dist.destroy_process_group()
    except Exception as error:
        with contextlib.suppress(OSError):
            channel.send(("failure", _describe(place.rank, error)))
        os._exit(1)


def _describe(rank: int, error: Exception) -> _Failure:
    now = time.monotonic()
    if isinstance(error, GradferryError):
        return _Failure(rank, type(error).__name__, str(error), now)
    return _Failure(rank, "", f"failed:\n{''.join(traceback.format_exception(error))}", now)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _run_here(body: Body, arguments: Sequence[Any], on_event: Emit) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_GROUP_TIMEOUT)
    try:
        is_first = dist.get_rank() == 0
        value = body(on_event if is_first else lambda _: None, *arguments)
        return value if is_first else None
    except Exception as error:
        outbox = Outbox.of_this_rank()
        if outbox:
            outbox.leave_failure(_describe(dist.get_rank(), error))
        raise
    finally:
        dist.destroy_process_group()
