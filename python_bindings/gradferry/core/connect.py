"""TCP connections between all ranks of a group, which meet in its store.

Every rank listens, and writes into the store where, with a random question and its answer. A rank
connects to all ranks below it and accepts those above it. A rank that connects sends the question
and its own number, and receives the answer, so that a process that cannot read the store cannot
take a rank's place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from gradferry.core.meeting import MOST_PAUSE_SECONDS, forget

_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sI")  # question, rank
# That have not said yet who they are, or twice the ranks; with one more the oldest is closed.
_MOST_STRANGERS = 64
# Probes keep routers from forgetting idle connections. An idle one is broken only after two hours
# without an answer; what is in flight has the timeout of the process group.
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 120),
)
_LEAST_PAUSE_SECONDS = 0.001  # between two reads of the store
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
# Of accept(2): a connection is gone again before it was accepted, or its network is.
_GONE = tuple(
    getattr(errno, name)
    for name in (
        *("EAGAIN", "ECONNABORTED", "ENETDOWN", "EPROTO", "ENOPROTOOPT", "EHOSTDOWN", "ENONET"),
        *("EHOSTUNREACH", "EOPNOTSUPP", "ENETUNREACH", "EPERM"),
    )
)
_SIOCGIFADDR = 0x8915  # ioctl of Linux: the IPv4 address of an interface
_IPV6_INTERFACES = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class _Place:
    """Where a rank listens, as it stands in the store."""

    family: int
    address: tuple[Any, ...]
    question: str = field(repr=False)  # hexadecimal
    answer: str = field(repr=False)


def connect_ranks(
    store: Store,
    rank: int,
    world_size: int,
    ranks: Collection[int],
    number: int,
    seconds: float,
    between_polls: Callable[[], None] = lambda: None,
) -> list[socket.socket | None]:
    """Connects `ranks` with each other. Collective among them.

    Args:
        store: with a prefix of its own.
        rank: of this process.
        world_size: more than any rank.
        ranks: which ranks call this with this number; this one is among them.
        number: different for every call with this store; it also chooses among the interfaces that
            GLOO_SOCKET_IFNAME lists.
        seconds: how long to wait for the others.
        between_polls: called ten times a second or more often while this rank waits for others;
            what it raises ends the wait.

    Returns:
        Non-blocking sockets by rank; None for this one, and for those not among `ranks`.

    Raises:
        OSError, RuntimeError: this rank cannot connect, or another did not within `seconds`.
            Nothing stays open.
    """
    deadline = time.monotonic() + seconds
    connections: list[socket.socket | None] = [None] * world_size
    try:
        with _listen(number) as listener:
            place = _Place(
                listener.family,
                listener.getsockname(),
                secrets.token_hex(_SECRET_BYTES),
                secrets.token_hex(_SECRET_BYTES),
            )
            store.set(f"{number}/{rank}", json.dumps(asdict(place)))
            # Rank 0 accepts at once, and each rank when those below have answered it.
            for below in sorted(each for each in ranks if each < rank):
                found = _find(store, f"{number}/{below}", below, deadline, between_polls)
                connections[below] = _connect(found, below, rank, place.address, deadline)
            missing = {each for each in ranks if each > rank}
            _accept(listener, place, connections, missing, deadline, between_polls)
        forget(store, [f"{number}/{rank}"])  # all that read it are connected
        for connection in filter(None, connections):
            connection.setblocking(False)
            for option in _OPTIONS:
                connection.setsockopt(*option)
    except BaseException:
        for connection in filter(None, connections):
            connection.close()
        raise
    return connections


# --- where to listen ---


def _listen(number: int) -> socket.socket:
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        name = names[number % len(names)]
        hosts, what = _addresses_of(name), f"GLOO_SOCKET_IFNAME: the network interface {name!r}"
    else:
        # Where the host's name leads to, as for gloo, and loopback where that is not this machine.
        hosts, what = [socket.gethostname(), "127.0.0.1"], "the name of this host"
    reason: OSError | None = None
    for host in hosts:
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            if error.errno in _OUT_OF_FILES:
                raise
            reason = error
            continue
        for family, kind, protocol, _, address in found:
            try:
                listener = socket.socket(family, kind, protocol)
            except OSError as error:
                if error.errno in _OUT_OF_FILES:
                    raise
                reason = error  # a host without that family
                continue
            try:
                listener.bind(address)
                listener.listen(socket.SOMAXCONN)
            except OSError as error:
                reason = error
                listener.close()
            else:
                return listener
    detail = f": {reason}" if reason else ""
    raise RuntimeError(f"{what} has no address to listen on{detail}; set GLOO_SOCKET_IFNAME")


def _addresses_of(interface: str) -> list[str]:
    """IPv4 first, then IPv6, link-local ones last. Python does not know addresses of interfaces."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        addresses.append(socket.inet_ntoa(answer[20:24]))  # ifreq: 16 of name, then a sockaddr_in
    found = []
    with contextlib.suppress(OSError), _IPV6_INTERFACES.open(encoding="ascii") as table:
        for hexadecimal, *_, name in map(str.split, table):
            if name == interface:
                found.append(IPv6Address(bytes.fromhex(hexadecimal)))
    for address in sorted(found, key=lambda one: one.is_link_local):
        addresses.append(f"{address}%{interface}" if address.is_link_local else str(address))
    return addresses


# --- meeting ---


def _left(deadline: float, rank: int) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"rank {rank} timed out")
    return left


def value_from(
    store: Store,
    key: str,
    rank: int,
    deadline: float,
    between_polls: Callable[[], None] = lambda: None,
) -> bytes:
    """What a rank has written, or will, under a key. `between_polls` as for `connect_ranks`.

    Raises:
        TimeoutError: it had not at `deadline`, in seconds of ``time.monotonic()``.
    """
    # Not store.wait(), which Ctrl-C does not interrupt.
    pause = _LEAST_PAUSE_SECONDS
    while not store.check([key]):
        between_polls()
        time.sleep(min(pause, _left(deadline, rank)))
        pause = min(2 * pause, MOST_PAUSE_SECONDS)
    value: bytes = store.get(key)
    return value


def _find(
    store: Store, key: str, rank: int, deadline: float, between_polls: Callable[[], None]
) -> _Place:
    value = value_from(store, key, rank, deadline, between_polls)
    try:
        return _Place(**json.loads(value))
    except (TypeError, ValueError) as error:
        raise RuntimeError("another rank runs another version of gradferry") from error


def _seen_from_here(place: _Place, own_address: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where a rank listens; link-local addresses are on the interface on which this rank does."""
    if place.family == socket.AF_INET6 and len(own_address) == len(place.address):
        return (*place.address[:-1], own_address[-1])
    return tuple(place.address)


def _connect(
    place: _Place, rank: int, own_rank: int, own_address: tuple[Any, ...], deadline: float
) -> socket.socket:
    connection = socket.socket(place.family, socket.SOCK_STREAM)
    try:
        connection.settimeout(_left(deadline, rank))
        connection.connect(_seen_from_here(place, own_address))
        connection.sendall(_HELLO.pack(bytes.fromhex(place.question), own_rank))
        answer = b""
        while len(answer) < _SECRET_BYTES:
            connection.settimeout(_left(deadline, rank))
            more = connection.recv(_SECRET_BYTES - len(answer))
            if not more:
                raise ConnectionResetError("connection closed by peer")
            answer += more
        if answer != bytes.fromhex(place.answer):
            raise RuntimeError("something else listens where it did")
    except (OSError, RuntimeError) as error:
        connection.close()
        raise RuntimeError(f"rank {rank}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _accept(
    listener: socket.socket,
    place: _Place,
    connections: list[socket.socket | None],
    missing: set[int],
    deadline: float,
    between_polls: Callable[[], None],
) -> None:
    """Fills in the connections of the ranks that are `missing`."""
    said: dict[socket.socket, bytes] = {}  # by strangers, the oldest first
    listener.setblocking(False)
    try:
        while missing:
            poll = select.poll()
            for each in (listener, *said):
                poll.register(each, select.POLLIN)
            longest = min(MOST_PAUSE_SECONDS, _left(deadline, min(missing)))
            ready = {number for number, _ in poll.poll(1000 * longest)}
            if not ready:
                between_polls()
            for stranger in [each for each in said if each.fileno() in ready]:
                who = _read_hello(stranger, place, said)
                if who in missing:
                    missing.remove(who)
                    connections[who] = stranger
                    _answer(stranger, place, who)
                elif stranger not in said:
                    stranger.close()
            if listener.fileno() in ready:
                if len(said) == max(_MOST_STRANGERS, 2 * len(connections)):
                    oldest = next(iter(said))
                    del said[oldest]
                    oldest.close()
                try:
                    stranger, _ = listener.accept()
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
                    continue
                stranger.setblocking(False)
                said[stranger] = b""
    finally:
        for stranger in said:
            stranger.close()


def _answer(connection: socket.socket, place: _Place, rank: int) -> None:
    try:
        connection.sendall(bytes.fromhex(place.answer))  # the first bytes: they fit
    except OSError as error:
        raise RuntimeError(f"rank {rank}: {error}") from error


def _read_hello(
    stranger: socket.socket, place: _Place, said: dict[socket.socket, bytes]
) -> int | None:
    """The rank that a stranger is, if it has said all and knows the question. Takes it out of
    `said` when nothing more is to come.
    """
    try:
        more = stranger.recv(_HELLO.size - len(said[stranger]))
    except BlockingIOError:
        return None
    except OSError:
        more = b""
    text = said.pop(stranger) + more
    if len(text) == _HELLO.size:
        question, who = _HELLO.unpack(text)
        return who if secrets.compare_digest(question, bytes.fromhex(place.question)) else None
    if more:
        said[stranger] = text
    return None
