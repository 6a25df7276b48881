"""Looks again, in training, at what attach has checked: the parameters, and whether DDP calls."""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from gradferry import _native
from gradferry.averaging.running import Running
from gradferry.averaging.silent_hook import has_gradients_of, watch_hook
from gradferry.averaging.step_numbers import call_after_steps
from gradferry.ddp.model import (
    Model,
    divides_by_joined_ranks,
    forward_was_local,
    has_python_hook,
    trained_parameters,
)

# By module: the watch of the hook that was attached to it last. A model that is kept after another
# one has replaced it is not expected to call its hook.
_watched: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


class ModelWatch:
    """Watches one model for as long as it lives.

    Parameters that were frozen since attach are still reduced, and those that trained apart at
    attach were warned of then: neither is a change.

    Args:
        model: has been checked.
        running: of its hook.
        hook: what its hook calls.
        native: whether attach registered the hook; else the user must.
    """

    def __init__(
        self, model: Model, running: Running, hook: _native.BucketHook, *, native: bool
    ) -> None:
        self._model = model.reference
        self._apart = model.apart
        self._running = running
        self._hook = hook
        self._native = native
        # Where everything passes through, nothing is checked.
        self._every = running.config.check_every if running.engine is not None else 0

    def start(self) -> None:
        """Begins, once the model has its hook."""
        ddp = self._model()
        assert ddp is not None  # the caller has it
        self.compare_later()
        if ddp.module in _watched:
            _watched[ddp.module].remove()
        _watched[ddp.module] = watch_hook(
            ddp,
            passes=self._hook.finished_steps,
            trains=self._trains,
            explain=self._explain,
            is_local=self._is_local,
        )
        if self._running.world_size > 1:
            call_after_steps(self._expect_averages, index=self._running.index, owner=ddp)

    def compare_later(self) -> None:
        """Makes the hook compare parameters at the first bucket of every step that `check_every`
        says, at the same point on all ranks.
        """
        if self._every:
            self._compare_at(self._every)

    def _compare_at(self, step: int) -> None:
        # Weak: the hook would hold this watch, which holds it, where no garbage collector sees it.
        check = WeakMethod(self._check)

        def compare(_: _native.BucketHook, step: int) -> None:
            if live := check():
                live(step)

        self._hook.call_at(step, compare, "parameters")

    def _check(self, step: int) -> None:
        self._compare_at((step // self._every + 1) * self._every)
        if change := self._change():
            self._hook.fail(change)

    def _change(self) -> str | None:
        """How the parameters that train differ from those that DDP reduces; None: they do not."""
        ddp = self._model()
        if ddp is None:
            return None
        names = {parameter.name for parameter in self._running.parameters}
        for name, parameter in trained_parameters(ddp, self._apart):
            if parameter not in self._running.index:
                how = "was replaced" if name in names else "was added, or unfrozen,"
                return (
                    f"parameter {name!r} {how} after attach, so that DistributedDataParallel does "
                    "not reduce its gradient; build a new DistributedDataParallel after the last "
                    "change to the model's parameters, and attach to that"
                )
        return None

    def _expect_averages(self, optimizer: Optimizer) -> None:
        """Raises StateError, on all ranks, after a step on what is no average over all ranks."""
        ddp = self._model()
        if ddp is None:
            return
        if torch._C._current_graph_task_id() >= 0 and not forward_was_local(ddp):
            self._hook.fail(
                f"{type(optimizer).__name__} steps inside the backward pass, where gradients are "
                "those of this rank: DistributedDataParallel averages them later. Call step() "
                "after backward()"
            )
        if divides_by_joined_ranks(ddp):
            self._hook.fail(
                "join(divide_by_initial_world_size=False) does not go with gradferry: DDP does not "
                "tell communication hooks how many ranks still have input; leave it out, and scale "
                "the loss if the last steps matter"
            )

    def _is_local(self) -> bool:
        ddp = self._model()
        return ddp is not None and forward_was_local(ddp)

    def _trains(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has stepped on gradients of parameters that the model has now."""
        ddp = self._model()
        if ddp is None:
            return False
        return has_gradients_of(optimizer, (p for _, p in trained_parameters(ddp, self._apart)))

    def _explain(self) -> str:
        """What does not happen where the hook is not called, and why. With `check_every` a change
        of the parameters is an error.
        """
        ddp = self._model()
        assert ddp is not None  # an optimizer trains it
        if not self._native and not has_python_hook(ddp):
            return (
                "compressed, because no model has the HookState: call "
                "ddp.register_comm_hook(state, gradferry.hook) before the first backward pass, or "
                "use gradferry.attach(ddp, ...), which registers"
            )
        change = self._change()
        if change and self._every:
            self._hook.fail(change)
        return "averaged, and ranks drift apart: " + (
            change
            or "DistributedDataParallel calls its hook after loss.backward() of a forward pass "
            "through itself, not through ddp.module, and while parameters have the dtype and the "
            "device with which it was built; where this is meant, as in local SGD, use "
            "ddp.no_sync()"
        )
