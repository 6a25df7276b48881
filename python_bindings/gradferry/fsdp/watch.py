"""Looks, in training, whether the model is still the one that was attached to, and FSDP2 calls."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from gradferry.core.names import first_of
from gradferry.fsdp.hooks import fail, synced_passes, warn_or_end
from gradferry.fsdp.model import (
    ShardedModule,
    finalizes_by_hand,
    modules_outside,
    sharded_modules,
    unsharded_parameters,
)
from gradferry.fsdp.state import ALL_GATHER, REDUCE_SCATTER, REPLICAS, Attached
from gradferry.reduction.silent_hook import has_gradients_of, watch_hook

_NAMES = {
    REPLICAS: "all-reduce hook",
    REDUCE_SCATTER: "reduce-scatter",
    ALL_GATHER: "all-gather",
}

_NOT_CALLED = (
    "compressed: FSDP2 calls its hooks after loss.backward() of a forward pass through the model "
    "that gradferry was attached to"
)


def watch(model: nn.Module, guard: Guard) -> None:
    """Watches a model, which has its hooks, for as long as it lives."""
    # Before FSDP2's own hook, which communicates.
    model.register_forward_pre_hook(guard, prepend=True)
    index = guard.running.index
    weak = weakref.ref(guard)  # it refers to the model, which has it for life

    def alive() -> Guard:
        guard = weak()
        assert guard is not None
        return guard

    watch_hook(
        model,
        passes=lambda: alive().passes(),
        trains=lambda optimizer: has_gradients_of(optimizer, index),
        explain=lambda: _NOT_CALLED,
    )


@dataclass(eq=False)
class Guard:
    """Raises in the forward pass what has ended an engine: after a backward pass that failed,
    FSDP2 may leave out its hooks, and so reduce nothing. In the first one also that a module has no
    hook: since it was sharded later, or since the model is only a part of what is sharded, which
    FSDP2 does not know before. And, as often as `check_every` says, that FSDP2 does not reduce a
    parameter that trains, unless it did so at attach. In every one, that something else exchanges
    than at attach.

    Attributes:
        modules: of the model, that FSDP2 reduces.
        attached: exchanges of the model.
        apart: names of parameters that train although FSDP2 does not reduce them.
    """

    modules: Sequence[ShardedModule]
    attached: Sequence[Attached]
    apart: Sequence[str]

    def __post_init__(self) -> None:
        self.running = running = self.attached[0].running
        self._every = running.config.check_every if running.engine is not None else 0
        self._was_compared = False
        self._checks = 0

    def __call__(self, model: nn.Module, *_: object) -> None:
        # Gathers first: an error there ends the others.
        for each in sorted(self.attached, key=lambda each: each.averages):
            if each.running.engine is not None:
                each.running.engine.expect_alive()
                if each.gathers is None:
                    self._expect_set(each)
                else:
                    each.gathers.end_others_after(partial(self._expect_set, each))
        if finalizes_by_hand(model):
            fail(
                self.running,
                "set_manual_backward_finalization(True) reduces gradients after the backward pass, "
                "where no hook is called for it; leave it out",
            )
        if not self._was_compared:
            self._was_compared = True
            self._compare_modules(model)
        checks = self.passes() // self._every if self._every else 0
        if checks != self._checks:
            self._checks = checks
            self._check_parameters(model)

    def _expect_set(self, attached: Attached) -> None:
        for module, hook in zip(self.modules, attached.hooks, strict=True):
            if not hook.is_set():
                fail(
                    attached.running,
                    f"{module.name!r} was given another {_NAMES[attached.name]} after attach; "
                    "FSDP2 takes one, so leave it out",
                )

    def _compare_modules(self, model: nn.Module) -> None:
        names = [module.name for module in self.modules]
        now = [module.name for module in sharded_modules(model)]
        later = [name for name in now if name not in names]
        if later:
            fail(
                self.running,
                f"fully_shard was called on {later[0]!r} after attach, so that its gradients "
                "would not reach the hook; attach after the last fully_shard",
            )
        averages = self.attached[0].name == REPLICAS  # what is left out differs between them
        rest = list(modules_outside(model)) if averages else []
        if rest:
            warn_or_end(
                self.running,
                "gradferry.fsdp.attach was called on a part of a sharded model: the gradients "
                f"of {first_of(rest)} are not averaged over replicas, so that these will "
                "differ; attach to the whole model instead",
            )

    def _check_parameters(self, model: nn.Module) -> None:
        for name in unsharded_parameters(model, self.modules):
            if name not in self.apart:
                fail(
                    self.running,
                    f"parameter {name!r} was added, or unfrozen, after attach, and FSDP2 does not "
                    "reduce its gradient; call fully_shard on the whole model after the last "
                    "change to it, and then attach",
                )

    def passes(self) -> int:
        """Synced backward passes so far."""
        return synced_passes(self.attached[0].hooks)
