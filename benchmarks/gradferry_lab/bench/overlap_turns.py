"""`gradferry bench overlap` on the ranks: backward passes with and without a hook take turns, by
the clock of the device that runs them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from gradferry.core.agreement import most_of_ranks

from gradferry_lab.bench.hooked_model import HookedModel
from gradferry_lab.ranks.launch import Emit
from gradferry_lab.ranks.place import on_device, place_of_rank
from gradferry_lab.workloads.hooks import COMPRESS_FROM
from gradferry_lab.workloads.models import Workload, load_workload

# As for `gradferry bench train`: the step after the hook begins to compress is like all others.
_WARMUP_STEPS = COMPRESS_FROM + 2
_TRACED_STEPS = 2


@dataclass(frozen=True)
class OverlapOptions:
    """The options. Hooks and model are already checked."""

    model: str
    hooks: tuple[str, ...]
    device: str  # "cpu" or "cuda"
    bucket_cap_mb: float
    rounds: int
    steps: int  # of a hook in a round
    seed: int
    trace: Path | None = None  # for the last hook's; on the machine of rank 0


@dataclass
class OverlapOutcome:
    """The results of one hook, over all ranks."""

    hook: str
    backward_ms: list[float] = field(default_factory=list)  # per step and round, slowest rank


class _WatchedModel(HookedModel):
    """Trains, and knows what the backward passes took."""

    def __init__(
        self,
        workload: Workload,
        hook: str,
        options: OverlapOptions,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(
            workload,
            hook,
            options.bucket_cap_mb,
            options.seed,
            COMPRESS_FROM,
            device=device,
            group=group,
        )
        self._device = device

    def backward_seconds(self, steps: int) -> float:
        """Trains; returns what the backward passes took here. All ranks start together."""
        batches = [on_device(self._device, batch) for batch in self._draw(steps)]
        watch = _DeviceWatch() if self._device.type == "cuda" else _Watch()
        dist.barrier()
        for batch in batches:
            self._optimizer.zero_grad()
            loss = self._workload.loss(self._model, batch)
            with watch:
                loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        return watch.seconds()


class _Watch:
    """Adds up the seconds of the blocks it is used for."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._started

    def seconds(self) -> float:
        return self._seconds


class _DeviceWatch(_Watch):
    """The same by events in the current stream, which waits for DDP as backward() ends."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[torch.cuda.Event] = []

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: object) -> None:
        self._mark()

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._marks.append(event)
        self._marks[-1].record()

    def seconds(self) -> float:
        torch.cuda.synchronize()
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        return float(sum(before.elapsed_time(after) for before, after in pairs)) / 1e3


def run_overlap(emit: Emit, options: OverlapOptions) -> list[OverlapOutcome]:
    """Runs on every rank; the outcomes are the same on all. Emits what it is doing, as text."""
    device, group = place_of_rank(options.device)
    workload = load_workload(options.model)
    models = []
    for hook in options.hooks:
        emit(f"{hook}: first steps")
        models.append(_WatchedModel(workload, hook, options, device, group))
        models[-1].backward_seconds(_WARMUP_STEPS)
    outcomes = {hook: OverlapOutcome(hook) for hook in options.hooks}
    for turn in range(options.rounds):
        emit(f"round {turn + 1}/{options.rounds}")
        order = models if turn % 2 == 0 else models[::-1]
        for model in order:
            (slowest,) = most_of_ranks([model.backward_seconds(options.steps)])
            outcomes[model.hook].backward_ms.append(1e3 * slowest / options.steps)
    if options.trace is not None:
        emit("trace")
        _write_trace(models[-1], options.trace, device)
    return list(outcomes.values())


def _write_trace(model: _WatchedModel, path: Path, device: torch.device) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        model.backward_seconds(_TRACED_STEPS)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
    dist.barrier()
