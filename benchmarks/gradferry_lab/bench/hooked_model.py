"""A model with a hook and an optimizer, on this rank: what takes turns in a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from gradferry.core.device import CPU
from gradferry.core.nodes import AUTO
from torch.distributed.device_mesh import DeviceMesh

from gradferry_lab.workloads.models import Workload
from gradferry_lab.workloads.optimizers import make_optimizer
from gradferry_lab.workloads.parallel import parallelize

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
        hook: its name.
        bucket_cap_mb: wanted of DDP; None where there is a mesh.
        seed: of model, data and codec.
        compress_from: see `apply_hook`.
        device: where the model is.
        group: of DDP; None: the default group.
        fused: see `make_optimizer`.
        nodes: see `apply_hook`.
        mesh: see `parallelize`.
    """

    def __init__(
        self,
        workload: Workload,
        hook: str,
        bucket_cap_mb: float | None,
        seed: int,
        compress_from: int | None,
        *,
        device: torch.device = CPU,
        group: dist.ProcessGroup | None = None,
        fused: bool | None = None,
        nodes: object = AUTO,
        mesh: DeviceMesh | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.hook = hook
        self._workload = workload
        self._generator = torch.Generator().manual_seed(seed)
        self._parallel = parallelize(
            lambda: workload.build_model().to(device),
            hook,
            mesh,
            bucket_cap_mb=bucket_cap_mb,
            group=group,
            seed=seed,
            compress_from=compress_from,
            nodes=nodes,
        )
        self._model = self._parallel.model
        self.handle = self._parallel.handle
        state = self.handle.state
        config = state.config if state else None
        learns_first = config is not None and config.momentum and config.warmup_steps
        optimizer = "OneBitAdam" if learns_first else "AdamW"
        self._optimizer = make_optimizer(
            optimizer, workload, self._model.parameters(), state, fused=fused
        )

    def _draw(self, steps: int) -> list[Any]:
        """This rank's next batches."""
        return [self._workload.draw(self._generator) for _ in range(steps)]
