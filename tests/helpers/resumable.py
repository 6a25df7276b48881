"""Trainings that are stopped, saved and resumed: a Job says everything about one.

Its data depend on step, turn and rank alone, so that a training that resumes has the bits of one
that was never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import gradferry
import torch
import torch.distributed as dist
from gradferry import checkpoint
from gradferry.optim import OneBitAdam, momentum_mode
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

WAYS = ("ddp", "standard hook", "reducer", "async reducer", "fsdp", "fsdp scatter")
FREEZE = 4
CLASSES = 30


@dataclasses.dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        optimizer: of torch.optim, or "OneBitAdam". Made one for momentum if the hook has it.
        hook: further options of attach.
        way: how gradients are averaged. FSDP2 is on 4 ranks, two replicas of two shards.
        width: of the hidden layer.
        float64: parameters of the second layer.
        scaled: by a GradScaler; a rank's loss overflows now and then.
        in_turns: a third layer takes part on some ranks in some steps only.
        passes: backward passes per step, all but the last without synchronization.
        uneven: ranks run out of input before others do, within every SAVE_EVERY steps.
    """

    codec: str
    world_size: int
    optimizer: str = "AdamW"
    hook: dict[str, Any] = dataclasses.field(default_factory=dict)
    way: str = "ddp"
    width: int = 70
    bucket_cap_mb: float = 0.01
    float64: bool = False
    scaled: bool = False
    in_turns: bool = False
    passes: int = 1
    uneven: bool = False
    steps: int = 12
    save_every: int = 3
    seed: int = 7

    @property
    def sharded(self) -> bool:
        return self.way.startswith("fsdp")


CODECS = ("q4", "q4", "q8", "sign1", "topk:ratio=0.05", "rht:bits=2", "rht:bits=4", "bf16", "exact")
FEATURES = ("none", "scaled", "in_turns", "uneven", "float64", "accumulates")


def drawn_job(rng: random.Random) -> Job:
    """Any codec, any way, and what goes with them."""
    codec, way = rng.choice(CODECS), rng.choice(WAYS)
    world_size = 4 if way.startswith("fsdp") else rng.choice((2, 2, 3, 4))
    feature, optimizer = rng.choice(FEATURES), rng.choice(("AdamW", "SGD"))
    hook: dict[str, Any] = {}
    if way == "fsdp scatter":
        hook["scatter_feedback"] = "worker"
    elif codec == "sign1" or rng.random() < 0.2:
        hook["momentum"] = 0.9
        if way in ("ddp", "standard hook") and feature in ("none", "float64"):
            hook["warmup_steps"], optimizer = FREEZE, "OneBitAdam"
        elif optimizer == "AdamW":
            hook["warmup_steps"] = rng.randrange(6)
    else:
        hook["error_feedback"] = rng.choice(("auto", "none", "owner", "worker", "both"))
    if world_size == 4 and not way.startswith("fsdp") and rng.random() < 0.4:
        hook["nodes"] = 2
    if way == "fsdp" or not way.startswith("fsdp"):
        hook["check_every"] = rng.choice((0, 0, 4)) if way != "async reducer" else 0
    fits = {
        "scaled": way in ("ddp", "standard hook", "reducer"),
        "in_turns": not way.startswith("fsdp") and "momentum" not in hook,
        "uneven": way in ("ddp", "standard hook") and "momentum" not in hook,
    }.get(feature, True)
    if feature == "uneven" and fits:
        optimizer = "SGD"  # nothing of its own that would differ where a rank steps less often
        hook["check_every"] = 0
    return Job(
        codec,
        world_size,
        optimizer,
        hook,
        way,
        width=rng.choice((50, 70, 130, 400)),
        bucket_cap_mb=rng.choice((0.01, 0.05, 1.0)),
        float64=feature == "float64",
        scaled=feature == "scaled" and fits,
        in_turns=feature == "in_turns" and fits,
        passes=3 if feature == "accumulates" else 1,
        uneven=feature == "uneven" and fits,
        seed=rng.randrange(1000),
    )


class Layers(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.first = nn.Linear(48, job.width)
        self.second = nn.Linear(job.width, CLASSES, dtype=torch.float64 if job.float64 else None)
        if job.in_turns:
            self.aside = nn.Linear(job.width, CLASSES)

    def forward(self, x: torch.Tensor, aside: bool) -> torch.Tensor:
        hidden = self.first(x).tanh()
        result = self.second(hidden.to(self.second.weight.dtype))
        return result + self.aside(hidden) if aside else result


class Training:
    """One rank's training: model, hook, optimizer, schedule, and GradScaler."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        self.job = job
        self.step = 0
        self.losses: dict[int, float] = {}
        self.in_flight: Callable[[], None] = lambda: None  # called while a Reducer's call runs
        self.model = Layers(job)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**9, growth_interval=5, enabled=job.scaled
        )
        self.state = self._attach()
        self.optimizer = self._make_optimizer()
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, job.steps)

    def _attach(self) -> Any:
        """Sets `wrapped`, which computes the loss, and returns the state of the hook."""
        job, options = self.job, dict(self.job.hook)
        if job.scaled:
            options["grad_scaler"] = self.scaler
        self.wrapped: Any = self.model
        if job.sharded:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
            for module in (self.model.first, self.model.second, self.model):
                fully_shard(module, mesh=mesh["shard"] if job.way == "fsdp scatter" else mesh)
            if job.way == "fsdp scatter":
                gathers = "off" if job.float64 else "auto"
                return gradferry.fsdp.attach(self.model, job.codec, all_gather=gathers, **options)
            return gradferry.fsdp.attach(self.model, job.codec, **options)
        if job.way.endswith("reducer"):
            return gradferry.Reducer(
                self.model.named_parameters(),
                job.codec,
                bucket_cap_mb=job.bucket_cap_mb,
                **options,
            )
        self.wrapped = ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=job.bucket_cap_mb, find_unused_parameters=job.in_turns
        )
        if job.way == "ddp":
            return gradferry.attach(ddp, job.codec, **options)
        state = gradferry.HookState(job.codec, ddp, **options)
        ddp.register_comm_hook(state, gradferry.hook)
        return state

    def _make_optimizer(self) -> Any:
        job, parameters = self.job, self.model.parameters()
        if job.optimizer == "OneBitAdam":
            return OneBitAdam(parameters, lr=1e-3, freeze_step=FREEZE, state=self.state)
        optimizer = getattr(torch.optim, job.optimizer)(parameters, lr=1e-3)
        return momentum_mode(optimizer, self.state) if job.hook.get("momentum") else optimizer

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "hook": self.state,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }

    def saved(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self.parts().items()}
        # Of a sharded model each rank saves its own shards.
        return tree_map_only(DTensor, DTensor.to_local, {**parts, "step": self.step})

    def load(self, saved: dict[str, Any], hook: dict[str, Any] | None = None) -> None:
        """hook: the states of all ranks, merged, where there were other ones."""
        for name, part in self.parts().items():
            if name == "hook" and hook is not None:
                part.load_state_dict(hook, on_resize="mean")
            elif name == "model" and self.job.sharded:
                part.load_state_dict(self._as_shards(saved[name]))
            else:
                part.load_state_dict(saved[name])
        if self.job.sharded:
            for parameter, of_parameter in self.optimizer.state.items():
                self.optimizer.state[parameter] = {
                    key: _shard_like(parameter, value) for key, value in of_parameter.items()
                }
        self.step = saved["step"]

    def _as_shards(self, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parameters = dict(self.model.named_parameters())
        return {name: _shard_like(parameters[name], value) for name, value in saved.items()}

    def backward(self) -> None:
        """All backward passes of a step."""
        job, rank = self.job, dist.get_rank()
        self.optimizer.zero_grad()
        for turn in range(job.passes):
            last = turn == job.passes - 1
            generator = torch.Generator().manual_seed(
                ((job.seed * 1009 + self.step) * 7 + turn) * 13 + rank
            )
            x = torch.randn(8, 48, generator=generator)
            # On all ranks, some or none.
            aside = job.in_turns and self.step % 3 != 2 and (self.step + rank) % 2 == 0
            with self._synchronized(last):
                loss = cross_entropy(self.wrapped(x, aside), x[:, :CLASSES].argmax(1))
                self.losses[self.step] = loss.item()
                overflow = job.scaled and last and self.step % 5 == 2 and rank == self.step % 2
                self.scaler.scale(loss * (math.inf if overflow else 1.0)).backward()
        if job.way.endswith("reducer"):
            for parameter in self.model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in self.model.parameters()]
            work = self.state.all_reduce(gradients, async_op=job.way == "async reducer")
            if work is not None:
                self.in_flight()
                work.wait()

    @contextlib.contextmanager
    def _synchronized(self, last: bool) -> Iterator[None]:
        if self.job.sharded:
            self.model.set_requires_gradient_sync(last)
        if isinstance(self.wrapped, DistributedDataParallel) and not last:
            with self.wrapped.no_sync():
                yield
        else:
            yield

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if not self.job.uneven:  # a rank without input would fall behind in it
            self.schedule.step()


def _shard_like(parameter: torch.Tensor, value: Any) -> Any:
    """The value as a shard of the whole, if it is as large as the parameter's."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.to_local().shape:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class Onlooker:
    """Is told where a training is."""

    def reach(self, place: str) -> None:
        """At "before backward", "after backward" and "after step"."""

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        yield


def train(
    training: Training, folder: str | None, onlooker: Onlooker, until: int | None = None
) -> None:
    """Trains until a step, or to the end, and saves as it goes."""
    job = training.job
    until = job.steps if until is None else until
    while training.step < until:
        _train_until_next_save(training, onlooker)
        if folder is not None:
            with onlooker.saving():
                checkpoint.save(folder, {**training.saved(), "step": training.step + 1})
        training.step += 1


def _train_until_next_save(training: Training, onlooker: Onlooker) -> None:
    """Ends before the step is counted, since "save" is a place of that step."""
    job, begin = training.job, training.step
    last = begin - begin % job.save_every + job.save_every - 1
    end = last
    if job.uneven:
        end -= (dist.get_rank() + begin // job.save_every) % min(job.save_every, 3)
    with training.wrapped.join() if job.uneven else contextlib.nullcontext():
        for step in range(begin, end + 1):
            training.step = step
            onlooker.reach("before backward")
            training.backward()
            onlooker.reach("after backward")
            training.update()
            onlooker.reach("after step")
    training.step = last


def fingerprints(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, digest or text) of every leaf."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from fingerprints(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from fingerprints(item, f"{path}/{index}")
    elif isinstance(value, torch.Tensor):
        data = value.detach().contiguous().numpy().tobytes()
        yield path, f"{value.dtype} {hashlib.blake2b(data, digest_size=8).hexdigest()}"
    else:
        yield path, repr(value)


def case_train(
    job: Job,
    folder: str | None,
    onlooker: Callable[[Training], Onlooker] | None = None,
    until: int | None = None,
    resized: bool = False,
    saves: bool = True,
) -> dict[str, Any]:
    """Trains on from the last checkpoint, if there is one: losses by step, and the whole state.

    resized: the checkpoint is of another number of ranks.
    """
    training = Training(job)
    if folder is not None and checkpoint.exists(folder):
        if resized:
            contents = checkpoint.load_all(folder)
            hook = checkpoint.merge(content["hook"] for content in contents)
            training.load(contents[0], hook)
        else:
            training.load(checkpoint.load(folder))
    watched = onlooker(training) if onlooker else Onlooker()
    train(training, folder if saves else None, watched, until)
    return {"losses": training.losses, "state": dict(fingerprints(training.saved()))}
