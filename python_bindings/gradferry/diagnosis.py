"""`doctor`: tries hooks on copies of a user's model, and says which to use, if any."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

from gradferry.core.agreement import most_of_ranks
from gradferry.core.codec_spec import parse_codec
from gradferry.core.config import COARSE_BITS
from gradferry.core.device import agreed_transport
from gradferry.core.nodes import AUTO as FOUND_NODES
from gradferry.core.nodes import FLAT, exchanges_to_choose_from, found_nodes, option_for
from gradferry.ddp.attach import attach
from gradferry.ddp.model import distributed_in, reduced_parameters
from gradferry.ddp.trial import (
    CODECS,
    COUNTED_STEPS,
    LOSSES,
    Candidate,
    Clock,
    Interval,
    Outcome,
    Trial,
    computing_on,
    most_precise,
)
from gradferry.errors import ConfigError

__all__ = ["Diagnosis", "Step", "doctor"]

PLAIN = "torch:fp32"  # DistributedDataParallel as it is
# PyTorch's own hooks, with what they send.
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    PLAIN: torch.float32,
    "torch:fp16": torch.float16,
    "torch:bf16": torch.bfloat16,
}
_COMPRESS = {
    "torch:fp16": torch_hooks.fp16_compress_hook,
    "torch:bf16": torch_hooks.bf16_compress_hook,
}
DEFAULT_HOOKS = (PLAIN, "torch:bf16", *CODECS)
_NO_SYNC = Candidate("no communication", 0.0, needs_memory=False)
_BEFORE = 2  # steps: in the first DDP arranges its buckets, and the optimizer makes its state

# A hook keeps up if a step under it takes less than so many times a step without communication.
_BEHIND = 2.0
_OUTER_SHARE = 0.05  # of the time of training that an outer step may take unnoticed

Progress = Callable[[str], None]
_seconds = attrgetter("seconds")


@dataclass(frozen=True)
class Step:
    """A training step under one hook.

    Attributes:
        hook: a codec string, or one of `TORCH_DTYPES`.
        exchange: ``"flat"`` or ``"two-level"`` where ranks share nodes, else None.
        seconds: the median of the counted steps, on the slowest rank.
        times_faster: than `PLAIN`, with how far that may be off.
        steps: how many were counted; 2 if they were hopeless.
        wire_bytes: that a rank sends to other ranks per step; with two levels to other nodes. Of
            PyTorch's hooks what a ring sends.
        is_advised: false for a codec below 3 bits, which trains well only in momentum mode.
    """

    hook: str
    exchange: str | None
    seconds: float
    times_faster: Interval
    steps: int
    wire_bytes: int
    is_advised: bool

    @property
    def name(self) -> str:
        """ "q4", or "q4 (two-level)"."""
        return self.hook if self.exchange is None else f"{self.hook} ({self.exchange})"


@dataclass(frozen=True)
class Diagnosis:
    """What was found, the same on all ranks.

    Attributes:
        verdict: one sentence; it begins "On one host" where all ranks share one.
        steps: of every hook, the fastest first.
        silent_s: seconds of a step without communication.
        world_size: number of ranks.
        parameters: that DDP reduces.
        elements: of these.
        device: type of the model's device.
        on_one_host: whether all ranks share a host, so that nothing crossed a network between
            hosts.
    """

    verdict: str
    steps: tuple[Step, ...]
    silent_s: float
    world_size: int
    parameters: int
    elements: int
    device: str
    on_one_host: bool = False

    def __str__(self) -> str:
        """The verdict, what is wrong with the figures, and a table."""
        plain = next(step.seconds for step in self.steps if step.hook == PLAIN)
        head = ("hook", "ms per step", "times faster", "bytes per step")
        rows = [
            (
                step.name + " *" * (not step.is_advised),
                f"{1e3 * step.seconds:,.1f}{self._few(step)}",
                step.times_faster.shown(".2f"),
                f"{step.wire_bytes:,}",
            )
            for step in self.steps
        ]
        rows.append(
            (_NO_SYNC.hook, f"{1e3 * self.silent_s:,.1f}", f"{plain / self.silent_s:.2f}", "0")
        )
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])])
            for cells in (head, *rows)
        ]
        asked = {step.hook for step in self.steps}
        notes = [
            f"{self.world_size} ranks, {self.elements:,} elements in {self.parameters} parameters "
            f"on {self.device}. Median of {COUNTED_STEPS} steps on the slowest rank, or of more "
            f"where they vary; times faster than {PLAIN}, DistributedDataParallel without a hook, "
            "with the interval of that median. Bytes are those that a rank sends."
        ]
        if any(self._few(step) for step in self.steps):
            notes.append("(2 steps): so much slower than another that no more were made.")
        if not all(step.is_advised for step in self.steps):
            notes.append("*: trains well only in momentum mode (momentum=).")
        notes += [f"{hook}: {loss}." for hook, loss in LOSSES.items() if hook in asked]
        if self.device != "cpu" and any(step.exchange for step in self.steps):
            notes.append(
                "Without nodes= attach tries both exchanges. Those of two levels overlap with "
                "NCCL_LAUNCH_ORDER_IMPLICIT=1 in the environment."
            )
        doubts = []
        if self.on_one_host:
            # A link of a chosen rate is made of network namespaces, which GPUs do not share.
            link = ", or as root `gradferry doctor --link 1gbit`" if self.device == "cpu" else ""
            doubts.append(
                "All ranks share one host, so nothing crossed a network between hosts. For yours, "
                f"run this under torchrun on its machines{link}."
            )
        return "\n".join([self.verdict, *doubts, "", *lines, "", *notes])

    @staticmethod
    def _few(step: Step) -> str:
        return "" if step.steps >= COUNTED_STEPS else f" ({step.steps} steps)"


def doctor(
    ddp: DistributedDataParallel,
    batch_fn: Callable[[], Any],
    *,
    hooks: Sequence[str] | None = None,
    show: bool = True,
) -> Diagnosis:
    """Tries hooks on copies of the model, and says which to use. Collective.

    Each hook trains a copy for some nine steps, those with the fewest bytes first; what is hopeless
    after two counted steps gets no more, and the fastest up to two more turns. Needs memory for a
    second model with its optimizer. The model and torch's random generator do not change.

    Args:
        ddp: on the CPU or a GPU, in a process group of at least two ranks. What torch.compile or
            Lightning Fabric wrapped around it is left out.
        batch_fn: gives this rank's next batch: ``ddp(*batch_fn())``, or ``ddp(**batch_fn())`` for a
            dict, is the loss or has it as ``.loss``. Called once.
        hooks: of ``torch:fp32``, ``torch:fp16``, ``torch:bf16`` and codec strings; by default
            ``torch:fp32``, ``torch:bf16``, ``q4`` and ``q8``. ``torch:fp32``, plain
            DistributedDataParallel, is always tried. Where ranks share nodes every codec is tried
            with both exchanges.
        show: whether rank 0 prints which hook it tries, and what was found.

    Returns:
        What was found, the same on all ranks; ``verdict`` is one sentence, and ``print`` shows the
        verdict and a table.

    Raises:
        ConfigError: the model, the batch or a hook cannot be used, or there are no kernels for the
            model's device.
    """
    ddp = distributed_in(ddp)
    if not callable(batch_fn):
        raise ConfigError(
            "batch_fn must be a function that returns this rank's next batch, a tuple for "
            f"ddp(*batch) or a dict for ddp(**batch), not {batch_fn!r}"
        )
    wanted = require_hooks(DEFAULT_HOOKS if hooks is None else hooks)
    shows = show and ddp.process_group.rank() == 0
    emit: Progress = (
        (lambda text: print(f"doctor: {text}", flush=True)) if shows else lambda _: None
    )
    batch = batch_fn()

    def make_step(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            batch_loss("batch_fn", model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    found = examine(ddp, make_step, wanted, emit)
    if shows:
        print(found, flush=True)
    return found


def require_hooks(hooks: Sequence[str]) -> tuple[str, ...]:
    """The hooks, and `PLAIN`. Raises ConfigError for one that cannot be tried."""
    for hook in hooks:
        if hook not in TORCH_DTYPES:
            parse_codec(hook)
    return tuple(dict.fromkeys((PLAIN, *hooks)))


def examine(
    ddp: DistributedDataParallel,
    make_step: Callable[[nn.Module], Callable[[], None]],
    hooks: Sequence[str],
    emit: Progress,
) -> Diagnosis:
    """Tries hooks on copies of a model. Collective.

    Args:
        ddp: as for `doctor`.
        make_step: gets a wrapped copy; returns a function that trains one step.
        hooks: of `require_hooks`.
        emit: gets what happens.

    Raises:
        ConfigError: as for `doctor`.
    """
    place = next(ddp.parameters()).device
    if ddp.process_group.size() < 2:
        raise ConfigError("doctor needs two ranks at least: a world of one does not communicate")
    on_host = agreed_transport(place, ddp.process_group).on_host
    gpus = [place] if place.type == "cuda" else []
    with computing_on(place), torch.random.fork_rng(gpus):
        return _Examination(ddp, make_step, emit, place).run(hooks, on_host=on_host)


@dataclass
class _Examination:
    ddp: DistributedDataParallel
    make_step: Callable[[nn.Module], Callable[[], None]]
    emit: Progress
    place: torch.device

    def __post_init__(self) -> None:
        self._group = self.ddp.process_group
        self._clock = Clock(self.place)
        named = reduced_parameters(self.ddp)
        self._parameters = len(named)
        self._elements = sum(p.numel() * (1 + p.is_complex()) for _, p in named)

    def run(self, hooks: Sequence[str], *, on_host: bool) -> Diagnosis:
        nodes = found_nodes(self._group, self.place)
        exchanges = exchanges_to_choose_from(FOUND_NODES, nodes, on_host=on_host)
        options = {each.name: option_for(each.nodes) for each in exchanges}
        if on_host:
            options[exchanges[-1].name] = FOUND_NODES
        # What to tell attach, so that it takes the exchange; without those that it cannot be told.
        self._options = {name: option for name, option in options.items() if option is not None}
        names = [*self._options] if len(self._options) > 1 else [None]
        candidates = [each for hook in hooks for each in _candidates(hook, names)]
        on_one_host = len(nodes.members) == 1
        self.emit("training steps without communication")
        silent = Trial([_NO_SYNC], self._clock, self._slowest)
        self._try(silent, _NO_SYNC)
        silent_s = silent.outcomes[0].seconds
        trial = Trial(candidates, self._clock, self._slowest)
        sent: dict[Candidate, int] = {}
        while (candidate := trial.current) is not None:
            again = " again" if candidate in sent else ""
            self.emit(f"trying {candidate.name}{again}")
            sent[candidate] = self._try(trial, candidate)
        plain = plain_of(trial.outcomes)
        steps = tuple(
            Step(
                hook=outcome.candidate.hook,
                exchange=outcome.candidate.exchange,
                seconds=outcome.seconds,
                times_faster=plain.over(outcome),
                steps=outcome.steps,
                wire_bytes=int(self._slowest([sent[outcome.candidate]])[0]),
                is_advised=outcome.candidate.bits >= COARSE_BITS,
            )
            for outcome in sorted(trial.outcomes, key=_seconds)
        )
        verdict = advise(trial.outcomes, silent_s, self._options)
        if on_one_host:
            verdict = f"On one host, {verdict[:1].lower()}{verdict[1:]}"
        return Diagnosis(
            verdict=verdict,
            steps=steps,
            silent_s=silent_s,
            world_size=self._group.size(),
            parameters=self._parameters,
            elements=self._elements,
            device=self.place.type,
            on_one_host=on_one_host,
        )

    def _try(self, trial: Trial, candidate: Candidate) -> int:
        """Trains a copy under a candidate; returns the bytes that this rank sends per step."""
        ddp = self.ddp
        model = DistributedDataParallel(
            copy.deepcopy(ddp.module),
            process_group=self._group,
            bucket_cap_mb=None if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap / 2**20,
            init_sync=False,  # ranks start from what `ddp` has synchronised
            find_unused_parameters=ddp.find_unused_parameters,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            static_graph=ddp.static_graph,
        )
        # The argument of this name is deprecated since torch 2.13, and warns.
        model.broadcast_buffers = ddp.broadcast_buffers
        state = None
        if candidate.hook in _COMPRESS:
            model.register_comm_hook(self._group, _COMPRESS[candidate.hook])
        elif candidate.hook not in (PLAIN, _NO_SYNC.hook):
            nodes = self._options[candidate.exchange or FLAT]
            state = attach(model, candidate.hook, nodes=nodes)
        step = self.make_step(model)
        with model.no_sync() if candidate is _NO_SYNC else nullcontext():
            for _ in range(_BEFORE):
                step()
            while not trial.step_begins():
                step()
        if state is not None:
            stats = state.stats()
            return stats["wire_bytes"] // max(stats["steps"], 1)
        world = self._group.size()
        return round(candidate.bits / 8 * self._elements * 2 * (world - 1) / world)

    def _slowest(self, values: Sequence[float]) -> list[float]:
        return most_of_ranks(values, self._group, self.place)


def _candidates(hook: str, exchanges: Sequence[str | None]) -> list[Candidate]:
    if hook in TORCH_DTYPES:
        return [Candidate(hook, 8.0 * TORCH_DTYPES[hook].itemsize, needs_memory=False)]
    codec = parse_codec(hook)
    return [Candidate(str(codec), codec.bits(), name) for name in exchanges]


def advise(
    outcomes: Sequence[Outcome], silent_s: float, options: Mapping[str, object] | None = None
) -> str:
    """The verdict, one sentence: what to use, and the figures that decided.

    Args:
        outcomes: of every hook; `PLAIN`, and others.
        silent_s: seconds of a step without communication.
        options: by exchange, the option `nodes` that asks for it.
    """
    ready = [each for each in outcomes if each.candidate.bits >= COARSE_BITS]
    codecs = [each for each in ready if each.candidate.needs_memory]
    plain, chosen = plain_of(outcomes), most_precise(ready)
    if plain.over(chosen).low < 1:  # steps vary so much that it may be no faster
        chosen = plain
    figures = (
        f"takes {1e3 * chosen.seconds:,.1f} ms per step, a step without communication "
        f"{1e3 * silent_s:,.1f} ms"
    )
    if chosen is plain:
        verdict = f"Do not compress: {PLAIN} {figures}"
        if codecs:
            verdict += f", the fastest codec, {min(codecs, key=_seconds).shown}"
    else:
        verdict = (
            f"Use {chosen.candidate.name}: it {figures}, {PLAIN} {1e3 * plain.seconds:,.1f} ms, "
            f"{plain.over(chosen).shown('.2f')} times as long"
        )
        option = (options or {}).get(chosen.candidate.exchange or "", FOUND_NODES)
        if option != FOUND_NODES:
            verdict += f"; attach with nodes={option!r}"
    if codecs and min(map(_seconds, ready)) >= _BEHIND * silent_s:
        # An outer step of DiLoCo takes about as long as a step with its codec.
        period = math.ceil(min(map(_seconds, codecs)) / silent_s / _OUTER_SHARE)
        verdict += (
            f"; none of these keeps up, and gradferry.DiLoCo would, from sync_every={period} on"
        )
    return f"{verdict}."


def plain_of(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of `PLAIN`."""
    return next(each for each in outcomes if each.candidate.hook == PLAIN)


def batch_loss(name: str, model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that a user's model returns for a batch. Raises ConfigError, with `name`, where the
    batch is no batch, or the model returns something else.
    """
    if not isinstance(batch, (tuple, list, Mapping)):
        kind = "None" if batch is None else f"a {type(batch).__name__}"
        raise ConfigError(
            f"{name}: a batch is {kind}; it must be a tuple or list of the model's "
            "positional arguments, or a dict of its keyword arguments: one tensor alone is (x,)"
        )
    returned = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    loss = getattr(returned, "loss", returned)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"{name}: the model returned {type(returned).__name__}; called with a batch "
            f"it must return its loss, a tensor of one element, or an object whose .loss is one"
        )
    return loss
