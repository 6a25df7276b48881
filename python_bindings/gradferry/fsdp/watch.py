"""Looks, in training, whether the model is still the one that was attached to, and FSDP2 calls."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradferry.averaging.silent_hook import has_gradients_of, watch_hook
from gradferry.errors import GradferryError, StateError
from gradferry.fsdp.hooks import Exchange, Gradients, end_all
from gradferry.fsdp.model import ShardedModule, sharded_modules, unsharded_parameters

_NOT_CALLED = (
    "compressed: FSDP2 calls its hooks after loss.backward() of a forward pass through the model "
    "that gradferry was attached to"
)


def watch(model: nn.Module, guard: Guard) -> None:
    """Watches a model, which has its hooks, for as long as it lives."""
    # Before FSDP2's own hook, which communicates.
    model.register_forward_pre_hook(guard, prepend=True)
    index = guard.attached[0].running.index
    alive = weakref.proxy(guard)  # it refers to the model, which has it for life
    watch_hook(
        model,
        passes=lambda: int(alive.passes()),
        trains=lambda optimizer: has_gradients_of(optimizer, index),
        explain=lambda: _NOT_CALLED,
    )


@dataclass(eq=False)
class Guard:
    """Raises in the forward pass what has ended an engine: after a backward pass that failed,
    FSDP2 may leave out its hooks, and so reduce nothing. In every pass it raises that something
    else exchanges than at attach; in the first, and as often as `check_every` says, that a module
    was sharded later, or that FSDP2 does not reduce a parameter that trains, unless it did so then.

    Attributes:
        modules: of the model, that FSDP2 reduces.
        attached: exchanges of the model.
        apart: names of parameters that train although FSDP2 does not reduce them.
    """

    modules: Sequence[ShardedModule]
    attached: Sequence[Exchange]
    apart: Sequence[str]

    def __post_init__(self) -> None:
        self._first = self.attached[0]
        running = self._first.running
        self._every = running.config.check_every if running.engine is not None else 0
        self._checks = -1  # the first pass is one, too

    def __call__(self, model: nn.Module, *_: object) -> None:
        look = self._look
        if torch.compiler.is_compiling():  # as FSDP2 keeps its hooks out
            look = torch._dynamo.disable(look)  # type: ignore[no-untyped-call]
        look(model)

    def _look(self, model: nn.Module) -> None:
        try:
            self._expect_unchanged(model)
        except GradferryError as error:  # for messages of all exchanges other ranks may wait
            text, rank = str(error), self._first.running.world_rank
            told = text if text.startswith("rank") else f"rank {rank}: {text}"
            end_all([each.running for each in self.attached], told)
            raise

    def _expect_unchanged(self, model: nn.Module) -> None:
        for each in sorted(self.attached, key=lambda each: each.averages):  # as all ranks do
            if each.running.engine is not None:
                each.running.engine.expect_alive()
                each.expect_set()
            if isinstance(each, Gradients):
                each.end_pass()
        checks = self.passes() // self._every if self._every else 0
        if checks != self._checks:
            self._checks = checks
            self._check_parameters(model)

    def _check_parameters(self, model: nn.Module) -> None:
        known = {module.name for module in self.modules}
        if later := [each.name for each in sharded_modules(model) if each.name not in known]:
            raise StateError(
                f"fully_shard was called on {later[0]!r} after attach, so that its gradients would "
                "not reach the hook; attach after the last fully_shard"
            )
        for name in unsharded_parameters(model, self.modules):
            if name not in self.apart:
                raise StateError(
                    f"parameter {name!r} was added, or unfrozen, after attach, and FSDP2 does not "
                    "reduce its gradient; call fully_shard on the whole model after the last "
                    "change to it, and then attach"
                )

    def passes(self) -> int:
        """Synced backward passes so far."""
        return self._first.passes()
