"""Binds options to one DistributedDataParallel: ranks agree, start engines, register the hook."""

from __future__ import annotations

import functools

from torch.nn.parallel import DistributedDataParallel

from gradferry import _native
from gradferry.averaging.momentum import MomentumHandover
from gradferry.averaging.running import Running, propose
from gradferry.averaging.start import start
from gradferry.core.config import make_config
from gradferry.core.options import Options
from gradferry.ddp.auto import Chooser, chooses
from gradferry.ddp.model import Model, leaves_out_buckets
from gradferry.ddp.watch import ModelWatch

_RECOVERY_HINT = (
    "This hook is finished. To go on, delete this DistributedDataParallel first (its hook would "
    "run beside that of a new one), and attach to a new one."
)


class Binding:
    """The running configuration of one model, and the hook that DDP calls; made after all ranks
    have agreed.

    Attributes:
        running: configuration, parameters and engine; "auto" changes them.
        hook: called by DDP's communication hook.
        chooser: chooses the codec or the exchange; None where there is nothing to choose.
        model: a weak reference, because DDP holds its hook, and so this object.
        handover: compares handed-over momenta; None unless the hook has momentum mode, warm-up
            steps and other ranks.
        watch: looks at the model's parameters, and whether DDP calls the hook.
    """

    def __init__(self, running: Running, model: Model, *, native: bool) -> None:
        config, alone = running.config, running.world_size == 1
        self.running, self.model = running, model.reference
        self.hook = _native.BucketHook(
            engine=running.engine, parameters=running.tensors(), group_name=running.group_name
        )
        self.chooser: Chooser | None = None
        if chooses(running):
            self.chooser = Chooser(running)
            self.chooser.start(self.hook)
        self.handover: MomentumHandover | None = None
        if config.momentum and config.warmup_steps and running.engine and not alone:
            self.handover = MomentumHandover(running)
            self.handover.start(self.hook)
        self.watch = ModelWatch(model, running, self.hook, native=native)

    def resume(self, steps: int) -> None:
        """Continues from a checkpoint after so many steps."""
        self.hook.resume(steps)
        self.watch.compare_later()
        if self.handover is not None:
            self.handover.start(self.hook)


def bind(
    ddp: DistributedDataParallel,
    codec: str,
    options: Options,
    *,
    native: bool,
) -> Binding:
    """Agrees with all ranks of DDP's group and starts the engine. Collective.

    Args:
        ddp: has no communication hook yet.
        codec, options: checked here, so that an error in them is raised on all ranks.
        native: also registers the native hook.

    Raises as `start` does.
    """
    model = Model(ddp)

    def propose_here() -> Running:
        config = make_config(codec, options)
        model.check(config)
        return propose(config, model.group, model.device, model.named, model.record, _RECOVERY_HINT)

    build = functools.partial(Binding, model=model, native=native)
    binding = start(model.group, model.device, propose_here, build, purpose="call attach")
    _register(model, binding, native=native)
    binding.watch.start()
    return binding


def _register(model: Model, binding: Binding, *, native: bool) -> None:
    """Registers the hook, or prepares that the user registers one of the standard signature.

    Args:
        model: has no communication hook yet.
        binding: with the hook that DDP's hooks call.
        native: registers the native hook.
    """
    ddp, hook, running = model.ddp, binding.hook, binding.running
    # The engine must know of every bucket which parameters this rank used.
    on_host = running.transport.on_host and not running.config.passes_through
    if running.finds_unused_parameters and on_host:
        hook.watch_use([parameter for _, parameter in model.named], ddp.reducer)
    if leaves_out_buckets(ddp):
        hook.end_steps_with_passes()
    if native:
        # Last: DDP takes a hook for life, so no rank may have one when another has failed.
        hook.attach(ddp.reducer)
        if ddp.logger is not None:
            ddp.logger._set_comm_hook_name(f"gradferry:{running.codec_asked_for}")
