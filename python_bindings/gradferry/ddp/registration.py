"""Registers the hook with a DistributedDataParallel, and takes part in its join()."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.distributed.algorithms.join import JoinHook as TorchJoinHook
from torch.nn.parallel import DistributedDataParallel

from gradferry import _native
from gradferry.core.warn import warn
from gradferry.ddp.model import Model, expect_no_step_in_hook
from gradferry.errors import ConfigError, StateError


def register(model: Model, hook: _native.BucketHook, *, watch_use: bool, name: str | None) -> None:
    """Registers the hook, and guards the model against what would lose it, while both exist.

    Args:
        model: has no communication hook yet.
        hook: what DDP's hooks call.
        watch_use: whether the hook learns of every bucket which parameters this rank used.
        name: registers the native hook, under this name in DDP's logs. None: the user registers
            one of the standard signature.
    """
    ddp = model.ddp
    _guard(ddp, takes_hook=name is None)
    if watch_use:
        hook.watch_use([parameter for _, parameter in model.named], ddp.reducer)
    if name is not None:
        # Last: DDP takes a hook for life, so no rank may have one when another has failed.
        hook.attach(ddp.reducer)
        if ddp.logger is not None:
            ddp.logger._set_comm_hook_name(name)


def _guard(ddp: DistributedDataParallel, *, takes_hook: bool) -> None:
    ddp._update_process_group = _refuse_new_group  # type: ignore[method-assign]
    ddp.register_comm_hook = functools.partial(  # type: ignore[method-assign]
        _register_comm_hook, weakref.ref(ddp), takes_hook
    )
    ddp.join_hook = JoinHook(ddp)  # type: ignore[method-assign]
    # What copy and pickle ask for; DDP rebuilds its reducer from it, which then has no hook.
    ddp.__getstate__ = functools.partial(  # type: ignore[method-assign]
        _state_without_hook, weakref.ref(ddp)
    )


def _state_without_hook(model: weakref.ref[DistributedDataParallel]) -> dict[str, Any]:
    ddp = model()
    assert ddp is not None  # it is being asked
    state: dict[str, Any] = type(ddp).__getstate__(ddp)  # type: ignore[no-untyped-call]
    warn(
        "a copied or pickled DistributedDataParallel has no communication hook and would train "
        "uncompressed: attach again",
    )
    guards = ("_update_process_group", "register_comm_hook", "join_hook", "__getstate__")
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


class JoinHook:
    """Replaces the method `join_hook` of one DistributedDataParallel.

    DDP does not tell a communication hook how many ranks still have input, so the hook cannot
    average over those ranks alone. Every rank enters `join()` with the same arguments, so all ranks
    raise the error.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # Weak: with a reference cycle, only the garbage collector would free the model.
        self._ddp = weakref.ref(ddp)

    def __call__(self, **arguments: Any) -> TorchJoinHook:
        """Raises ConfigError for ``divide_by_initial_world_size=False``."""
        if not arguments.get("divide_by_initial_world_size", True):
            raise ConfigError(
                "join(divide_by_initial_world_size=False) does not go with gradferry: DDP does not "
                "tell communication hooks how many ranks still have input; leave it out, and scale "
                "the loss if the last steps matter"
            )
        ddp = self._ddp()
        assert ddp is not None
        hook: TorchJoinHook = type(ddp).join_hook(ddp, **arguments)  # type: ignore[no-untyped-call]
        return hook
