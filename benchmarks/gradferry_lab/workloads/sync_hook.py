"""The hook `sync`: a step that communicates no gradient, and in which ranks still meet.

Ranks that train together wait for the slowest and for one message at least, which no codec avoids.
"""

# DDP compares the hook's annotations with the classes themselves: no postponed evaluation here.

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket


def sync_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP, with its group; hands every bucket back at once, as it is.

    With the last bucket of a backward pass it all-reduces one element and waits, on a GPU in the
    current stream: at the instant at which a hook's last result is waited for.
    """
    if bucket.is_last():
        one = torch.zeros(1, dtype=torch.float32, device=bucket.buffer().device)
        dist.all_reduce(one, group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
