"""Memory that the ranks of one node share. The first of them makes it, and the others open it.

It is a memfd, which has no name in any folder: who may look into the first rank's open files, as
another process of its user may, opens it there, and the kernel frees it with the last process that
has it. Keys in the store:

    memory          the first rank's process, its descriptor there, and its name, which no other
                    file has; null: there is none
    outcome/<rank>  why this rank cannot share memory; empty: it can
    left            how many ranks have read all outcomes

Ranks wait for keys only, so a rank whom the kernel refuses something holds up nobody: it says why,
and all of them exchange through their lanes alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch._C._distributed_c10d import Store

from gradferry import _native
from gradferry.core.rendezvous import MOST_PAUSE_SECONDS
from gradferry.errors import PeerError

# From <linux/memfd.h>, since Linux 6.3; vm.memfd_noexec may demand it. Implies MFD_ALLOW_SEALING.
_MFD_NOEXEC_SEAL = 0x0008
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LEAST_PAUSE_SECONDS = 0.001  # between two reads of the store


def share_memory(
    store: Store, rank: int, siblings: Sequence[int], num_bytes: int, seconds: float
) -> tuple[_native.SharedMemory | None, str]:
    """Memory that ranks of one machine share. Collective among them.

    Args:
        store: with a prefix of its own, equal on `siblings`.
        rank: of this process.
        siblings: two ranks or more, this one among them.
        num_bytes: of the memory; equal on `siblings`.
        seconds: how long to wait for the others.

    Returns:
        The memory, zeros, and an empty text; or None and why they share none: "rank 1:
        memfd_create: Operation not permitted". The same on all `siblings`.

    Raises:
        OSError, RuntimeError: another rank did not come within `seconds`.
    """
    deadline = time.monotonic() + seconds
    first = siblings[0]
    memory, reason, place = None, "", None
    with contextlib.ExitStack() as open_for_all:
        if rank != first:
            place = json.loads(_value_from(store, "memory", first, deadline))
        try:
            if rank == first or place is not None:
                name = f"gradferry-{secrets.token_hex(8)}"
                descriptor = _make(name, num_bytes) if place is None else _open(*place)
                open_for_all.callback(os.close, descriptor)
                memory = _native.SharedMemory(descriptor, num_bytes)
                place = os.getpid(), descriptor, name
        except PeerError as error:
            reason = str(error)
        if rank == first:
            store.set("memory", json.dumps(place))
        store.set(f"outcome/{rank}", reason)
        outcomes = {
            each: _value_from(store, f"outcome/{each}", each, deadline).decode()
            for each in siblings
        }
    if store.add("left", 1) == len(siblings):
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a store that cannot
            for key in ("memory", *(f"outcome/{each}" for each in siblings), "left"):
                store.delete_key(key)
    for each, why in outcomes.items():
        if why:
            return None, f"rank {each}: {why}"
    return memory, ""


def _value_from(store: Store, key: str, rank: int, deadline: float) -> bytes:
    """What a rank has written, or will, under a key.

    Raises:
        TimeoutError: it had not at `deadline`, in seconds of ``time.monotonic()``.
    """
    # Not store.wait(), which Ctrl-C does not interrupt.
    pause = _LEAST_PAUSE_SECONDS
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} timed out")
        time.sleep(pause)
        pause = min(2 * pause, MOST_PAUSE_SECONDS)
    value: bytes = store.get(key)
    return value


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raises PeerError for errors of the system."""
    try:
        yield
    except OSError as error:
        raise PeerError(f"{what}: {error.strerror or error}") from error


def _make(name: str, num_bytes: int) -> int:
    """A new memfd whose size is sealed and whose memory is there.

    Memory that is only promised would be missed at its first use, by a signal that ends the
    process.
    """
    with _refusing("memfd_create"):
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            descriptor = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            descriptor = os.memfd_create(name, flags)
    try:
        with _refusing(f"fallocate of {num_bytes} bytes"):
            os.posix_fallocate(descriptor, 0, num_bytes)
        with _refusing("F_ADD_SEALS"):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open(process: int, descriptor: int, name: str) -> int:
    """Opens the first rank's memory, if that process and descriptor are it for this rank, too."""
    path = Path(f"/proc/{int(process)}/fd/{int(descriptor)}")
    with _refusing(f"opening {path}"):
        if (found := str(path.readlink())) != f"/memfd:{name} (deleted)":
            raise PeerError(f"{path} is {found}, for the first rank it is its memory")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
