"""Process groups that torch.distributed does not know."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def own_group(name: str, store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """A group of these ranks, with keys of its own in the store."""
    below = dist.PrefixStore(name, store)
    group = dist.ProcessGroup(below, rank, size)
    backend = dist.ProcessGroupGloo(below, rank, size, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
