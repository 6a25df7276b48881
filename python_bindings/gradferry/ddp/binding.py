"""Binds options to one DistributedDataParallel: all ranks agree, connect and start engines."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradferry import _native
from gradferry.core.agreement import meeting_place
from gradferry.core.config import make_config
from gradferry.core.options import Options
from gradferry.ddp.auto import Chooser
from gradferry.ddp.model import Model, has_python_hook
from gradferry.ddp.momentum_handover import MomentumHandover
from gradferry.ddp.registration import register
from gradferry.ddp.watch import ModelWatch
from gradferry.errors import StateError
from gradferry.reduction.running import Running, end_optimizer_steps, propose
from gradferry.reduction.start import start

_WAY_ON = (
    "This hook is finished. To go on, delete this DistributedDataParallel first (its hook would "
    "run beside that of a new one), and attach to a new one."
)


@dataclass(frozen=True)
class Binding:
    """The running configuration of one model, and the hook that DDP calls.

    Attributes:
        running: configuration, parameters and engine; "auto" changes them.
        hook: called by DDP's communication hook.
        chooser: chooses the codec; None unless it is "auto" and there is something to choose.
        model: a weak reference, because DDP holds its hook, and so this object.
        handover: compares handed-over momenta; None unless the hook has momentum mode, warm-up
            steps and other ranks.
        watch: looks at the model's parameters, and whether DDP calls the hook.
        passed_on: what a loaded state says of a choice, where nothing is chosen: in a world of one,
            or without an engine. A state saved there says it again.
    """

    running: Running
    hook: _native.BucketHook
    chooser: Chooser | None
    model: weakref.ref[DistributedDataParallel]
    handover: MomentumHandover | None
    watch: ModelWatch
    passed_on: dict[str, Any] = field(default_factory=dict)

    def resume(self, steps: int) -> None:
        """Continues from a checkpoint after so many steps."""
        self.hook.resume(steps)
        self.watch.compare_later(self.hook)
        if self.handover is not None:
            self.handover.start(self.hook)

    def expect_registered(self) -> None:
        """Checks, for the standard signature, that the calling model is the bound one.

        Raises:
            StateError: the bound model has no registered hook, so another model has called.
        """
        ddp = self.model()
        if ddp is None or not has_python_hook(ddp):
            self.hook.fail(
                "this HookState is bound to another DistributedDataParallel than the one that "
                "calls it; give each its own: "
                "ddp.register_comm_hook(gradferry.HookState(codec, ddp), gradferry.hook)"
            )


def bind(
    ddp: DistributedDataParallel,
    codec: str,
    options: Options,
    *,
    native: bool,
    is_bound: bool = False,
) -> Binding:
    """Agrees with all ranks of DDP's group and starts the engine. Collective.

    Args:
        ddp: has no communication hook yet.
        codec, options: checked here, so that an error in them is raised on all ranks.
        native: also registers the native hook.
        is_bound: whether the calling state already has a model, which is an error on all ranks.

    Raises:
        ConfigError, StateError: this or another rank cannot; the same text on every rank.
        RankMismatchError: the ranks differ; the same text on every rank.
        PeerError: a rank did not come, or failed to set up its connections or memory. Nothing was
            changed: all ranks can try again.
    """
    model = Model(ddp)
    place = meeting_place(model.group, model.device)

    def propose_here() -> Running:
        if is_bound:
            raise StateError(
                "this HookState is bound to a model already; make one HookState for each model"
            )
        config = make_config(codec, options)
        model.check(config)
        return propose(config, model.group, model.device, model.named, model.record, _WAY_ON)

    def build(running: Running, nonce: str) -> Binding:
        return _build(running, model, nonce, place, native=native)

    binding = start(model.group, model.device, propose_here, build, purpose="come to attach")
    running = binding.running
    end_optimizer_steps(running)
    name = f"gradferry:{running.codec_asked_for}" if native else None
    register(model, binding.hook, watch_use=_must_watch_use(running), name=name)
    binding.watch.start(binding.hook)
    return binding


def _build(
    running: Running, model: Model, nonce: str, place: torch.device, *, native: bool
) -> Binding:
    """Starts the engine and the hook after all ranks have agreed."""
    config = running.config
    running.start(model.group, nonce)
    hook = _native.BucketHook(
        engine=running.engine, parameters=running.tensors(), group_name=running.group_name
    )
    chooser = None
    if config.chooses and not config.disabled and running.world_size > 1:
        chooser = Chooser(running)
        chooser.start(hook)
    handover = None
    if config.momentum and config.warmup_steps and running.engine and running.world_size > 1:
        handover = MomentumHandover(running, place)
        handover.start(hook)
    watch = ModelWatch(model, running, native=native)
    return Binding(running, hook, chooser, model.reference, handover, watch)


def _must_watch_use(running: Running) -> bool:
    """Whether the engine must know which parameters this rank used."""
    return (
        running.finds_unused_parameters
        and running.transport.device.type == "cpu"
        and not running.config.passes_through
    )
