"""`gradferry bench train` on the ranks: hooks take turns on the same model.

Every hook has its own model and optimizer, and all stay in memory. In each round every hook trains
a few steps; the order is reversed from round to round, so that disturbances of the machine affect
all hooks alike.
"""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from gradferry.averaging.handle import Averaging
from gradferry.core.agreement import most_of_ranks
from gradferry.core.codec_spec import AUTO, OFF
from gradferry.core.nodes import exchange_between
from gradferry.ddp.trial import Clock
from gradferry.errors import ConfigError
from torch.distributed.device_mesh import DeviceMesh

from gradferry_lab.ranks.exchanges import nodes_option
from gradferry_lab.ranks.hosts import InterfaceCounter, busiest_host, found_hosts
from gradferry_lab.ranks.launch import Emit, gather_from_ranks
from gradferry_lab.ranks.place import on_device, place_of_rank
from gradferry_lab.workloads.hook_names import RULERS
from gradferry_lab.workloads.hooks import (
    COMPRESS_FROM,
    bucket_caps,
    phases_of,
    steps_until_steady,
)
from gradferry_lab.workloads.models import Workload, load_workload
from gradferry_lab.workloads.optimizers import make_optimizer
from gradferry_lab.workloads.parallel import DDP, mesh_for, parallelize

EVENT_INSTANTS = ("begin_ms", "encoded_ms", "complete_ms")  # of HookState.events
_TRIAL_STEPS = 3
_VALIDATE_EVERY = 10  # steps


@dataclass(frozen=True)
class TrainOptions:
    """The options. Hooks and model are already checked."""

    model: str
    hooks: tuple[str, ...]
    bucket_caps_mb: tuple[float, ...]
    rounds: int
    steps: int  # of a hook in a round
    seed: int
    until_loss: float | None = None  # of the validation data
    most_steps: int = 0  # until that loss, before a hook is given up
    device: str = "cpu"  # or "cuda"
    exchanges: tuple[str, ...] = (AUTO,)  # of EXCHANGES, for every codec
    parallel: str = DDP  # of PARALLEL

    def entries(self) -> Iterator[tuple[str, str | None]]:
        """Every hook with each of its exchanges; None: it is none of gradferry's."""
        for hook in self.hooks:
            if hook in RULERS or hook.startswith("torch:"):
                yield hook, None
            else:
                yield from ((hook, exchange) for exchange in self.exchanges)


@dataclass(frozen=True)
class LossReached:
    """How long a training took to reach the target."""

    steps: int
    seconds: float  # of training steps, the first ones included; validation excluded


@dataclass(frozen=True)
class LastStep:
    """Times of one step on one rank, in ms since it began."""

    backward_ms: float  # backward began
    backward_end_ms: float  # gradients were there
    end_ms: float  # the optimizer was done
    buckets: Sequence[Mapping[str, float]]  # HookState.events(), or BucketTimes.events()


@dataclass
class TrainOutcome:
    """The results of one hook, with one exchange, over all ranks."""

    hook: str
    bucket_cap_mb: float | None  # None: the modules of a sharded model are its buckets
    trial_ms: dict[float, float]  # by bucket size: how the best one was found
    round_ms: list[float] = field(default_factory=list)  # per step, of the slowest rank
    wire_bytes: int = 0  # per step, of the rank that sends most
    wire_measured: bool = True
    wire_formula: int = 0
    interface_bytes: float | None = None  # per step, of the host that sends most; None: unknown
    interface_formula: int = 0  # what the ranks of that host must send to other hosts
    phase_ms: dict[str, float] = field(default_factory=dict)  # per step, of a codec on a host
    cpu_ms: dict[str, float] = field(default_factory=dict)  # by thread, per step on rank 0
    last_step: LastStep | None = None  # one more step, on rank 0; None on a device
    reached: LossReached | None = None
    exchange: str | None = None  # of EXCHANGES; None: the hook is none of gradferry's
    chosen: str | None = None  # codec and exchange, where the hook or the exchange is AUTO


class _TimedModel:
    """One hook with its model, batches and optimizer on this rank; knows how long it has trained.

    The optimizer is AdamW, in momentum mode as `gradferry.optim.momentum_mode` sets it up, and
    OneBitAdam where momentum mode begins with warm-up steps.

    Args:
        workload: what is trained.
        hook: its name.
        options: of the run.
        place: where the model is, and the group of DDP; None: the default group.
        bucket_cap_mb: wanted of DDP; None where there is a mesh.
        compress_from, nodes: see `apply_hook`.
        mesh: see `parallelize`.
    """

    def __init__(
        self,
        workload: Workload,
        hook: str,
        options: TrainOptions,
        place: tuple[torch.device, dist.ProcessGroup | None],
        *,
        bucket_cap_mb: float | None,
        compress_from: int | None,
        nodes: object,
        mesh: DeviceMesh | None,
    ) -> None:
        torch.manual_seed(options.seed)
        self.hook = hook
        self._workload = workload
        self._device, group = place
        self._generator = torch.Generator().manual_seed(options.seed)
        self._parallel = parallelize(
            lambda: workload.build_model().to(self._device),
            hook,
            mesh,
            bucket_cap_mb=bucket_cap_mb,
            group=group,
            seed=options.seed,
            compress_from=compress_from,
            nodes=nodes,
        )
        self._model = self._parallel.model
        self.handle = self._parallel.handle
        state = self.handle.state
        config = state.config if state else None
        learns_first = config is not None and config.momentum and config.warmup_steps
        self._optimizer = make_optimizer(
            "OneBitAdam" if learns_first else "AdamW",
            workload,
            self._model,
            state,
            fused=True,
        )
        self._clock = Clock(self._device)
        self._instants: Sequence[float] = ()  # of the last step, in seconds
        self.steps = 0
        self.seconds = 0.0  # of training

    def train(self, steps: int) -> float:
        """Trains; returns the seconds that passed on this rank. All ranks start together."""
        drawn = [self._workload.draw(self._generator) for _ in range(steps)]
        batches = [on_device(self._device, batch) for batch in drawn]
        self._clock.wait()
        dist.barrier()
        started = time.monotonic()
        for batch in batches:
            begun = time.monotonic()
            self._optimizer.zero_grad()
            loss = self._workload.loss(self._model, batch)
            backward = time.monotonic()
            loss.backward()  # type: ignore[no-untyped-call]
            backward_end = time.monotonic()
            self._optimizer.step()
            self._instants = [begun, backward, backward_end, time.monotonic()]
        self._clock.wait()
        seconds = time.monotonic() - started
        self.steps += steps
        self.seconds += seconds
        return seconds

    def phase_ms(self) -> dict[str, float]:
        """Sums since the start; nothing on a device, where the host only enqueues."""
        on_host = self._device.type == "cpu"
        return phases_of(self.handle.state.stats()) if on_host and self.handle.state else {}

    def last_step(self) -> LastStep | None:
        """When things happened in the last step; None on a device, which is behind the host."""
        if self._device.type != "cpu":
            return None
        begun, backward, backward_end, end = (1000 * seconds for seconds in self._instants)
        times, state = self.handle.bucket_times, self.handle.state
        events = times.events() if times else state.events() if state else []
        buckets = [
            {key: value - begun if key in EVENT_INSTANTS else value for key, value in event.items()}
            for event in events
            if event["begin_ms"] > begun
        ]
        return LastStep(backward - begun, backward_end - begun, end - begun, buckets)

    def validation_loss(self) -> float:
        """Mean over the validation data of all ranks."""
        model = self._parallel.whole()
        model.eval()
        with torch.no_grad():
            batches = (on_device(self._device, batch) for batch in self._workload.validation)
            losses = [self._workload.loss(model, batch) for batch in batches]
        model.train()
        total = torch.tensor(
            [float(sum(losses)), float(len(losses))], dtype=torch.float64, device="cpu"
        )
        dist.all_reduce(total)
        return float(total[0] / total[1])


def _chosen(outcome: TrainOutcome, state: Averaging | None) -> str | None:
    if state is None or AUTO not in (outcome.hook.partition("+")[0], outcome.exchange):
        return None
    codec = state.stats()["choice"]["codec"]
    return f"{codec} {exchange_between(state.nodes)}" if codec != OFF else OFF


def _cpu_ms() -> dict[str, float]:
    """Processor time that the threads of this process have used, summed by their names. Empty
    where the kernel does not count it.
    """
    times: dict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            nanoseconds = int((task / "schedstat").read_text().split()[0])
        except OSError:  # it has ended
            continue
        times["main" if task.name == str(os.getpid()) else name] += nanoseconds / 1e6
    return times


def run_train(emit: Emit, options: TrainOptions) -> list[TrainOutcome]:
    """Runs on every rank; the outcomes are the same on all. Emits what it is doing, as text.

    Raises ConfigError when a target loss is asked of a model without validation data.
    """
    return _Turns(emit, options).run()


class _Turns:
    def __init__(self, emit: Emit, options: TrainOptions) -> None:
        self._emit = emit
        self._options = options
        self._workload = load_workload(options.model)
        self._interface = InterfaceCounter(found_hosts())
        self._place = place_of_rank(options.device)
        self._mesh = mesh_for(options.parallel, self._interface.hosts)

    def run(self) -> list[TrainOutcome]:
        if self._options.until_loss is not None and not self._workload.metric:
            raise ConfigError(f"--until-loss: model {self._workload.name} has no validation data")
        outcomes = []
        models = []
        for hook, exchange in self._options.entries():
            outcome = TrainOutcome(hook, *self._find_bucket_size(hook, exchange), exchange=exchange)
            models.append(self._new(hook, exchange, outcome.bucket_cap_mb))
            models[-1].train(steps_until_steady(hook))
            outcomes.append(outcome)
        entries = list(zip(models, outcomes, strict=True))
        before = [model.phase_ms() for model, _ in entries]
        in_turn = list(entries)
        for number in range(1, self._options.rounds + 1):
            for model, outcome in in_turn:
                self._emit(f"round {number}/{self._options.rounds}: {model.hook}")
                self._take_turn(model, outcome)
            in_turn.reverse()
        steps = self._options.rounds * self._options.steps
        for (model, outcome), earlier in zip(entries, before, strict=True):
            outcome.cpu_ms = {thread: ms / steps for thread, ms in outcome.cpu_ms.items() if ms}
            for key, total in model.phase_ms().items():
                outcome.phase_ms[key] = (total - earlier[key]) / steps
            outcome.chosen = _chosen(outcome, model.handle.state)
            self._look_at_one_more_step(model, outcome)
        del models, model, entries, in_turn
        if self._options.until_loss is not None:
            for outcome in outcomes:
                if outcome.hook not in RULERS:  # under which ranks train apart
                    self._train_until(self._options.until_loss, outcome)
        return outcomes

    def _new(
        self,
        hook: str,
        exchange: str | None,
        bucket_cap_mb: float | None,
        compress_from: int | None = COMPRESS_FROM,
    ) -> _TimedModel:
        gc.collect()  # DDP objects sit in reference cycles
        return _TimedModel(
            self._workload,
            hook,
            self._options,
            self._place,
            bucket_cap_mb=bucket_cap_mb,
            compress_from=compress_from,
            nodes=nodes_option(exchange or AUTO, self._interface.hosts),
            mesh=self._mesh,
        )

    def _find_bucket_size(
        self, hook: str, exchange: str | None
    ) -> tuple[float | None, dict[float, float]]:
        """The bucket size at which a short trial is fastest, and the trials' ms per step."""
        if self._mesh is not None:
            return None, {}
        trials: dict[float, float] = {}
        caps = bucket_caps(hook, self._workload.build_model(), self._options.bucket_caps_mb)
        for cap in caps:
            assert cap is not None
            if len(caps) == 1:
                return cap, {}
            self._emit(f"{hook}: trying buckets of {cap:g} MB")
            model = self._new(hook, exchange, cap)
            model.train(steps_until_steady(hook))
            seconds = most_of_ranks([model.train(1) for _ in range(_TRIAL_STEPS)])
            trials[cap] = 1000 * median(seconds)
            del model  # before the next one takes memory
        return min(trials, key=lambda cap: trials[cap]), trials

    def _take_turn(self, model: _TimedModel, outcome: TrainOutcome) -> None:
        steps = self._options.steps
        self._interface.begin()
        cpu_before = _cpu_ms()
        seconds = model.train(steps)
        cpu_after = _cpu_ms()
        sent = self._interface.end()
        for thread, ms in cpu_after.items():
            used = ms - cpu_before.get(thread, 0.0)
            outcome.cpu_ms[thread] = outcome.cpu_ms.get(thread, 0.0) + used
        outcome.round_ms += [1000 * s / steps for s in most_of_ranks([seconds])]
        if sent is not None:
            outcome.interface_bytes = (outcome.interface_bytes or 0) + sent

    def _look_at_one_more_step(self, model: _TimedModel, outcome: TrainOutcome) -> None:
        """Its bytes, of the rank and of the host that send most; and its instants."""
        handle = model.handle
        if handle.bucket_times:
            handle.bucket_times.register()
        before = handle.wire_bytes(model.steps)
        model.train(1)
        outcome.last_step = model.last_step()
        wire_bytes = handle.wire_bytes(model.steps) - before
        on_interface = outcome.interface_bytes
        if on_interface is not None:
            on_interface /= self._options.rounds * self._options.steps
        ranks = gather_from_ranks(
            {
                "wire_bytes": wire_bytes,
                "wire_formula": handle.formula_bytes(),
                "interface_bytes": on_interface,
                "phase_ms": outcome.phase_ms,
                "cpu_ms": outcome.cpu_ms,
                "last_step": asdict(outcome.last_step) if outcome.last_step else None,
            }
        )
        outcome.phase_ms, last_step = ranks[0]["phase_ms"], ranks[0]["last_step"]
        outcome.cpu_ms = ranks[0]["cpu_ms"]
        outcome.last_step = LastStep(**last_step) if last_step else None
        busiest = max(ranks, key=lambda rank: int(rank["wire_bytes"]))
        outcome.wire_bytes, outcome.wire_formula = busiest["wire_bytes"], busiest["wire_formula"]
        hosts = self._interface.hosts
        to_others = handle.bytes_to_other_hosts(hosts.of_rank)
        host, outcome.interface_formula = busiest_host(hosts, to_others)
        outcome.interface_bytes = ranks[hosts.members[host][0]]["interface_bytes"]
        outcome.wire_measured = handle.measured

    def _train_until(self, target: float, outcome: TrainOutcome) -> None:
        """Trains a fresh model until its validation loss is at the target."""
        model = self._new(outcome.hook, outcome.exchange, outcome.bucket_cap_mb, compress_from=None)
        while model.steps < self._options.most_steps:
            model.train(_VALIDATE_EVERY)
            loss = model.validation_loss()
            self._emit(f"{outcome.hook}: step {model.steps}, loss {loss:.3f}")
            if loss <= target:
                outcome.reached = LossReached(model.steps, most_of_ranks([model.seconds])[0])
                return
