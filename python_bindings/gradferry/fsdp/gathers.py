"""What FSDP2 calls to gather the parameters of a module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from gradferry import _native
from gradferry.averaging.running import Running
from gradferry.core.agreement import rendezvous_place
from gradferry.core.rendezvous import meet, timeout_of
from gradferry.errors import GradferryError, PeerError
from gradferry.fsdp.hooks import InOwnMemory, ModuleHook, ReduceScatterHook

Result = TypeVar("Result")


class Gathers:
    """The passes of a model in which its parameters are gathered.

    On a host the result of a gather is used before the commits of all ranks have come, so that
    these travel meanwhile: an error that only another rank has seen is raised by the next gather,
    or by `settle`, before a reduce-scatter and at the end of a pass.

    Attributes:
        exact: whether FSDP2 itself gathers, for now.
        others: exchanges that end with this one.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self.exact = False
        self.others: Sequence[Running] = ()

    def settle(self) -> None:
        """Waits until all ranks have said that what they gathered, and used, is right.

        Raises:
            GradferryError: it is not, the same on all ranks.
        """
        running = self._running
        if running.engine is not None and running.transport.on_host:
            self.end_others_after(running.engine.settle)

    def expect_no_fault(self) -> None:
        """Does the same on a device, too, for which the host waits."""
        if self._running.engine is not None:
            self.end_others_after(self._running.engine.settle)

    def end_others_after(self, act: Callable[[], Result]) -> Result:
        """Acts. An error ends the other exchanges, too, for whose messages ranks may wait."""
        try:
            return act()
        except GradferryError as error:
            for running in self.others:
                if running.engine is not None:
                    running.engine.fail(str(error).splitlines()[0])
            raise

    def meet(self) -> None:
        """Waits until all ranks gather exactly, or raises PeerError on all: others may be in a
        pass, and wait for this one's messages.
        """
        running = self._running
        group = running.group
        place = rendezvous_place(group, running.transport.device)
        try:
            # Before those that wait for a message of this rank give up.
            meet(group, 0.9 * timeout_of(group, place), "enter exact_gathers()")
        except PeerError as error:
            text = f"{str(error).partition(';')[0]}; enter it on all ranks, or on none"
            if running.engine is not None:
                running.engine.fail(text)
            raise PeerError(text) from None

    def watch(self, model: nn.Module) -> None:
        """Settles at the end of every forward pass from now on."""
        model.register_forward_hook(lambda *_: self.settle())


@dataclass(eq=False)
class GatherHook(InOwnMemory, ModuleHook):
    """Gathers the parameters of all ranks. What ``set_custom_all_gather`` takes.

    Every rank decodes the messages of all ranks, its own included, so that all compute with the
    same parameters. FSDP2 hands over a copy of this rank's: the parameters themselves do not
    change.

    Attributes:
        gathers: of the model.
        first: number of the module's first parameter, as the engine counts.
    """

    gathers: Gathers
    first: int

    def __post_init__(self) -> None:
        size = len(self.module.gathered) * self.running.world_size
        self._indices = list(range(self.first, self.first + size))
        self._own_elements = sum(shard.size.numel() for shard in self.module.gathered)
        self._kept: object = None  # of which parameters is what was gathered last, if it is kept

    def set(self) -> None:
        self._default = self.module.replace_all_gather(self)
        reduces = isinstance(self.module.reduce_scatter, ReduceScatterHook)
        if self.running.transport.on_host and not reduces:
            self.module.wrap_reduce_scatter(lambda comm: Settled(comm, self.gathers))

    def is_set(self) -> bool:
        return self.module.all_gather is self

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers into `output_tensor`.

        Args:
            output_tensor: flat; the shards of every rank.
            input_tensor: flat; this rank's, in its place of `output_tensor`.
            group: of the ranks.
            async_op: whether the caller may go on at once.

        Returns:
            What FSDP2 waits for before it uses the parameters; None: the current stream does.
        """
        self.count += 1
        engine = self.running.engine
        if engine is None or self.gathers.exact or self.module.gathers_again:
            if not self.module.gathers_again:
                self._kept = None
            self.passed += 1
            self.gathers.settle()  # a rank that has found an error does not come to this
            work: dist.Work | None = self._default(
                output_tensor=output_tensor,
                input_tensor=input_tensor,
                group=group,
                async_op=async_op,
            )
            return work
        self.gathers.end_others_after(lambda: self._expect_unchanged(input_tensor, group))
        keeps, backward = self.running.config.keep_gathered, _in_backward()
        content = self._content(input_tensor) if keeps else None
        if backward and keeps and self._kept == content:
            answer = functools.partial(engine.decode_kept, self._indices, output_tensor)
            if self.gathers.end_others_after(answer):
                return None
        self._kept = content
        return self._gather(output_tensor, input_tensor, backward=backward)

    def _content(self, input_tensor: torch.Tensor) -> object:
        """What parameters must still be where kept messages answer: somebody else may have changed
        them since, such as an evaluation of averaged weights between a forward and its backward
        pass. On a device, whose host must not wait, what torch notes of it.
        """
        if self.running.transport.on_host:
            return _native.parameter_hashes([input_tensor])
        return self.module.fingerprint()

    def _gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *, backward: bool
    ) -> dist.Work | None:
        own = output_tensor.view(self.running.world_size, -1)[self.running.rank]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        if backward:
            Variable._execution_engine.queue_callback(self.gathers.settle)  # at the end
        assert self.calls is not None
        pending = self.calls.start([(self._indices, output_tensor)], in_background=False)
        if self.running.transport.on_host:
            return _Gathering(pending, self.gathers)
        self.gathers.end_others_after(pending.wait)
        return None

    def _expect_unchanged(self, given: torch.Tensor, group: dist.ProcessGroup) -> None:
        running, name = self.running, self.module.name
        if group.group_name != running.group_name:
            self._fail(
                f"{name!r} is gathered in process group {group.group_name!r}, and was sharded over "
                f"{running.group_name!r} at attach; attach after the last fully_shard"
            )
        expected = running.parameters[self._indices[0]].dtype
        if given.dtype != expected:
            self._fail(
                f"the parameters of {name!r} are gathered in {given.dtype}, and at attach it was "
                f"to be {expected}; attach after the last change to the mixed precision policy and "
                "to dtypes of parameters"
            )
        if given.numel() != self._own_elements:
            self._fail(
                f"{name!r} gathers {given.numel()} elements of this rank, and had "
                f"{self._own_elements} at attach; attach after the last change to the model"
            )


def _in_backward() -> bool:
    """Not by FSDP2's state: after an exception that is of the pass that has ended, and in forward
    passes that checkpointing repeats it is that of a forward pass.
    """
    return torch._C._current_graph_task_id() != -1


class _Gathering(dist.Work):
    """What FSDP2 waits for, so that a gather that it begins early travels meanwhile."""

    def __init__(self, pending: _native.PendingAllReduce, gathers: Gathers) -> None:
        super().__init__()
        self._pending = pending
        self._gathers = gathers

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._gathers.end_others_after(self._pending.wait)
        return True

    def is_completed(self) -> bool:
        return self._pending.is_completed()


class Settled:
    """FSDP2's reduce-scatter, or the user's, which a rank that has found an error does not come to:
    the others must hear of it before they wait there.
    """

    def __init__(self, comm: Any, gathers: Gathers) -> None:
        self._comm = comm
        self._gathers = gathers

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for what is reduced."""
        made: torch.Tensor = self._comm.allocate(size, dtype=dtype, device=device)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        """Reduces."""
        self._gathers.settle()
        work: dist.Work | None = self._comm(*args, **kwargs)
        return work
