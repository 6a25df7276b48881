"""What FSDP2 calls with the gradients of a module: one hook averages them, one reduce-scatters.
`gathers.py` has what it calls with parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.autograd import Variable

from gradferry import _native
from gradferry.averaging.running import Running
from gradferry.core.warn import warn
from gradferry.errors import GradferryWarning, StateError
from gradferry.fsdp.model import ShardedModule


class Passes:
    """The backward passes of a model: which of its modules had gradients.

    Args:
        running: with its engine started.
        modules: all of them.
        num_parts: of every parameter, in what FSDP2 hands over.
    """

    def __init__(self, running: Running, modules: Sequence[ShardedModule], num_parts: int) -> None:
        self._running = running
        self._modules = modules
        self._num_parts = num_parts
        self._called: set[int] = set()
        self._is_queued = False

    def indices(self, number: int) -> list[int]:
        """A module's parameters as the engine numbers them, in the order of FSDP2's tensor."""
        first = self._num_parts * sum(len(module.shards) for module in self._modules[:number])
        order = self._modules[number].order()
        parts = range(self._num_parts)
        return [first + part * len(order) + each for part in parts for each in order]

    def note(self, number: int, engine: _native.BucketEngine) -> None:
        """A module's gradients have come."""
        if number in self._called:
            self._is_queued = False
            self._finish()  # the pass before, which ended in a backward pass within it
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._end_last)
        if not self._called and self._running.config.check_every:
            shards = [shard for module in self._modules for shard in module.shards]
            engine.compare([shard.values() for shard in shards])
        self._called.add(number)

    def _end_last(self) -> None:
        """FSDP2's callbacks may reduce the last modules. A model that is not sharded as a whole has
        one for each of its parts, and parts that the pass reaches later queue theirs behind this.
        """
        Variable._execution_engine.queue_callback(self._end)

    def end_broken(self) -> None:
        """Ends a pass that an exception has ended, and whose callbacks autograd has dropped, after
        FSDP2's ``reset_iter_state()``.
        """
        if self._called and all(module.gathers_for == "IDLE" for module in self._modules):
            self._is_queued = False
            self._finish()

    def _end(self) -> None:
        self._is_queued = False
        # With reentrant checkpointing, modules come in backward passes within this one.
        if torch._C._current_autograd_node() is None:
            self._finish()

    def _finish(self) -> None:
        called, self._called = self._called, set()
        engine = self._running.engine
        if engine is None:
            return
        for number, module in enumerate(self._modules):
            if module.shards and number not in called:
                if self._running.config.needs_every_bucket:
                    fail(self._running, f"{module.name!r} has no gradient, {_NEEDS_ALL}")
                engine.note_passed(self.indices(number))


_NEEDS_ALL = (
    "and momentum= needs that of every parameter in every pass; make all take part, or leave it out"
)


def fail(running: Running, message: str) -> NoReturn:
    """Ends the hooks of all ranks, which may wait for this one."""
    _end(running, message)
    raise StateError(message)


def warn_or_end(running: Running, text: str) -> None:
    """Warns in the middle of a pass: where the user's filters make that an error, it ends the hooks
    of all ranks, which may wait for this one.
    """
    try:
        warn(text)
    except GradferryWarning as warning:
        _end(running, f"{type(warning).__name__}: {text}")
        raise


def _end(running: Running, message: str) -> None:
    if running.engine is not None:
        running.engine.fail(f"rank {running.world_rank}: {message}")


class InOwnMemory:
    """What FSDP2 asks of a custom collective beside the call: memory."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for what is exchanged."""
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass(eq=False)
class ModuleHook(ABC):
    """Hands what FSDP2 exchanges of one module to the engine of all modules.

    Attributes:
        running: with its engine started.
        module: of which it is.
        number: of that module.
        calls: of the engine; None without one.
        count: of calls.
        passed: how many took the backend's own collective.
    """

    running: Running
    module: ShardedModule
    number: int
    calls: _native.AllReducer | None
    count: int = field(default=0, init=False)
    passed: int = field(default=0, init=False)

    @abstractmethod
    def set(self) -> None:
        """Makes FSDP2 call this hook."""

    @abstractmethod
    def is_set(self) -> bool:
        """Whether FSDP2 still calls it."""

    def _fail(self, message: str) -> NoReturn:
        fail(self.running, message)


@dataclass(eq=False)
class GradientHook(ModuleHook):
    """Averages the gradients of one module.

    Attributes:
        passes: of the model.
    """

    passes: Passes

    @staticmethod
    def num_parts(world_size: int) -> int:
        """The number of parts of every parameter in what FSDP2 hands over."""
        return 1

    def _average(self, gradient: torch.Tensor) -> bool:
        """Averages the gradients in place, on the current stream.

        Args:
            gradient: flat: part by part, the padded shards of all parameters that have a gradient.

        Returns:
            False: it did not, and all ranks must do so by the backend's own collective.

        Raises:
            GradferryError: as `gradferry.fsdp.attach` says; it has ended the hooks of all ranks.
        """
        self.count += 1
        engine = self.running.engine
        if change := self.module.change():
            self._fail(
                f"{change} in {self.module.name!r} since attach; attach after the last change to "
                "the model, before the first backward pass"
            )
        if engine is None:
            self.passed += 1
            return False
        self.passes.note(self.number, engine)
        indices = self.passes.indices(self.number)
        expected = self.module.shards[0].dtype
        if gradient.dtype != expected:
            self._fail(
                f"the gradients of {self.module.name!r} are reduced in {gradient.dtype}, and at "
                f"attach it was to be {expected}; attach after the last change to the mixed "
                "precision policy, to dtypes of parameters and to their grad_dtype"
            )
        parts = self.num_parts(self.running.world_size)
        if gradient.numel() != parts * self.module.num_elements:
            self._note_part(indices, engine)
            return False
        assert self.calls is not None
        real = torch.view_as_real(gradient).view(-1) if gradient.is_complex() else gradient
        self.calls.start([(indices, real)], in_background=False).wait()
        return True

    def _note_part(self, indices: Sequence[int], engine: _native.BucketEngine) -> None:
        """Some parameters have no gradient, and what came does not say which."""
        engine.expect_alive()
        if self.running.config.needs_every_bucket:
            self._fail(f"some parameters of {self.module.name!r} have no gradient, {_NEEDS_ALL}")
        self.passed += 1
        engine.note_passed(indices)

    def _warn_of_parts(self) -> None:
        """After the first of the backend's own collectives: all ranks are in it, and none may wait
        for one that the warning has stopped.
        """
        if self.running.engine is not None and self.passed == 1:
            warn_or_end(
                self.running,
                f"some parameters of {self.module.name!r} have no gradient: in such passes its "
                "gradients are sent uncompressed. model.set_reduce_scatter_unused_params(True) "
                "reduces zeros for them, where this torch has it",
            )


def synced_passes(hooks: Sequence[ModuleHook]) -> int:
    """In which the hooks of a model were called."""
    return max(hook.count for hook in hooks)


class ReplicaHook(GradientHook):
    """Averages over replicas, where FSDP2 calls their group."""

    def set(self) -> None:
        self._group = ReplicaGroup(self)
        self.module.all_reduce_group = self._group

    def is_set(self) -> bool:
        return self.module.all_reduce_group is self._group

    def __call__(self, gradient: torch.Tensor, op: object) -> None:
        """Replaces this rank's shards by their reduction.

        Args:
            gradient: what the reduce-scatter gave; of complex numbers, their parts.
            op: SUM or AVG.
        """
        if self.module.shards[0].dtype.is_complex:
            gradient = torch.view_as_complex(gradient)
        if not self._average(gradient):
            dist.all_reduce(gradient, op=op, group=self.running.group)
            self._warn_of_parts()
        elif op == dist.ReduceOp.SUM:
            gradient.mul_(self.running.world_size)


class ReplicaGroup(dist.ProcessGroup):
    """What FSDP2 calls in place of the group of one module's replicas: it only reduces gradients.

    Attributes:
        wrapped: that group.
    """

    def __init__(self, hook: ReplicaHook) -> None:
        super().__init__(hook.running.rank, hook.running.world_size)
        self.wrapped = hook.running.group
        self._hook = hook

    # torch.distributed finds the wrapped group wherever it looks this one up, as for the log of an
    # exception.
    def __eq__(self, other: object) -> bool:
        return other is self or other is self.wrapped

    def __hash__(self) -> int:
        return hash(self.wrapped)

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions
    ) -> dist.Work:
        (gradient,) = tensors
        self._hook(gradient, opts.reduceOp)
        return _Done()


class _Done(dist.Work):
    """The handle of a collective that is over."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class ReduceScatterHook(InOwnMemory, GradientHook):
    """Reduces the gradients of all shards. What ``set_custom_reduce_scatter`` takes.

    Attributes:
        settle: called first.
    """

    settle: Callable[[], None] = staticmethod(lambda: None)

    def set(self) -> None:
        self.module.reduce_scatter = self
        self._group_name = self.module.reduce_scatter_group

    def is_set(self) -> bool:
        return self.module.reduce_scatter is self

    @staticmethod
    def num_parts(world_size: int) -> int:
        return world_size

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gives this rank the reduction of its shards.

        Args:
            output_tensor: flat; receives them.
            input_tensor: flat; the shards of every rank. Its content is not kept.
            group: of the ranks.
            op: SUM or AVG.
            async_op: not with a codec, since FSDP2 never asks for it.
        """
        self.settle()
        if self.running.engine is not None and group.group_name != self._group_name:
            self._fail(
                f"{self.module.name!r} is reduced in process group {group.group_name!r}, and at "
                f"attach in {self._group_name!r}; attach after the last change to its groups"
            )
        averages = op == dist.ReduceOp.AVG
        if self.running.engine is not None and (
            async_op or not (averages or op == dist.ReduceOp.SUM)
        ):
            is_named = isinstance(op, dist.ReduceOp.RedOpType)
            named = str(op) if is_named else "a sum that the backend multiplies by a factor"
            self._fail(
                f"{self.module.name!r} is to be reduced by {named}, async_op={async_op}; with a "
                "codec only sums and averages are: call set_force_sum_reduction_for_comms(True) "
                "beside set_gradient_divide_factor()"
            )
        if not self._average(input_tensor):
            work = dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
            self._warn_of_parts()
            return work
        size, rank = output_tensor.numel(), self.running.rank
        output_tensor.copy_(input_tensor[rank * size : (rank + 1) * size])
        if not averages:
            output_tensor.mul_(self.running.world_size)
        return None
