"""This machine's GPUs in place of the fake device: tests run on them as they are.

A group "streamed" is one of NCCL, "staged" one of gloo. Where there are more ranks than GPUs, each
rank says that it is a machine of its own: otherwise NCCL refuses ranks that share one. Nothing here
finds races, or counts what is done to a device: run_device_tests.py leaves out what asks for that.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from world import kept_groups

DEVICE = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
# Torch's kernels contract multiplications and additions: an optimizer gives other last bits.
COMPUTES_AS_THE_CPU = False
BACKENDS = {"streamed": "cpu:gloo,cuda:nccl", "staged": "gloo"}

if dist.get_world_size() > torch.cuda.device_count():
    os.environ["NCCL_HOSTID"] = f"rank {dist.get_rank()} of process {os.getpid()}"
torch.cuda.set_device(DEVICE)


class machine:  # noqa: N801 (the fake one is a module)
    """What a test may ask of both."""

    @staticmethod
    def set_seed(seed: int) -> None:
        """A GPU has an order of its own."""

    @staticmethod
    def synchronize() -> None:
        """Waits for all streams."""
        torch.cuda.synchronize(DEVICE)

    @staticmethod
    def races() -> list[str]:
        """None are found."""
        torch.cuda.synchronize(DEVICE)
        return []


def group(kind: str, ranks: tuple[int, ...] | None = None) -> Any:
    """Of these ranks of the world, or of all. Collective in the world at the first call."""
    return _group(kind, tuple(range(dist.get_world_size())) if ranks is None else ranks)


@functools.cache
def _group(kind: str, ranks: tuple[int, ...]) -> Any:
    made = dist.new_group(list(ranks), backend=BACKENDS[kind])
    kept_groups.append(made)
    return made
