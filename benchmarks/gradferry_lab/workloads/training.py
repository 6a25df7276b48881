"""The training loop: one task, one hook, the same model and data for every hook."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import fmean, median

import torch
import torch.distributed as dist
from gradferry.averaging.handle import Averaging
from gradferry.core.agreement import Record, odd_one
from gradferry.errors import ConfigError, DivergedError
from torch import nn

from gradferry_lab.ranks.hosts import found_hosts
from gradferry_lab.ranks.launch import gather_from_ranks
from gradferry_lab.ranks.place import on_device, place_of_rank
from gradferry_lab.workloads.hooks import HookHandle, How
from gradferry_lab.workloads.optimizers import make_optimizer
from gradferry_lab.workloads.parallel import DDP, mesh_for, parallelize
from gradferry_lab.workloads.task import Batch, Task, num_predictions

FEWEST_STEPS = 3
_WARMUP = 0.05  # of the steps: the learning rate rises, then falls as a cosine
_UNTIMED_STEPS = 3  # the first steps build buckets and warm caches up

OnStep = Callable[[int, float], None]  # steps done, this rank's training loss in nats


@dataclass
class TrainingRun:
    """The results of one hook, over all ranks."""

    hook: str
    num_ranks: int
    measured: bool  # False: bytes are computed, because PyTorch does not count them
    initial_loss: float  # of the validation data, as final_loss
    final_loss: float
    final_score: float  # the task's score of the validation data
    gathered_loss: float | None  # as final_loss, of a sharded model as it computes; None: whole
    losses: list[float]  # of the training batches, one per step, mean over ranks
    cumulative_wire_bytes: list[int]  # sent by the rank that sends most, after each step
    seconds: list[float]  # that each step took on its slowest rank
    wire_bytes_formula: int  # of that rank, per step
    fp32_bytes: int  # per step: HookHandle.dense_bytes
    ms_per_step: float  # median over steps of the slowest rank

    @property
    def wire_bytes_per_step(self) -> int:
        """Bytes of the last step; the first ones have other buckets."""
        last_two = [0, *self.cumulative_wire_bytes][-2:]
        return last_two[1] - last_two[0]


@dataclass(frozen=True)
class Sums:
    """Over the predictions of validation data."""

    loss: float
    score: float
    predictions: int


@dataclass
class _RankRun:
    """What one rank saw."""

    initial: Sums
    final: Sums
    gathered: Sums | None = None
    losses: list[float] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    formula_bytes: int = 0
    parameters_digest: int = 0

    @classmethod
    def of(cls, record: Record) -> _RankRun:
        """The inverse of asdict()."""
        kinds = ("initial", "final", "gathered")
        sums = {key: Sums(**record[key]) for key in kinds if record[key] is not None}
        return cls(**{**record, **sums})


class Training:
    """One training on this rank, step by step; make it and call it on every rank.

    Each rank takes its share of every global batch, one sample in W. Several trainings may take
    turns: none changes the batches, weights or random numbers of another.
    """

    def __init__(
        self,
        task: Task,
        hook: str,
        *,
        steps: int,
        seed: int,
        optimizer: str = "AdamW",
        parallel: str = DDP,
        device: str = "cpu",
    ) -> None:
        """Builds the model, attaches the hook and validates once. For arguments and errors see
        `train`.
        """
        check_size(task, steps, dist.get_world_size())
        mesh = mesh_for(parallel, found_hosts())
        place, group = place_of_rank(device)
        torch.manual_seed(seed)
        self.hook = hook
        self._task = task
        self._trained = parallelize(
            lambda: task.build_model().to(place), hook, mesh, How(seed, group=group)
        )
        self._handle = self._trained.handle
        self._optimizer = make_optimizer(optimizer, task, self._trained.model, self._handle.state)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: rate_at(step, steps)
        )
        self._is_sharded = mesh is not None
        self._place = place
        self._batches = _batches(task, seed)
        initial = self._validate(self._trained.whole())
        self._run = _RankRun(initial, initial)
        self._trained.model.train()

    def step(self) -> float:
        """Trains one step; returns the loss of this rank's part of the batch, in nats."""
        run, batch = self._run, on_device(self._place, next(self._batches))
        started = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self._task.mean_loss(self._trained.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        run.seconds.append(time.perf_counter() - started)
        self._schedule.step()
        run.losses.append(loss.item())
        run.wire_bytes.append(self._handle.wire_bytes(len(run.losses)))
        return run.losses[-1]

    @property
    def state(self) -> Averaging | None:
        """The state of a gradferry hook; None of other hooks."""
        return self._handle.state

    def validate_as_gathered(self) -> Sums:
        """Validates a sharded model on this rank's share, with parameters as FSDP2 gathers them."""
        return self._validate(self._trained.model, together=True)

    def finish(self) -> TrainingRun:
        """Validates, and returns the results of all ranks, the same on each. Raises DivergedError
        when ranks end with different parameters.
        """
        run = self._run
        run.formula_bytes = self._handle.formula_bytes()
        model = self._trained.whole()
        run.final = self._validate(model)
        if self._is_sharded:
            run.gathered = self.validate_as_gathered()
        run.parameters_digest = _digest(model)
        ranks = [_RankRun.of(record) for record in gather_from_ranks(asdict(run))]
        return _combine(self._handle, ranks)

    def _validate(self, model: nn.Module, *, together: bool = False) -> Sums:
        """Over this rank's share of the validation data.

        together: every rank calls the model equally often, as one that is sharded must be called.
        """
        model.eval()
        task, loss, score, predictions = self._task, 0.0, 0.0, 0
        rank, world_size = dist.get_rank(), dist.get_world_size()
        share = task.validation[rank::world_size]
        with torch.no_grad():
            for inputs, targets in (on_device(self._place, batch) for batch in share):
                outputs = model(inputs)
                loss += task.loss(outputs, targets).item()
                score += task.score(outputs, targets).item()
                predictions += num_predictions(outputs)
            if together and rank >= len(task.validation) % world_size > 0:
                # Ranks before this one have one batch more.
                model(on_device(self._place, task.validation[0][0]))
        return Sums(loss, score, predictions)


def train(
    task: Task,
    hook: str,
    *,
    steps: int,
    seed: int,
    optimizer: str = "AdamW",
    parallel: str = DDP,
    device: str = "cpu",
    on_step: OnStep | None = None,
) -> TrainingRun:
    """Trains `task` with `hook` on every rank of the default process group; call it on all.

    `optimizer` is one of OPTIMIZERS; its learning rate rises over the first 5 % of the steps, then
    falls as a cosine. `parallel` is one of PARALLEL; `device` is for `place_of_rank`. Returns the
    same result on every rank. Raises ConfigError as check_size, mesh_for, parallelize and
    make_optimizer do, DivergedError when ranks end with different parameters.
    """
    training = Training(
        task, hook, steps=steps, seed=seed, optimizer=optimizer, parallel=parallel, device=device
    )
    for step in range(1, steps + 1):
        loss = training.step()
        if on_step:
            on_step(step, loss)
    return training.finish()


def check_size(task: Task, steps: int, num_ranks: int) -> None:
    """Raises ConfigError for a training that is too short, or on too many ranks."""
    if steps < FEWEST_STEPS:
        raise ConfigError(
            f"steps must be at least {FEWEST_STEPS}, not {steps}: DDP arranges its buckets in the "
            f"first two"
        )
    if not 1 <= num_ranks <= task.global_batch:
        raise ConfigError(
            f"ranks must be from 1 to {task.global_batch}, not {num_ranks}: task {task.name} has "
            f"{task.global_batch} samples per step"
        )


def rate_at(step: int, steps: int) -> float:
    """Factor of the learning rate at `step`, counted from 0."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _batches(task: Task, seed: int) -> Iterator[Batch]:
    """This rank's share of every global batch: samples rank, rank + W, ..."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs, targets = task.draw(generator)
        yield inputs[rank::world_size], targets[rank::world_size]


def _digest(model: nn.Module) -> int:
    digest = 0
    for parameter in model.parameters():
        content = parameter.detach().cpu().flatten().view(torch.uint8)
        digest = zlib.crc32(content.numpy().tobytes(), digest)
    return digest


def _combine(handle: HookHandle, ranks: list[_RankRun]) -> TrainingRun:
    if (found := odd_one([run.parameters_digest for run in ranks])) is not None:
        raise DivergedError(
            f"hook {handle.name}: parameters of rank {found[0]} differ from those of rank "
            f"{found[1]} after training; a hook must give every rank the same gradients"
        )
    busiest = max(ranks, key=lambda run: run.wire_bytes[-1])
    gathered = [run.gathered for run in ranks if run.gathered is not None]
    timed = [run.seconds[_UNTIMED_STEPS:] or run.seconds for run in ranks]
    return TrainingRun(
        hook=handle.name,
        num_ranks=len(ranks),
        measured=handle.measured,
        initial_loss=_mean([run.initial for run in ranks], lambda sums: sums.loss),
        final_loss=_mean([run.final for run in ranks], lambda sums: sums.loss),
        final_score=_mean([run.final for run in ranks], lambda sums: sums.score),
        gathered_loss=_mean(gathered, lambda sums: sums.loss) if gathered else None,
        losses=[fmean(losses) for losses in zip(*(run.losses for run in ranks), strict=True)],
        cumulative_wire_bytes=busiest.wire_bytes,
        seconds=[max(seconds) for seconds in zip(*(run.seconds for run in ranks), strict=True)],
        wire_bytes_formula=busiest.formula_bytes,
        fp32_bytes=handle.dense_bytes,
        ms_per_step=1000 * max(median(seconds) for seconds in timed),
    )


def _mean(ranks: list[Sums], total: Callable[[Sums], float]) -> float:
    return sum(map(total, ranks)) / sum(sums.predictions for sums in ranks)
