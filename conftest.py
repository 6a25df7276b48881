"""Shared fixtures: worlds of processes that live as long as the session, one per world size."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

# Before anything starts a thread pool, and inherited by every process a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

from world import World, Worlds, WorldsOn, worlds_by_size

# A shell's background job ignores SIGINT, and so would every process a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """worlds(n) is the session's world of n processes."""
    yield from worlds_by_size()


@pytest.fixture(scope="session")
def device_worlds() -> Iterator[Worlds]:
    """Worlds of their own: a process keeps the fake device once it has loaded it."""
    yield from worlds_by_size()


@pytest.fixture(scope="session")
def worlds_on(worlds: Worlds, device_worlds: Worlds) -> WorldsOn:
    """worlds_on(scenario.device)(n), where "cpu" is one of several devices."""
    return lambda device: worlds if device == "cpu" else device_worlds


@pytest.fixture
def world_of_2(worlds: Worlds) -> World:
    return worlds(2)


@pytest.fixture(scope="session")
def namespaces_allowed() -> None:
    """Hosts can be made of network namespaces here; elsewhere the test is skipped."""
    # Not above: what starts processes sets their environment first.
    from gradferry.errors import ConfigError
    from gradferry_lab.ranks.network import check_network

    try:
        check_network(2)
    except ConfigError as error:
        pytest.skip(f"no network namespaces here: {error}")
