"""A model with a hook and an optimizer, on this rank: what takes turns in a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradferry.core.device import CPU
from gradferry.core.nodes import AUTO
from gradferry.lab.workloads.hooks import apply_hook, bucket_caps
from gradferry.lab.workloads.models import Workload
from gradferry.lab.workloads.optimizers import make_optimizer

PHASES = ("encode_ms", "network_ms", "reduce_ms", "decode_ms")  # of HookState.stats


def phases_of(stats: Mapping[str, Any]) -> dict[str, float]:
    """The times of PHASES, sums since the start."""
    return {key: float(stats[key]) for key in PHASES}


class HookedModel:
    """One hook with its model, batches and optimizer.

    That is AdamW, in momentum mode as `gradferry.optim.momentum_mode` sets it up, and OneBitAdam
    where momentum mode begins with warm-up steps.

    Args:
        workload: what is trained.
        hook: its name, of `apply_hook`.
        bucket_cap_mb: wanted of DDP.
        seed: of model, data and codec.
        compress_from: see `apply_hook`.
        device: where the model is.
        group: of DDP; None: the default group.
        fused: see `make_optimizer`.
        nodes: see `apply_hook`.
    """

    def __init__(
        self,
        workload: Workload,
        hook: str,
        bucket_cap_mb: float,
        seed: int,
        compress_from: int | None,
        *,
        device: torch.device = CPU,
        group: dist.ProcessGroup | None = None,
        fused: bool | None = None,
        nodes: object = AUTO,
    ) -> None:
        torch.manual_seed(seed)
        self.hook = hook
        self._workload = workload
        self._generator = torch.Generator().manual_seed(seed)
        model = workload.build_model().to(device)
        (cap,) = bucket_caps(hook, model, [bucket_cap_mb])
        self._ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap)
        self.handle = apply_hook(
            self._ddp, hook, seed=seed, compress_from=compress_from, nodes=nodes
        )
        state = self.handle.state
        config = state.config if state else None
        learns_first = config is not None and config.momentum and config.warmup_steps
        optimizer = "OneBitAdam" if learns_first else "AdamW"
        self._optimizer = make_optimizer(
            optimizer, workload, self._ddp.parameters(), state, fused=fused
        )

    def _draw(self, steps: int) -> list[Any]:
        """This rank's next batches."""
        return [self._workload.draw(self._generator) for _ in range(steps)]
