"""Compression of what FSDP2 (``torch.distributed.fsdp.fully_shard``) exchanges: see `attach`."""

from gradferry.fsdp.attach import attach
from gradferry.fsdp.state import ShardedState

__all__ = ["ShardedState", "attach"]
