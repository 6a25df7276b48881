"""The training loop: one task, one hook, the same model and data for every hook."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from gradferry import checkpoint
from gradferry.core.agreement import Record, odd_one
from gradferry.errors import ConfigError, DivergedError, StateError
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from gradferry_lab.ranks.hosts import found_hosts
from gradferry_lab.ranks.launch import gather_from_ranks
from gradferry_lab.ranks.place import on_device, place_of_rank
from gradferry_lab.workloads.hooks import HookHandle, How
from gradferry_lab.workloads.optimizers import make_optimizer
from gradferry_lab.workloads.parallel import DDP, mesh_for, parallelize
from gradferry_lab.workloads.task import Batch, Task, num_predictions

FEWEST_STEPS = 3
_WARMUP = 0.05  # of the steps: the learning rate rises, then falls as a cosine
_SAVE_SECONDS = 60.0
_UNTIMED_STEPS = 3  # the first steps build buckets and warm caches up

OnStep = Callable[[int, float], None]  # steps done, this rank's training loss in nats


class Stopped(Exception):  # noqa: N818
    """A training was saved before it was finished, and goes on from there another time."""


@dataclass
class Progress:
    """A training that is saved while it runs, every minute, and goes on from there.

    Attributes:
        folder: of a checkpoint of `gradferry.checkpoint`, in which each rank has its part.
        settings: what the result depends on; what other settings have left is not taken up.
        deadline: in seconds of `time.time`, when it stops.
    """

    folder: Path
    settings: str
    deadline: float = math.inf
    _saved_at: float = field(default_factory=time.time)

    def read(self) -> dict[str, Any] | None:
        """What this rank has saved; None where ranks have not all saved something."""
        try:
            content = checkpoint.load(self.folder)
        except StateError:  # nothing is there, or it is damaged
            content = {}
        has_it = {"has it": content.get("settings") == self.settings}
        return content if all(each["has it"] for each in gather_from_ranks(has_it)) else None

    def keep(self, training: Training) -> None:
        """Saves it where that is due, after a step. Collective. Raises Stopped."""
        now = time.time()
        must = torch.tensor([now > self.deadline, now > self._saved_at + _SAVE_SECONDS])
        dist.broadcast(must, 0)  # clocks are not read at the same moment
        if must.any():
            checkpoint.save(self.folder, {**training.content(), "settings": self.settings})
            self._saved_at = now
        if must[0]:
            raise Stopped


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
        self._generator = torch.Generator().manual_seed(seed)
        initial = self._validate(self._trained.whole())
        self._run = _RankRun(initial, initial)
        self._sent_before = 0  # bytes, of which the hook does not know
        self._trained.model.train()

    def step(self) -> float:
        """Trains one step; returns the loss of this rank's part of the batch, in nats."""
        run, batch = self._run, on_device(self._place, self._batch())
        started = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self._task.mean_loss(self._trained.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        run.seconds.append(time.perf_counter() - started)
        self._schedule.step()
        run.losses.append(loss.item())
        run.wire_bytes.append(self._sent_before + self._handle.wire_bytes(len(run.losses)))
        return run.losses[-1]

    def _batch(self) -> Batch:
        """This rank's share of the next global batch: samples rank, rank + W, ..."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        inputs, targets = self._task.draw(self._generator)
        return inputs[rank::world_size], targets[rank::world_size]

    @property
    def steps_done(self) -> int:
        """Those before it was saved, too."""
        return len(self._run.losses)

    def content(self) -> dict[str, Any]:
        """All that `take_up` needs on this rank, in what ``torch.load`` takes with weights_only."""
        state = self._handle.state
        content: dict[str, Any] = {
            "model": dict(self._trained.model.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "hook": state and state.state_dict(),
            "batches": self._generator.get_state(),
            "run": asdict(self._run),
        }
        local: dict[str, Any] = pytree.tree_map_only(DTensor, DTensor.to_local, content)
        return local

    def take_up(self, content: dict[str, Any]) -> None:
        """Goes on, to the bit, where a training like this one was when it gave `content`."""
        for _ in range(2):  # in which DDP arranges its buckets
            self.step()
        model, optimizer = self._trained.model, self._optimizer
        own = model.state_dict()
        model.load_state_dict({name: _like(own[name], v) for name, v in content["model"].items()})
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        state = {
            index: {name: _like(trained[index], value) for name, value in values.items()}
            for index, values in content["optimizer"]["state"].items()
        }
        optimizer.load_state_dict({**content["optimizer"], "state": state})
        self._schedule.load_state_dict(content["schedule"])
        if self._handle.state is not None:
            self._handle.state.load_state_dict(content["hook"])
        self._generator.set_state(content["batches"])
        self._run = _RankRun.of(content["run"])
        self._sent_before = self._run.wire_bytes[-1] - self._handle.wire_bytes(self.steps_done)

    def finish(self) -> TrainingRun:
        """Validates, and returns the results of all ranks, the same on each. Raises DivergedError
        when ranks end with different parameters.
        """
        run = self._run
        run.formula_bytes = self._handle.formula_bytes()
        model = self._trained.whole()
        run.final = self._validate(model)
        if self._is_sharded:  # also with parameters as FSDP2 gathers them
            run.gathered = self._validate(self._trained.model, together=True)
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
    progress: Progress | None = None,
) -> TrainingRun:
    """Trains `task` with `hook` on every rank of the default process group; call it on all.

    `optimizer` is one of OPTIMIZERS; its learning rate rises over the first 5 % of the steps, then
    falls as a cosine. `parallel` is one of PARALLEL; `device` is for `place_of_rank`. Returns the
    same result on every rank, and the same to the bit where `progress` goes on. Raises ConfigError
    as check_size, mesh_for, parallelize and make_optimizer do, DivergedError when ranks end with
    different parameters, Stopped at the deadline of `progress`.
    """
    training = Training(
        task, hook, steps=steps, seed=seed, optimizer=optimizer, parallel=parallel, device=device
    )
    if progress and (content := progress.read()):
        training.take_up(content)
    for step in range(training.steps_done + 1, steps + 1):
        loss = training.step()
        if on_step:
            on_step(step, loss)
        if progress and step < steps:
            progress.keep(training)
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


def _like(own: torch.Tensor, saved: Any) -> Any:
    """What was saved of a rank, as its part of a sharded tensor where it is one of `own`."""
    if not isinstance(own, DTensor) or getattr(saved, "shape", None) != own.to_local().shape:
        return saved
    return DTensor.from_local(
        saved, own.device_mesh, own.placements, shape=own.shape, stride=own.stride()
    )


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
