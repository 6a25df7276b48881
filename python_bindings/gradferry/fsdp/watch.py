"""Looks, in training, whether the model is still the one that was attached to, and FSDP2 calls."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradferry.averaging.silent_hook import has_gradients_of, watch_hook
from gradferry.core.agreement import Record, on_all_ranks, rendezvous_place
from gradferry.core.rendezvous import meet, timeout_of
from gradferry.errors import GradferryError, StateError
from gradferry.fsdp.hooks import AllGather, Exchange, end_all
from gradferry.fsdp.model import (
    ShardedModule,
    finalizes_by_hand,
    settle,
    sharded_modules,
    unsharded_parameters,
)

_MOVED = (
    "FSDP2 and gradferry go on with what they have settled; move it back before the next pass, or "
    "shard and attach a new model"
)
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
    else exchanges than at attach, or that a parameter has moved; and as often as `check_every`
    says, that FSDP2 does not reduce a parameter that trains, unless it did so at attach.

    In the first pass, in which FSDP2 settles what it does, and in those after a change of
    ``reshard_after_forward``, the ranks of the shard group compare which collectives they are going
    to call; then it is known, too, which modules were sharded later, or outside of the model.

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
        self._compared: Sequence[bool | int] | None = None
        self._checks = 0

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
        if finalizes_by_hand(model):
            raise StateError(
                "set_manual_backward_finalization(True) reduces gradients after the backward pass, "
                "where no hook is called for it; leave it out"
            )
        for module in self.modules:
            if move := module.move():
                raise StateError(f"{move} at attach, in {module.name!r}: {_MOVED}")
        resharding = [module.resharding for module in self.modules]
        if self._compared != resharding:
            self._compare(model)
            self._compared = [module.resharding for module in self.modules]
        checks = self.passes() // self._every if self._every else 0
        if checks != self._checks:
            self._checks = checks
            self._check_parameters(model)

    def _compare(self, model: nn.Module) -> None:
        """Has all ranks of the shard group raise where they differ, or one cannot go on."""

        def settled_here() -> Record:
            settle(model)
            names = [module.name for module in self.modules]
            for name in [each.name for each in sharded_modules(model)]:
                if name not in names:
                    raise StateError(
                        f"fully_shard was called on {name!r} after attach, so that its gradients "
                        "would not reach the hook; attach after the last fully_shard"
                    )
            return {key: value for each in self.modules for key, value in each.settled().items()}

        group, device = self.modules[0].groups[0], self.modules[0].device
        purpose = "begin this forward pass as others do"
        for each in self.attached:
            if isinstance(each, AllGather):
                each.meet(purpose, "set reshard_after_forward alike on all ranks")
                break
        else:
            meet(group, 0.9 * timeout_of(group, rendezvous_place(group, device)), purpose)
        on_all_ranks(settled_here, group, device, alike=True)

    def _check_parameters(self, model: nn.Module) -> None:
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
