"""Compression of what FSDP2 (``torch.distributed.fsdp.fully_shard``) exchanges.

>>> for block in (*model.blocks, model):
...     fully_shard(block, mesh=mesh)
>>> state = gradferry.fsdp.attach(model, "q4")
"""

from gradferry.fsdp.attach import attach
from gradferry.fsdp.state import ShardedState

__all__ = ["ShardedState", "attach"]
