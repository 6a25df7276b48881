"""Worlds for trainers. `make test-hosts` runs these tests, in an environment of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before anything starts a thread pool, and inherited by every process a test starts.
os.environ.update(
    OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=""
)

from world import World


@pytest.fixture(scope="module")
def world_of_2() -> Iterator[World]:
    """Two ranks of this module alone: trainers keep much in their processes."""
    world = World(2)
    yield world
    world.stop()


@pytest.fixture(scope="module")
def world_of_4() -> Iterator[World]:
    world = World(4)
    yield world
    world.stop()
