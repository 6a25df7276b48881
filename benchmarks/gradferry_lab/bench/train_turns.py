"""`gradferry bench train` on the ranks: hooks take turns on the same model.

Every hook has its own model and optimizer, and all stay in memory. In each round every hook trains
a few steps; the order is reversed from round to round, so that disturbances of the machine affect
all hooks alike.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
from gradferry.averaging.handle import Averaging
from gradferry.core.agreement import most_of_ranks
from gradferry.core.codec_spec import AUTO, OFF
from gradferry.core.nodes import exchange_between
from gradferry.ddp.trial import Clock
from torch.distributed.device_mesh import DeviceMesh

from gradferry_lab.ranks.exchanges import nodes_option, with_exchanges
from gradferry_lab.ranks.hosts import InterfaceCounter, busiest_host, found_hosts
from gradferry_lab.ranks.launch import Emit, gather_from_ranks
from gradferry_lab.ranks.place import on_device, place_of_rank
from gradferry_lab.workloads.hooks import (
    COMPRESS_FROM,
    RULERS,
    How,
    bucket_caps,
    phases_of,
    steps_until_steady,
)
from gradferry_lab.workloads.models import Workload, load_workload
from gradferry_lab.workloads.optimizers import make_optimizer
from gradferry_lab.workloads.parallel import DDP, mesh_for, parallelize

_TRIAL_STEPS = 3
NOT_OURS = ("torch:", *RULERS)


@dataclass(frozen=True)
class TrainOptions:
    """The options. Hooks and model are already checked."""

    model: str
    hooks: tuple[str, ...]
    bucket_caps_mb: tuple[float, ...]
    rounds: int
    steps: int  # of a hook in a round
    seed: int
    device: str = "cpu"  # or "cuda"
    exchanges: tuple[str, ...] = (AUTO,)  # of EXCHANGES, for every codec
    parallel: str = DDP  # of PARALLEL


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
    exchange: str | None = None  # of EXCHANGES; None: the hook is none of gradferry's
    chosen: str | None = None  # codec and exchange, where the hook or the exchange is AUTO


class _TimedModel:
    """One hook with its model, batches and optimizer on this rank; knows how long it has trained.

    The optimizer is AdamW, in momentum mode as `gradferry.optim.momentum_mode` sets it up, and
    OneBitAdam where momentum mode begins with warm-up steps.
    """

    def __init__(
        self,
        workload: Workload,
        hook: str,
        device: torch.device,
        mesh: DeviceMesh | None,
        how: How,
    ) -> None:
        """device: where the model is. For other arguments see `parallelize`."""
        torch.manual_seed(how.seed)
        self.hook = hook
        self._workload, self._device = workload, device
        self._generator = torch.Generator().manual_seed(how.seed)
        parallel = parallelize(lambda: workload.build_model().to(device), hook, mesh, how)
        self._model, self.handle = parallel.model, parallel.handle
        state = self.handle.state
        learns_first = state and state.config.momentum and state.config.warmup_steps
        optimizer = "OneBitAdam" if learns_first else "AdamW"
        self._optimizer = make_optimizer(optimizer, workload, self._model, state, fused=True)
        self._clock = Clock(device)
        self.steps = 0

    def train(self, steps: int) -> float:
        """Trains; returns the seconds that passed on this rank. All ranks start together."""
        drawn = [self._workload.draw(self._generator) for _ in range(steps)]
        batches = [on_device(self._device, batch) for batch in drawn]
        self._clock.wait()
        dist.barrier()
        started = time.monotonic()
        for batch in batches:
            self._optimizer.zero_grad()
            self._workload.loss(self._model, batch).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        self._clock.wait()
        self.steps += steps
        return time.monotonic() - started

    def phase_ms(self) -> dict[str, float]:
        """Sums since the start; nothing on a device, where the host only enqueues."""
        on_host = self._device.type == "cpu"
        return phases_of(self.handle.state.stats()) if on_host and self.handle.state else {}


def _chosen(outcome: TrainOutcome, state: Averaging | None) -> str | None:
    if state is None or AUTO not in (outcome.hook.partition("+")[0], outcome.exchange):
        return None
    codec = state.stats()["choice"]["codec"]
    return f"{codec} {exchange_between(state.nodes)}" if codec != OFF else OFF


def run_train(emit: Emit, options: TrainOptions) -> list[TrainOutcome]:
    """Runs on every rank; the outcomes are the same on all. Emits what it is doing, as text."""
    return _Turns(emit, options).run()


class _Turns:
    def __init__(self, emit: Emit, options: TrainOptions) -> None:
        self._emit = emit
        self._options = options
        self._workload = load_workload(options.model)
        self._interface = InterfaceCounter(found_hosts())
        self._device, self._group = place_of_rank(options.device)
        self._mesh = mesh_for(options.parallel, self._interface.hosts)

    def run(self) -> list[TrainOutcome]:
        outcomes = []
        models = []
        for hook, exchange in with_exchanges(
            self._options.hooks, self._options.exchanges, lambda hook: hook.startswith(NOT_OURS)
        ):
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
            for key, total in model.phase_ms().items():
                outcome.phase_ms[key] = (total - earlier[key]) / steps
            outcome.chosen = _chosen(outcome, model.handle.state)
            self._count_one_more_step(model, outcome)
        return outcomes

    def _new(self, hook: str, exchange: str | None, bucket_cap_mb: float | None) -> _TimedModel:
        gc.collect()  # DDP objects sit in reference cycles
        nodes = nodes_option(exchange or AUTO, self._interface.hosts)
        how = How(self._options.seed, COMPRESS_FROM, nodes, bucket_cap_mb, self._group)
        return _TimedModel(self._workload, hook, self._device, self._mesh, how)

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
        seconds = model.train(steps)
        sent = self._interface.end()
        outcome.round_ms += [1000 * s / steps for s in most_of_ranks([seconds])]
        if sent is not None:
            outcome.interface_bytes = (outcome.interface_bytes or 0) + sent

    def _count_one_more_step(self, model: _TimedModel, outcome: TrainOutcome) -> None:
        """Its bytes, of the rank and of the host that send most."""
        handle = model.handle
        before = handle.wire_bytes(model.steps)
        model.train(1)
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
            }
        )
        outcome.phase_ms = ranks[0]["phase_ms"]
        busiest = max(ranks, key=lambda rank: int(rank["wire_bytes"]))
        outcome.wire_bytes, outcome.wire_formula = busiest["wire_bytes"], busiest["wire_formula"]
        hosts = self._interface.hosts
        to_others = handle.bytes_to_other_hosts(hosts.of_rank)
        host, outcome.interface_formula = busiest_host(hosts, to_others)
        outcome.interface_bytes = ranks[hosts.members[host][0]]["interface_bytes"]
        outcome.wire_measured = handle.measured
