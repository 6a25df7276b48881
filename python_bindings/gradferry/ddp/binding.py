"""Binds options to one DistributedDataParallel: ranks agree, start engines, register the hook."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.distributed.algorithms.join import JoinHook as TorchJoinHook
from torch.nn.parallel import DistributedDataParallel

from gradferry import _native
from gradferry.averaging.momentum import MomentumHandover
from gradferry.averaging.running import Running, propose
from gradferry.averaging.start import start
from gradferry.core.config import make_config
from gradferry.core.options import Options
from gradferry.core.warn import warn
from gradferry.ddp.auto import Chooser, chooses
from gradferry.ddp.model import (
    Model,
    expect_no_step_in_hook,
    has_python_hook,
    leaves_out_buckets,
)
from gradferry.ddp.watch import ModelWatch
from gradferry.errors import ConfigError, StateError

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
        passed_on: what a loaded state says of a choice, where nothing is chosen: in a world of one,
            or without an engine. A state saved there says it again.
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
        self.passed_on: dict[str, Any] = {}

    def resume(self, steps: int) -> None:
        """Continues from a checkpoint after so many steps."""
        self.hook.resume(steps)
        self.watch.compare_later()
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

    Raises as `start` does.
    """
    model = Model(ddp)

    def propose_here() -> Running:
        if is_bound:
            raise StateError(
                "this HookState is bound to a model already; make one HookState for each model"
            )
        config = make_config(codec, options)
        model.check(config)
        return propose(config, model.group, model.device, model.named, model.record, _RECOVERY_HINT)

    build = functools.partial(Binding, model=model, native=native)
    binding = start(model.group, model.device, propose_here, build, purpose="call attach")
    _register(model, binding, native=native)
    binding.watch.start()
    model.ddp.no_sync = binding.watch.no_sync  # type: ignore[method-assign]
    return binding


def _register(model: Model, binding: Binding, *, native: bool) -> None:
    """Registers the hook, and guards the model against what would lose it, while both exist.

    Args:
        model: has no communication hook yet.
        binding: with the hook that DDP's hooks call.
        native: registers the native hook; else the user registers one of the standard signature.
    """
    ddp, hook, running = model.ddp, binding.hook, binding.running
    _guard(ddp, takes_hook=not native)
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


def _guard(ddp: DistributedDataParallel, *, takes_hook: bool) -> None:
    weak = weakref.ref(ddp)  # with a reference cycle, only the garbage collector would free it
    ddp._update_process_group = _refuse_new_group  # type: ignore[method-assign]
    ddp.register_comm_hook = functools.partial(  # type: ignore[method-assign]
        _register_comm_hook, weak, takes_hook
    )
    ddp.join_hook = functools.partial(_join_hook, weak)  # type: ignore[method-assign]
    # What copy and pickle ask for; DDP rebuilds its reducer from it, which then has no hook.
    ddp.__getstate__ = functools.partial(_state_without_hook, weak)  # type: ignore[method-assign]


def _state_without_hook(model: weakref.ref[DistributedDataParallel]) -> dict[str, Any]:
    ddp = model()
    assert ddp is not None  # it is being asked
    state: dict[str, Any] = type(ddp).__getstate__(ddp)  # type: ignore[no-untyped-call]
    warn(
        "a copied or pickled DistributedDataParallel has no communication hook and would train "
        "uncompressed: attach again",
    )
    guards = ("_update_process_group", "register_comm_hook", "join_hook", "no_sync", "__getstate__")
    return {**{key: state[key] for key in state if key not in guards}, "_comm_hooks": []}


def _register_comm_hook(
    model: weakref.ref[DistributedDataParallel], takes_hook: bool, state: object, hook: Any
) -> None:
    """Replaces the method of that name of one DistributedDataParallel."""
    expect_no_step_in_hook(hook)
    if not takes_hook:
        raise StateError(
            "gradferry.attach() gave this DistributedDataParallel its communication hook, and DDP "
            "takes one for life: wrap the model in a new DistributedDataParallel for another hook"
        )
    ddp = model()
    assert ddp is not None  # its attribute is being called
    type(ddp).register_comm_hook(ddp, state, hook)


def _refuse_new_group(*_: object) -> None:
    raise StateError(
        "gradferry averages over the process group it was attached with; build a new "
        "DistributedDataParallel over the new group and attach again"
    )


def _join_hook(model: weakref.ref[DistributedDataParallel], **arguments: Any) -> TorchJoinHook:
    """Replaces the method of that name of one DistributedDataParallel.

    DDP does not tell a communication hook how many ranks still have input, so the hook cannot
    average over those ranks alone. Every rank enters `join()` with the same arguments, so all ranks
    raise the error.
    """
    if not arguments.get("divide_by_initial_world_size", True):
        raise ConfigError(
            "join(divide_by_initial_world_size=False) does not go with gradferry: DDP does not "
            "tell communication hooks how many ranks still have input; leave it out, and scale "
            "the loss if the last steps matter"
        )
    ddp = model()
    assert ddp is not None  # its attribute is being called
    hook: TorchJoinHook = type(ddp).join_hook(ddp, **arguments)  # type: ignore[no-untyped-call]
    return hook
