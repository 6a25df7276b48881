"""Looks again, in training, at what attach has checked: the parameters, and whether DDP calls."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from gradferry import _native
from gradferry.ddp.model import Model, has_python_hook, synchronizes, trained_parameters
from gradferry.reduction.running import Running
from gradferry.reduction.silent_hook import has_gradients_of, silence_of, watch_hook

_REBUILD = (
    "build a new DistributedDataParallel after the last change to the model's parameters, and "
    "attach to that"
)
# By model that has a hook: what the hook runs, and in how many synced passes it was called.
_hooked: WeakKeyDictionary[DistributedDataParallel, tuple[Running, Callable[[], int]]] = (
    WeakKeyDictionary()
)


class ModelWatch:
    """Watches one model for as long as it lives.

    Parameters that were frozen since attach are still reduced, and those that trained apart at
    attach were warned of then: neither is a change.

    Args:
        model: has been checked.
        running: of its hook.
        native: whether attach registered the hook; else the user must.
    """

    def __init__(self, model: Model, running: Running, *, native: bool) -> None:
        self._model = model.reference
        self._apart = model.apart
        self._running = running
        self._native = native
        # Where everything passes through, nothing is checked.
        self._every = running.config.check_every if running.engine is not None else 0
        self._kinds = [_kind_of(parameter) for _, parameter in model.named]
        self._passes = 0
        # Passes of other models when the last one of this model was counted.
        self._others: WeakKeyDictionary[DistributedDataParallel, int] = WeakKeyDictionary()

    def start(self, hook: _native.BucketHook) -> None:
        """Begins, once the model has its hook."""
        ddp = self._model()
        assert ddp is not None  # the caller has it
        self._count(hook)
        _hooked[ddp] = self._running, hook.finished_steps
        self.compare_later(hook)
        watch_hook(
            ddp,
            passes=lambda: self._count(hook),
            trains=self.trains,
            explain=self.explain,
            check=lambda: self.expect_unchanged(hook),
            check_every=self._every,
        )

    def compare_later(self, hook: _native.BucketHook) -> None:
        """Makes the hook compare parameters at the first bucket of every step that `check_every`
        says, at the same point on all ranks.
        """
        if self._every:
            hook.call_at(self._every, self._check, "parameters")

    def _check(self, hook: _native.BucketHook, step: int) -> None:
        hook.call_at((step // self._every + 1) * self._every, self._check, "parameters")
        self.expect_unchanged(hook)

    def expect_unchanged(self, hook: _native.BucketHook) -> None:
        """Ends the hook on all ranks if the parameters that train are not those of attach.

        Raises:
            StateError: they are not.
        """
        if change := self.change():
            hook.fail(f"{change}; {_REBUILD}")

    def change(self) -> str | None:
        """How the parameters that train differ from those that DDP reduces; None: they do not."""
        ddp, running = self._model(), self._running
        names = {parameter.name for parameter in running.parameters}
        for name, parameter in () if ddp is None else trained_parameters(ddp, self._apart):
            if parameter not in running.index:
                how = "was replaced" if name in names else "was added, or unfrozen,"
                return (
                    f"parameter {name!r} {how} after attach, so that DistributedDataParallel does "
                    "not reduce its gradient"
                )
            for now, before in zip(
                _kind_of(parameter), self._kinds[running.index[parameter]], strict=True
            ):
                if now != before:
                    return (
                        f"parameter {name!r} was {before} at attach and is {now}, so that "
                        "DistributedDataParallel no longer reduces its gradient"
                    )
        return None

    def _count(self, hook: _native.BucketHook) -> int:
        """Synced passes so far in which the hook was called."""
        passes = hook.finished_steps()
        if passes != self._passes:
            self._passes = passes
            self._others.update({ddp: count() for ddp, (_, count) in list(_hooked.items())})
        return passes

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has stepped on gradients of the model that DDP should have reduced,
        with the parameters that the model has now.

        Another DistributedDataParallel around the same parameters, such as the one that replaced
        this one, answers for those that it reduces: while its hook was called after this one, or
        its steps are meant to be local.
        """
        ddp = self._model()
        if ddp is None or not synchronizes(ddp):
            return False
        reduced_elsewhere = [
            running.index
            for other, (running, passes) in list(_hooked.items())
            if other is not ddp
            and (passes() > self._others.get(other, 0) or not synchronizes(other))
        ]
        mine = (
            parameter
            for _, parameter in trained_parameters(ddp, self._apart)
            if not any(parameter in index for index in reduced_elsewhere)
        )
        return has_gradients_of(optimizer, mine)

    def explain(self, optimizer: Optimizer) -> str:
        """The warning that the hook is not called."""
        ddp = self._model()
        assert ddp is not None  # an optimizer trains it
        if not self._native and not has_python_hook(ddp):
            why = (
                "compressed, because no model has the HookState: call "
                "ddp.register_comm_hook(state, gradferry.hook) before the first backward pass, or "
                "use gradferry.attach(ddp, ...), which registers"
            )
        elif change := self.change():
            why = f"averaged, and ranks drift apart: {change}; {_REBUILD}"
        else:
            why = (
                "averaged, and ranks drift apart: DistributedDataParallel calls its hook after "
                "loss.backward() of a forward pass through itself, not through ddp.module; where "
                "this is meant, as in local SGD, use ddp.no_sync()"
            )
        return silence_of(optimizer) + why


def _kind_of(parameter: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    """What a parameter must keep for DDP to reduce it."""
    return parameter.dtype, parameter.device
