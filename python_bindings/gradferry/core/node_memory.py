"""Memory that the ranks of one node share. The first of them makes it and hands it to the others.

It is a memfd, which has no name, so no process can open it that was not given it, and the kernel
frees it with the last process that has it. Each of the other ranks has a door, a unix socket, and
writes into the store where that is, with a secret; what comes without the secret is dropped. Keys:

    door/<rank>     where to send the memory; null: this rank has no door
    given           whether the memory lies behind all doors
    outcome/<rank>  why this rank cannot share memory; empty: it can

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
import socket
import struct
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch._C._distributed_c10d import Store

from gradferry import _native
from gradferry.core.rendezvous import MOST_PAUSE_SECONDS
from gradferry.errors import PeerError

_SECRET_BYTES = 16
# From <linux/memfd.h>, since Linux 6.3; vm.memfd_noexec may demand it. Implies MFD_ALLOW_SEALING.
_MFD_NOEXEC_SEAL = 0x0008
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# Messages of others that are dropped before the right one; the kernel queues fewer.
_MOST_STRANGERS = 1024
_DESCRIPTOR = struct.calcsize("i")
_LEAST_PAUSE_SECONDS = 0.001  # between two reads of the store


class _RefusedError(Exception):
    """This rank cannot share memory. The text says why."""


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
    first, *others = siblings
    if rank == first:
        memory, reason = _give(store, others, num_bytes, deadline)
    else:
        memory, reason = _take(store, rank, first, num_bytes, deadline)
    store.set(f"outcome/{rank}", reason)
    refused = ""
    for each in siblings:
        why = _value_from(store, f"outcome/{each}", each, deadline).decode()
        if why:
            refused = refused or f"rank {each}: {why}"
    if store.add("left", 1) == len(siblings):
        doors = [f"door/{each}" for each in others]
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a store that cannot
            for key in (*doors, "given", *(f"outcome/{each}" for each in siblings), "left"):
                store.delete_key(key)
    if refused:
        return None, refused
    assert memory is not None
    return memory, ""


def _give(
    store: Store, others: Sequence[int], num_bytes: int, deadline: float
) -> tuple[_native.SharedMemory | None, str]:
    """Makes the memory and sends it; the memory, or why not. Neither: another rank knows why."""
    doors = {
        each: json.loads(_value_from(store, f"door/{each}", each, deadline)) for each in others
    }
    memory, reason = None, ""
    if all(doors.values()):
        try:
            descriptor = _make(num_bytes)
            try:
                made = _map(descriptor, num_bytes)
                _send(descriptor, doors)
                memory = made
            finally:
                os.close(descriptor)
        except _RefusedError as error:
            reason = str(error)
    store.set("given", json.dumps(memory is not None))
    return memory, reason


def _take(
    store: Store, rank: int, first: int, num_bytes: int, deadline: float
) -> tuple[_native.SharedMemory | None, str]:
    """Takes what `_give` gives, and returns the same."""
    name = f"gradferry-{secrets.token_hex(_SECRET_BYTES)}"
    secret = secrets.token_bytes(_SECRET_BYTES)
    try:
        door = _open_door(name)
    except _RefusedError as error:
        store.set(f"door/{rank}", json.dumps(None))
        return None, str(error)
    with door:
        store.set(f"door/{rank}", json.dumps({"name": name, "secret": secret.hex()}))
        if not json.loads(_value_from(store, "given", first, deadline)):
            return None, ""
        try:
            descriptor = _receive(door, secret)
            try:
                return _map(descriptor, num_bytes), ""
            finally:
                os.close(descriptor)
        except _RefusedError as error:
            return None, str(error)


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


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raises _RefusedError for errors of the system."""
    try:
        yield
    except OSError as error:
        raise _RefusedError(f"{what}: {error.strerror or error}") from error


def _make(num_bytes: int) -> int:
    """A new memfd whose size is sealed and whose memory is there.

    Memory that is only promised would be missed at its first use, by a signal that ends the
    process.
    """
    with _refusing("memfd_create"):
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            descriptor = os.memfd_create("gradferry", flags | _MFD_NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            descriptor = os.memfd_create("gradferry", flags)
    try:
        with _refusing(f"fallocate of {num_bytes} bytes"):
            os.posix_fallocate(descriptor, 0, num_bytes)
        with _refusing("F_ADD_SEALS"):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _map(descriptor: int, num_bytes: int) -> _native.SharedMemory:
    try:
        return _native.SharedMemory(descriptor, num_bytes)
    except PeerError as error:
        raise _RefusedError(str(error)) from error


def _open_door(name: str) -> socket.socket:
    """A socket with a name that is no file: the kernel forgets it with the socket."""
    door = _unix_socket()
    try:
        with _refusing("bind of a unix socket"):
            door.bind(f"\0{name}")
    except BaseException:
        door.close()
        raise
    return door


def _unix_socket() -> socket.socket:
    with _refusing("unix socket"):
        return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def _send(descriptor: int, doors: dict[int, dict[str, str]]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
    with _unix_socket() as sender:
        for rank, door in doors.items():
            secret = bytes.fromhex(door["secret"])
            with _refusing(f"sending a descriptor to rank {rank}"):
                sender.sendmsg([secret], rights, socket.MSG_DONTWAIT, f"\0{door['name']}")


def _receive(door: socket.socket, secret: bytes) -> int:
    """The descriptor that came with the secret, which lies there. Closes all others."""
    room, flags = socket.CMSG_SPACE(_DESCRIPTOR), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    for _ in range(_MOST_STRANGERS):
        with _refusing("receiving a descriptor"):
            said, control, _, _ = door.recvmsg(_SECRET_BYTES + 1, room, flags)
        came = array("i")
        for level, kind, rights in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                came.frombytes(rights[: len(rights) - len(rights) % _DESCRIPTOR])
        known = secrets.compare_digest(said, secret)
        if known and len(came) == 1:
            return came[0]
        for each in came:
            os.close(each)
        if known:
            raise _RefusedError("the descriptor did not come through")
    raise _RefusedError("others send to this rank's socket")
