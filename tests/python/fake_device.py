"""The fake device of tests/streams, as a test's rank uses it."""

from __future__ import annotations

import datetime
import functools
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

DEVICE = torch.device("privateuseone", 0)
# What the backend of each kind of group calls itself: by its name the hook knows gloo.
BACKEND_NAMES = {"streamed": "streamed", "staged": "gloo"}
backends: dict[str, Any] = {}  # of this rank, by kind


@functools.cache
def load() -> ModuleType:
    """The device, known to torch and to gradferry from now on."""
    try:
        import gradferry_fake_device as fake
    except ImportError as error:
        raise ImportError(
            "these tests need the fake device: build with GRADFERRY_TESTS=ON and install "
            "component 'tests', as `make test` does"
        ) from error
    from gradferry import device

    device.LIBRARIES["privateuseone"] = fake.library
    torch._register_device_module("privateuseone", _DeviceModule())
    for kind, name in BACKEND_NAMES.items():
        make = functools.partial(_make_backend, fake, kind, name)
        dist.Backend.register_backend(f"fake_{kind}", make, devices=["privateuseone"])
    return fake


class _DeviceModule(ModuleType):
    def __init__(self) -> None:
        super().__init__("torch.privateuseone")

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0


def _make_backend(
    fake: ModuleType,
    kind: str,
    name: str,
    store: Store,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
) -> Any:
    carrier = ProcessGroupGloo(store, rank, size, timeout)
    backends[kind] = fake.StreamedBackend(carrier, name, rank, size, timeout)
    return backends[kind]


@functools.cache
def group(kind: str) -> dist.ProcessGroup:
    """All ranks, with a backend for the device. Collective at the first call."""
    load()
    return dist.new_group(backend=f"cpu:gloo,privateuseone:fake_{kind}")
