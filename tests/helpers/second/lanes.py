"""Section 2 of docs/reference/protocol.md: connections between all ranks, and messages on them."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable

from .attach import PAUSE_SECONDS, Group

LANES = ("scatter", "gather", "commit")  # in the order of their numbers
HELLO = struct.Struct("<16sII")
SIZE = struct.Struct("<Q")


class LostContactError(Exception):
    """A connection broke, or a message has another size than it should."""


class Lanes:
    """Non-blocking connections by lane and rank. Whoever waits moves all of them."""

    def __init__(self, group: Group, nonce: str) -> None:
        self._group = group
        self._connections: dict[tuple[str, int], socket.socket] = {}
        end = time.monotonic() + min(group.timeout_seconds / 4, 150.0)
        self._connect(f"gradferry/{nonce}/sockets", end)
        self._unsent = {key: bytearray() for key in self._connections}
        self._came = {key: bytearray() for key in self._connections}
        self._closed: set[tuple[str, int]] = set()  # by the other rank
        for connection in self._connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connect(self, prefix: str, end: float) -> None:
        rank, store = self._group.rank, self._group.store
        question, answer = secrets.token_bytes(16), secrets.token_bytes(16)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            host, port = listener.getsockname()
            place = f"{question.hex()} {answer.hex()} 4 {host} {port}"
            store.set(f"{prefix}/{rank}", place)
            for below in range(rank):
                while not store.check([f"{prefix}/{below}"]):
                    if time.monotonic() > end:
                        raise LostContactError(f"rank {below} did not listen")
                    time.sleep(PAUSE_SECONDS)
                words = store.get(f"{prefix}/{below}").decode().split()
                asked, expected = map(bytes.fromhex, words[:2])
                for number, lane in enumerate(LANES):
                    # Three words an address, and addresses in turn.
                    first = 2 + 3 * number % (len(words) - 2)
                    family, host, port = words[first : first + 3]
                    kind = {"4": socket.AF_INET, "6": socket.AF_INET6}[family]
                    connection = socket.socket(kind, socket.SOCK_STREAM)
                    connection.settimeout(end - time.monotonic())
                    connection.connect((host, int(port)))
                    connection.sendall(HELLO.pack(asked, rank, number))
                    if _read(connection, 16) != expected:
                        raise LostContactError(f"rank {below} gave another answer")
                    self._connections[lane, below] = connection
            above = range(rank + 1, self._group.world_size)
            missing = {(who, number) for who in above for number in range(len(LANES))}
            while missing:
                listener.settimeout(end - time.monotonic())
                connection, _ = listener.accept()
                connection.settimeout(end - time.monotonic())
                asked, *who = HELLO.unpack(_read(connection, HELLO.size))
                if asked != question or tuple(who) not in missing:
                    connection.close()
                    continue
                connection.sendall(answer)
                missing.remove(tuple(who))
                self._connections[LANES[who[1]], who[0]] = connection

    def send(self, lane: str, rank: int, message: bytes) -> None:
        """Queues a message, and sends what the kernel takes of it."""
        self._unsent[lane, rank] += SIZE.pack(len(message)) + message
        self._move(0.0)

    def receive(self, lane: str, rank: int, size: int) -> bytes:
        """The next message of a rank, which must have this size."""
        came = self._came[lane, rank]

        def there(num_bytes: int) -> bool:
            if len(came) < num_bytes and (lane, rank) in self._closed:
                raise LostContactError(f"rank {rank} closed its connection")
            return len(came) >= num_bytes

        self._wait(lambda: there(SIZE.size))
        announced = SIZE.unpack_from(came)[0]
        if announced != size:
            raise LostContactError(f"rank {rank} sends {announced} bytes, not {size}")
        self._wait(lambda: there(SIZE.size + size))
        message = bytes(came[SIZE.size : SIZE.size + size])
        del came[: SIZE.size + size]
        return message

    def flush(self) -> None:
        """Waits until the kernel has all that was sent."""
        self._wait(lambda: not any(self._unsent.values()))

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _wait(self, done: Callable[[], bool]) -> None:
        while not done():
            self._move(self._group.timeout_seconds)

    def _move(self, seconds: float) -> None:
        """A closed connection matters only to who waits for more on it, or has more to send."""
        by_socket = {
            connection: key
            for key, connection in self._connections.items()
            if key not in self._closed
        }
        wanting = [connection for connection, key in by_socket.items() if self._unsent[key]]
        readable, writable, _ = select.select(list(by_socket), wanting, [], seconds)
        if seconds and not readable and not writable:
            raise LostContactError("nothing came within the timeout")
        for connection in readable:
            key = by_socket[connection]
            with contextlib.suppress(ConnectionResetError):
                if more := connection.recv(1 << 20):
                    self._came[key] += more
                    continue
            self._closed.add(key)
            if self._unsent[key]:
                raise LostContactError(f"rank {key[1]} closed its connection")
        for connection in writable:
            unsent = self._unsent[by_socket[connection]]
            try:
                del unsent[: connection.send(unsent)]
            except BlockingIOError:
                continue
            except OSError as error:
                raise LostContactError(f"rank {by_socket[connection][1]}: {error}") from error


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise LostContactError("a connection was closed while ranks connected")
        data += more
    return data
