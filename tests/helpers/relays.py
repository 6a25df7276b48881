"""Relays on the connections of one rank's lanes: what a bad link does to them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

from reference import HEADER

_SIZE = struct.Struct("<Q")  # precedes every message
_PAYLOAD = _SIZE.size + HEADER.size  # where it begins
_READ_BYTES = 1 << 16


class Relays:
    """Each connection gets a relay for each direction. A message is changed only on its way out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._damaged: set[str] = set()  # lanes

    def damage(self, lane: str) -> None:
        """A bit of the payload of the lane's next message that has one flips."""
        self._damaged.add(lane)

    @contextlib.contextmanager
    def between(self) -> Iterator[None]:
        """Lanes that are connected here have relays."""
        from gradferry.core import engine

        make_lanes = engine.make_lanes

        def make_relayed(group: Any, nonce: str, lanes: Any, *rest: Any) -> list[Any]:
            made = make_lanes(group, nonce, lanes, *rest)
            for name, lane in zip(lanes, made, strict=True):
                for number in lane.descriptors():
                    if number >= 0:
                        self._relay_behind(number, name)
            return made

        with mock.patch.object(engine, "make_lanes", make_relayed):
            yield

    def _relay_behind(self, number: int, lane: str) -> None:
        """Puts a relay between a descriptor of a lane and its connection."""
        far = socket.socket(fileno=os.dup(number))
        far.setblocking(True)
        near, ours = socket.socketpair()
        with near:
            near.setblocking(False)
            os.dup2(near.fileno(), number, inheritable=False)
        for source, target, changing in ((ours, far, lane), (far, ours, "")):
            threading.Thread(
                target=self._relay, args=(source, target, changing), daemon=True
            ).start()

    def _relay(self, source: socket.socket, target: socket.socket, lane: str) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                data = (
                    self._changed(self._message(source), lane) if lane else source.recv(_READ_BYTES)
                )
                if not data:
                    break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _message(self, source: socket.socket) -> bytes:
        size = self._exactly(source, _SIZE.size)
        return size + self._exactly(source, _SIZE.unpack(size)[0])

    @staticmethod
    def _exactly(source: socket.socket, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            more = source.recv(num_bytes - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def _changed(self, message: bytes, lane: str) -> bytes:
        """The message as it travels."""
        with self._lock:
            if lane not in self._damaged or len(message) == _PAYLOAD:
                return message
            self._damaged.remove(lane)
        changed = bytearray(message)
        changed[_PAYLOAD + 5] ^= 1
        return bytes(changed)
