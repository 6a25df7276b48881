"""Worlds of processes for tests: one per world size, kept for the whole session.

`World.run(function, **kwargs)` runs a function of a test module on every rank, inside an
initialised gloo group over loopback, one thread per rank, and returns the results in rank order.
What a rank raises comes back with its rank and traceback; a rank that neither returns nor raises
in time is killed and the world started anew, so that a hang fails one test and not the session.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import fcntl
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

# Only what hangs takes so long, on any machine. The timeout of the group is longer than a case may
# take: what must be told at once, and is waited for instead, hangs.
START_SECONDS = 120.0
CASE_SECONDS = 120.0
GRACE_SECONDS = 60.0
COLLECTIVE_SECONDS = 600.0

# Ranks fork from a server that has imported torch once: a world starts in a fraction of a second.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    # FSDP2 imports torch._dynamo, which takes longer than all the rest.
    ["torch", "torch.nn.parallel", "torch.distributed.fsdp", "torch._dynamo"]
)
# For a world with another environment, whose processes start from nothing.
_fresh_context = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        for name in extra:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def thread_names() -> list[str]:
    """Names of this process's threads."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        # A thread may end after it was listed, before or while its name is read.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text().strip())
    return names


def open_files() -> int:
    """How many this process has."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class WorldError(AssertionError):
    """One or more ranks failed; the message holds every rank's traceback."""


class World:
    """`size` processes in one gloo group. Processes start at the first run().

    environment: variables that the processes have besides the session's own.
    """

    def __init__(self, size: int, environment: dict[str, str] | None = None) -> None:
        self.size = size
        self._environment = environment
        self._ranks: list[_Rank] = []

    def run(
        self,
        function: Callable[..., Any],
        *,
        seconds: float = CASE_SECONDS,
        grace: float = GRACE_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """Results of `function(**kwargs)` by rank. Function and arguments must be picklable.

        grace: once one rank has raised or died, the others get this long to finish by themselves.
        """
        self.start()
        for rank in self._ranks:
            rank.signal(signal.SIGCONT)
            rank.connection.send((function.__module__, function.__qualname__, kwargs))
        answers = self._collect(seconds, grace)
        # Groups of gloo have threads that wake a hundred times a second: until the next case the
        # processes rest.
        for rank in self._ranks:
            rank.signal(signal.SIGSTOP)
        failures = [f"rank {r}: {a[1]}" for r, a in sorted(answers.items()) if a[0] != "result"]
        if failures:
            self.stop()  # what a failed case leaves behind must not reach the next one
            raise WorldError(
                f"{function.__qualname__} in a world of {self.size}:\n" + "\n".join(failures)
            )
        return [answers[rank][1] for rank in range(self.size)]

    def stop(self) -> None:
        for rank in self._ranks:
            rank.stop()
        self._ranks = []

    def kill(self, ranks: Sequence[int]) -> None:
        """Ends processes by SIGKILL, whatever they are doing. From another thread than run()'s."""
        for rank in list(self._ranks):
            if rank.number in ranks:
                rank.process.kill()

    def start(self) -> None:
        """Starts the processes, unless they run."""
        if not self._ranks:
            self._start()

    def _start(self) -> None:
        with _environment(self._environment or {}):
            context = _fresh_context if self._environment else _context
            self._ranks = [_Rank(number, self.size, context) for number in range(self.size)]
        port = self._receive_port()
        for rank in self._ranks[1:]:
            rank.connection.send(port)
        self._raise_on_failure(self._collect(START_SECONDS), "start")

    def _receive_port(self) -> int:
        first = self._ranks[0]
        if not first.connection.poll(START_SECONDS):
            self._raise_on_failure({0: ("hung", first.last_words())}, "start")
        kind, value = first.receive()
        if kind != "result":
            self._raise_on_failure({0: (kind, value)}, "start")
        return value

    def _raise_on_failure(self, answers: dict[int, tuple[str, Any]], what: str) -> None:
        failures = [f"rank {r}: {a[1]}" for r, a in sorted(answers.items()) if a[0] != "result"]
        if failures:
            self.stop()
            raise WorldError(f"{what} of a world of {self.size}:\n" + "\n".join(failures))

    def _collect(self, seconds: float, grace: float = GRACE_SECONDS) -> dict[int, tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < self.size:
            open_ranks = {r.connection: r for r in self._ranks if r.number not in answers}
            ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = open_ranks[connection]
                answers[rank.number] = rank.receive()
                if answers[rank.number][0] != "result":
                    deadline = min(deadline, time.monotonic() + grace)
            if not ready and time.monotonic() >= deadline:
                for rank in open_ranks.values():
                    answers[rank.number] = ("hung", rank.last_words())
        return answers


# By their size; and by the device that a scenario is on, then by their size.
Worlds = Callable[[int], World]
WorldsOn = Callable[[str], Worlds]


def worlds_by_size() -> Iterator[Worlds]:
    """Yields what a fixture gives: worlds by their size, which all stop at its end."""
    started: dict[int, World] = {}

    def get(size: int) -> World:
        return started.setdefault(size, World(size))

    yield get
    for world in started.values():
        world.stop()


class _Rank:
    """The parent's end of one process."""

    def __init__(self, number: int, size: int, context: BaseContext) -> None:
        self.number = number
        self.log = Path(tempfile.mkstemp(prefix=f"gradferry_rank{number}_", suffix=".log")[1])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve,
            args=(number, size, theirs, str(self.log), sys.path),
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def receive(self) -> tuple[str, Any]:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE_SECONDS)
            return ("died", f"process ended with code {self.process.exitcode}\n{self._tail()}")

    def last_words(self) -> str:
        """Asks a process that does not answer for its stacks."""
        size = self.log.stat().st_size
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + GRACE_SECONDS
            while self.log.stat().st_size == size and time.monotonic() < deadline:
                self.process.join(0.05)
        return f"did not answer in time\n{self._tail()}"

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def stop(self) -> None:
        self.connection.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.log.unlink(missing_ok=True)

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])


def _serve(number: int, size: int, connection: Connection, log: str, path: list[str]) -> None:
    """The life of a rank: join the world, then run cases until the parent's end closes."""
    _die_with_parent()
    sys.path[:] = path
    with open(log, "ab", buffering=0) as out:  # noqa: PTH123 (stays open as long as the process)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        _join_world(number, size, connection)
        connection.send(("result", None))
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                connection.send(_run_case(*connection.recv()))
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(("error", traceback.format_exc()))
    os._exit(0)


def _die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, whatever its threads are doing."""
    sentinel = multiprocessing.parent_process().sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def _join_world(number: int, size: int, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=COLLECTIVE_SECONDS)
    store = dist.TCPStore(
        "127.0.0.1",
        0 if number == 0 else connection.recv(),
        size,
        is_master=number == 0,
        timeout=timeout,
        wait_for_workers=False,
    )
    if number == 0:
        connection.send(("result", store.port))
    dist.init_process_group("gloo", store=store, rank=number, world_size=size, timeout=timeout)


def _run_case(module: str, name: str, kwargs: dict[str, Any]) -> tuple[str, Any]:
    import torch

    torch.manual_seed(0)
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        return ("result", function(**kwargs))
    except BaseException:
        return ("error", traceback.format_exc())
    finally:
        gc.collect()
        _forget_races()
        _destroy_groups()
        _forget_meshes()
        if module not in _modules_seen:
            # What torch and the test's modules are made of stays. Later collections need not look
            # at it, which would take them a tenth of a second per rank.
            _modules_seen.add(module)
            gc.freeze()


_modules_seen: set[str] = set()
# Of this rank, for cases to come.
kept_groups: list[Any] = []


def _destroy_groups() -> None:
    """Groups that a case has made, but for those that are kept. Every one has a thread that wakes a
    hundred times a second for as long as it exists: those of some hundred cases take a core.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD and group not in kept_groups:
            dist.destroy_process_group(group)


def _forget_races() -> None:
    """What a case's last objects do when they are freed is not found by the next case: FSDP2 frees
    what its collectives still use after a pass that has failed.
    """
    if "fake_device" in sys.modules:
        machine = sys.modules["fake_device"].machine
        machine.synchronize()
        machine.races()


def _forget_meshes() -> None:
    """DTensor remembers the result of an operation by what its mesh looks like, and the result has
    the first mesh that looked so: its groups end with the case that made it. Plans of transfers
    hold the mesh, and with it sockets of its groups.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute._planner_cache.clear()
