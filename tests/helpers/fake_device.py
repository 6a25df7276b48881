"""The fake device of tests/engine/streams, as a test's rank uses it.

Importing this makes it known to torch and to gradferry, for good.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from gradferry.core import device, engine
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from world import kept_groups

try:
    import gradferry_fake_device as machine
except ImportError as error:
    raise ImportError(
        "these tests need the fake device: build with GRADFERRY_TESTS=ON and install component "
        "'tests', as `make test` does"
    ) from error

DEVICE = torch.device("fake", 0)
# Its operations are torch's own on the CPU: an optimizer gives the same bits.
COMPUTES_AS_THE_CPU = True
# What the backend of each kind of group calls itself: by its name the hook knows gloo.
BACKEND_NAMES = {"streamed": "streamed", "staged": "gloo"}
backends: dict[str, Any] = {}  # of this rank, by kind: that of the world's own group
last_made: collections.deque[Any] = collections.deque(maxlen=2)  # those of nodes, for example


class _DeviceModule(ModuleType):
    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def is_initialized(self) -> bool:
        return True

    # FSDP2 takes streams and events from here.
    Event = torch.Event

    def Stream(self, priority: int = 0) -> torch.Stream:  # noqa: N802
        return torch.Stream(DEVICE, priority=priority)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream()

    @contextlib.contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        """What is enqueued within goes to that stream."""
        before = self.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """There are no random numbers."""


def _make_backend(
    kind: str, store: Store, rank: int, size: int, timeout: datetime.timedelta
) -> Any:
    carrier = ProcessGroupGloo(store, rank, size, timeout)
    backend = machine.StreamedBackend(carrier, BACKEND_NAMES[kind], rank, size, timeout)
    backends.setdefault(kind, backend)  # the tests' further groups come later
    last_made.append(backend)
    return backend


_make_backends = engine.make_backends


@functools.wraps(_make_backends)
def _make_watched_backends(
    group: dist.ProcessGroup, nonce: str, number: int, place: torch.device = device.CPU
) -> list[Any]:
    backends = _make_backends(group, nonce, number, place)
    if place.type != DEVICE.type:
        return backends
    return [machine.HostBackend(backend) for backend in backends]


engine.make_backends = _make_watched_backends
device.LIBRARIES["fake"] = machine.device_library
torch._register_device_module("fake", _DeviceModule("torch.fake"))
for _kind in BACKEND_NAMES:
    dist.Backend.register_backend(
        f"fake_{_kind}", functools.partial(_make_backend, _kind), devices=["fake"]
    )


def group(kind: str, ranks: tuple[int, ...] | None = None) -> dist.ProcessGroup:
    """Of these ranks of the world, or of all, with a backend for the device. Collective in the
    world at the first call.
    """
    of_all = _group(kind, tuple(range(dist.get_world_size())))  # whose backend is the first
    return of_all if ranks is None else _group(kind, ranks)


@functools.cache
def _group(kind: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    made = dist.new_group(list(ranks), backend=f"cpu:gloo,fake:fake_{kind}")
    kept_groups.append(made)
    return made
