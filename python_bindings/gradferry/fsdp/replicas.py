"""The hook that FSDP2 calls with a module's gradients, to average them over replicas."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from gradferry import _native
from gradferry.errors import StateError
from gradferry.fsdp.model import ShardedModule
from gradferry.reduction.running import Running


class ReplicaHook:
    """Averages the shards of one module. What ``set_all_reduce_hook`` takes.

    Args:
        running: with its engine started.
        modules: all of them.
        number: of the module whose gradients come.
        calls: of the engine; None without one.

    Attributes:
        count: of calls.
        passed: how many took the backend's own all-reduce.
    """

    def __init__(
        self,
        running: Running,
        modules: Sequence[ShardedModule],
        number: int,
        calls: _native.AllReducer | None,
    ) -> None:
        self._running = running
        self._modules = modules
        self._module = modules[number]
        self._first = sum(len(module.shards) for module in modules[:number])
        self._calls = calls
        self.count = 0
        self.passed = 0

    def __call__(self, gradient: torch.Tensor) -> None:
        """Replaces the gradients by their average, on the current stream.

        Args:
            gradient: flat, of this rank's shards of the parameters that have a gradient.

        Raises:
            GradferryError: as `gradferry.fsdp.attach` says; it has ended the hook on all ranks.
        """
        self.count += 1
        engine = self._running.engine
        if not self._module.requires_all_reduce:
            self._fail(
                f"set_requires_all_reduce(False) on {self._module.name!r}: FSDP2 does not ask for "
                "it where a hook averages over replicas, so that gradients would be averaged in "
                "every pass; use set_requires_gradient_sync(False) to accumulate them"
            )
        if engine is None:
            self._pass_through(gradient)
            return
        indices = [self._first + number for number in self._module.order()]
        expected = self._running.parameters[self._first].dtype
        if gradient.dtype != expected:
            self._fail(
                f"the gradients of {self._module.name!r} are reduced in {gradient.dtype}, and at "
                f"attach the mixed precision policy said {expected}; attach after the last change "
                "to it and to the dtypes of parameters"
            )
        if gradient.numel() != self._module.num_elements:
            self._pass_part(gradient, indices, engine)
            return
        if self._running.config.check_every:
            shards = [shard for module in self._modules for shard in module.shards]
            engine.compare([shard.values() for shard in shards])
        assert self._calls is not None
        self._calls.start([(indices, gradient)], in_background=False).wait()

    def _pass_part(
        self, gradient: torch.Tensor, indices: Sequence[int], engine: _native.BucketEngine
    ) -> None:
        """Some parameters have no gradient, and what came does not say which."""
        engine.expect_alive()
        config = self._running.config
        if config.needs_every_bucket:
            self._fail(
                f"{gradient.numel()} of {self._module.num_elements} elements of "
                f"{self._module.name!r} have a gradient, and momentum= and exact_skip= need all; "
                "make every parameter take part, or leave them out"
            )
        if self.passed == 0:
            warnings.warn(
                f"some parameters of {self._module.name!r} have no gradient: in such passes its "
                "gradients are averaged uncompressed. model.set_reduce_scatter_unused_params(True) "
                "reduces zeros for them, where this torch has it",
                stacklevel=2,
            )
        engine.note_passed(indices)
        self._pass_through(gradient)

    def _pass_through(self, gradient: torch.Tensor) -> None:
        self.passed += 1
        gradient.div_(self._running.world_size)
        dist.all_reduce(gradient, group=self._running.group)

    def _fail(self, message: str) -> NoReturn:
        """Ends the hooks of all ranks, which may wait for this one."""
        if self._running.engine is not None:
            self._running.engine.fail(f"rank {self._running.rank}: {message}")
        raise StateError(message)
