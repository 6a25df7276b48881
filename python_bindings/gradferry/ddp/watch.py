"""Looks again, in training, at what attach has checked: the parameters, and whether DDP calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from gradferry import _native
from gradferry.averaging.running import Running
from gradferry.averaging.silent_hook import AVERAGED, has_gradients_of, watch_hook
from gradferry.ddp.model import (
    Model,
    forward_was_local,
    has_python_hook,
    is_under_no_sync,
    trained_parameters,
)

_REBUILD = (
    "build a new DistributedDataParallel after the last change to the model's parameters, and "
    "attach to that"
)
# By model that has a hook.
_watches: WeakKeyDictionary[DistributedDataParallel, ModelWatch] = WeakKeyDictionary()


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
        # By id of a parameter, where autograd accumulates its gradient: DDP waits for it there.
        self._nodes = {id(each): _node_of(each) for _, each in model.named}
        self._strangers: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()
        self._unsynced_after = -1  # so many synced passes there was the last under no_sync()

    def start(self) -> None:
        """Begins, once the model has its hook."""
        ddp = self._model()
        assert ddp is not None  # the caller has it
        _watches[ddp] = self
        self.compare_later()
        watch_hook(
            ddp,
            passes=self._hook.finished_steps,
            trains=self.trains,
            explain=self.explain,
            is_local=self.is_local,
            inspect=self.inspect,
            check=self.expect_unchanged,
            check_every=self._every,
        )

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
        self.expect_unchanged()

    def expect_unchanged(self) -> None:
        """Ends the hook on all ranks if the parameters that train are not those of attach.

        Raises:
            StateError: they are not.
        """
        if change := self.change():
            self._hook.fail(f"{change}; {_REBUILD}")

    def change(self, among: Collection[int] | None = None) -> str | None:
        """How the parameters that train differ from those that DDP reduces; None: they do not.

        Args:
            among: ids of the parameters to look at; None: all.
        """
        names = {parameter.name for parameter in self._running.parameters}
        for name, parameter in self._trained():
            if among is not None and id(parameter) not in among:
                continue
            if id(parameter) not in self._nodes:
                how = "was replaced" if name in names else "was added, or unfrozen,"
            elif self._nodes[id(parameter)] not in (None, _node_of(parameter)):
                how = "was converted or moved, if only for a while,"
            else:
                continue
            return (
                f"parameter {name!r} {how} after attach, so that DistributedDataParallel does not "
                "reduce its gradient"
            )
        return None

    def _trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and parameters that the model trains now, as far as this hook answers for them.

        Another DistributedDataParallel around the same parameters, such as the one that replaced
        this one, answers for those that it reduces.
        """
        ddp = self._model()
        if ddp is None:
            return
        others = [watch for other, watch in list(_watches.items()) if other is not ddp]
        for name, parameter in trained_parameters(ddp, self._apart):
            if not any(id(parameter) in watch._nodes for watch in others):
                yield name, parameter

    def is_local(self) -> bool:
        """Whether a pass was under ``no_sync()`` since the last synced one."""
        ddp = self._model()
        inside = ddp is not None and is_under_no_sync(ddp)
        return inside or self._unsynced_after == self._hook.finished_steps()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Replaces the method of this name of the model, and notes when a pass that trains it was
        under it: not an evaluation, or a pass through frozen parameters.
        """
        ddp = self._model()
        assert ddp is not None  # its attribute is being called
        trained = False

        def note(module: torch.nn.Module, _: object) -> None:
            nonlocal trained
            trained |= torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())

        with type(ddp).no_sync(ddp), ddp.register_forward_pre_hook(note):
            yield
        if trained:
            self._unsynced_after = self._hook.finished_steps()

    def inspect(self, optimizer: Optimizer, may_take_long: bool) -> str | None:
        """Warns of an optimizer that trains what DDP does not reduce.

        Raises:
            StateError: it has stepped inside a backward pass, before gradients are averaged.
        """
        groups = optimizer.param_groups
        used = {id(p) for group in groups for p in group["params"] if p.grad is not None}
        name = type(optimizer).__name__
        if self._steps_too_early(used):
            self._hook.fail(
                f"{name} steps inside the backward pass, where gradients are those of this rank: "
                "DistributedDataParallel averages them later. Call step() after backward()"
            )
        strangers = used.difference(self._nodes, self._strangers.get(optimizer, ()))
        self._strangers.setdefault(optimizer, set()).update(strangers)
        if not (strangers or may_take_long) or not (change := self.change(used)):
            return None
        return f"{name} steps on gradients that are not {AVERAGED}{change}; {_REBUILD}"

    def _steps_too_early(self, used: Collection[int]) -> bool:
        ddp = self._model()
        if torch._C._current_graph_task_id() < 0 or ddp is None:
            return False
        if forward_was_local(ddp) and self.is_local():  # the first alone may be an evaluation
            return False
        running = self._running
        acts = running.transport.exchanges or running.config.momentum
        return bool(acts) and not self._nodes.keys().isdisjoint(used)

    def trains(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has stepped on gradients of the model that DDP should have reduced,
        with the parameters that the model has now.
        """
        return has_gradients_of(optimizer, (parameter for _, parameter in self._trained()))

    def explain(self) -> str:
        """What does not happen where the hook is not called, and why."""
        ddp = self._model()
        assert ddp is not None  # an optimizer trains it
        if not self._native and not has_python_hook(ddp):
            return (
                "compressed, because no model has the HookState: call "
                "ddp.register_comm_hook(state, gradferry.hook) before the first backward pass, or "
                "use gradferry.attach(ddp, ...), which registers"
            )
        return (
            f"{AVERAGED}DistributedDataParallel calls its hook after loss.backward() of a forward "
            "pass through itself, not through ddp.module; where this is meant, as in local SGD, "
            "use ddp.no_sync()"
        )


def _node_of(parameter: torch.Tensor) -> Node | None:
    """Where autograd accumulates a gradient: another node once dtype or device have changed."""
    with torch.inference_mode(False):
        return get_gradient_edge(parameter).node if parameter.requires_grad else None
