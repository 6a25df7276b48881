"""What FSDP2 calls in place of its own collectives, module by module: hooks that average gradients
over replicas, reduce-scatter them, or gather parameters. Each hands them to its exchange's engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import Variable

from gradferry import _native
from gradferry.averaging.running import Running
from gradferry.core.agreement import rendezvous_place
from gradferry.core.rendezvous import meet, timeout_of
from gradferry.core.warn import warn_or_log
from gradferry.errors import GradferryError, PeerError, StateError
from gradferry.fsdp.model import ShardedModule

Result = TypeVar("Result")

_NEEDS_ALL = (
    "and momentum= needs that of every parameter in every pass; make all take part, or leave it out"
)


# --- exchanges ------------------------------------------------------------------------------------


class Exchange:
    """One exchange of a model. FSDP2 has its hooks, which refer to it.

    Attributes:
        name: as users know it.
        what: it is in FSDP2.
        hook: the class of its hooks.
        slot: where a `ShardedModule` has one.
        rules_option: the option that gives its rules.
        averages: whether it is of gradients.
        running: the configuration, with its engine started.
        modules: of the model, all.
        calls: of the engine; None without one.
        counts: of calls, by module.
        passed: buckets that took the backend's own collective.
        part: which of the model this rank's group of ranks has, as the key of its saved state;
            None: it has none.
    """

    name: ClassVar[str]
    what: ClassVar[str]
    hook: ClassVar[type[ModuleHook]]
    slot: ClassVar[str]
    rules_option: ClassVar[str] = "rules"
    averages: ClassVar[bool] = True

    def __init__(
        self, running: Running, modules: Sequence[ShardedModule], part: str | None = None
    ) -> None:
        self.running, self.modules, self.part = running, modules, part
        self.calls = None if running.engine is None else _native.Exchanger(engine=running.engine)
        self.counts, self.passed = [0] * len(modules), 0

    def set_hooks(self) -> None:
        """Makes FSDP2 call this exchange."""
        for number, module in enumerate(self.modules):
            self.hook(self, module, number).set()

    def expect_set(self) -> None:
        """Raises StateError if FSDP2 calls something else."""
        for module in self.modules:
            if getattr(getattr(module, self.slot), "exchange", None) is not self:
                raise StateError(
                    f"{module.name!r} was given another {self.what} after attach; FSDP2 takes one, "
                    "so leave it out"
                )

    def passes(self) -> int:
        """In which hooks were called."""
        return max(self.counts)

    def fail(self, message: str) -> NoReturn:
        """Ends the hooks of all ranks, which may wait for this one."""
        end_all([self.running], f"rank {self.running.world_rank}: {message}")
        raise StateError(message)


def end_all(runnings: Iterable[Running], error: str) -> None:
    """Ends engines, for whose messages other ranks may wait, by the first line of an error."""
    for running in runnings:
        if running.engine is not None:
            running.engine.fail(error.splitlines()[0])


class Gradients(Exchange):
    """An exchange of gradients; it notes which modules had some in a backward pass."""

    _called: frozenset[int] = frozenset()  # in the pass that has not ended

    @property
    def num_parts(self) -> int:
        """The number of parts of every parameter in what FSDP2 hands over."""
        return 1

    def indices(self, number: int) -> list[int]:
        """A module's parameters as the engine numbers them, in the order of FSDP2's tensor."""
        first = self.num_parts * sum(len(module.shards) for module in self.modules[:number])
        order = self.modules[number].order()
        parts = range(self.num_parts)
        return [first + part * len(order) + each for part in parts for each in order]

    def note(self, number: int, engine: _native.BucketEngine) -> None:
        """A module's gradients have come."""
        if number in self._called:
            self._end_pass()
        if not self._called and self.running.config.check_every:
            shards = [shard for module in self.modules for shard in module.shards]
            engine.compare([shard.values() for shard in shards])
        self._called |= {number}

    def end_pass(self) -> None:
        """Ends the pass before, if there was one, and none is going on. FSDP2 does not tell when a
        pass has ended, in which a model that is not sharded as a whole calls back several times.
        """
        if self._called and all(module.gathers_for == "IDLE" for module in self.modules):
            self._end_pass()

    def _end_pass(self) -> None:
        called, self._called = self._called, frozenset()
        engine = self.running.engine
        if engine is None:
            return
        for number, module in enumerate(self.modules):
            if module.shards and number not in called:
                if self.running.config.momentum:
                    self.fail(f"{module.name!r} has no gradient, {_NEEDS_ALL}")
                engine.note_passed(self.indices(number))


# --- hooks ----------------------------------------------------------------------------------------


class ModuleHook:
    """Hands what FSDP2 exchanges of one module to the engine of all modules.

    Attributes:
        exchange: of the model.
        module: of which it is.
        number: of that module.
    """

    def __init__(self, exchange: Exchange, module: ShardedModule, number: int) -> None:
        self.exchange, self.module, self.number = exchange, module, number

    @property
    def running(self) -> Running:
        """The configuration and the engine of the exchange."""
        return self.exchange.running

    def set(self) -> None:
        """Makes FSDP2 call this hook."""
        setattr(self.module, self.exchange.slot, self)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for what is exchanged, for which FSDP2 asks a custom collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def start(self, indices: Sequence[int], tensor: torch.Tensor) -> _native.PendingExchange:
        """Hands a bucket to the engine, which there is."""
        assert self.exchange.calls is not None
        return self.exchange.calls.start([(indices, tensor)], in_background=False)


class GradientHook(ModuleHook):
    """Averages the gradients of one module."""

    exchange: Gradients
    _has_warned = False

    def _average(self, gradient: torch.Tensor) -> bool:
        """Averages the gradients in place, on the current stream.

        Args:
            gradient: flat: part by part, the padded shards of all parameters that have a gradient.

        Returns:
            False: it did not, and all ranks must do so by the backend's own collective.

        Raises:
            GradferryError: as `gradferry.fsdp.attach` says; it has ended the hooks of all ranks.
        """
        exchange, engine = self.exchange, self.running.engine
        exchange.counts[self.number] += 1
        if change := self.module.change():
            exchange.fail(
                f"{change} in {self.module.name!r} since attach; attach after the last change to "
                "the model, before the first backward pass"
            )
        if engine is None:
            exchange.passed += 1
            return False
        exchange.note(self.number, engine)
        indices = exchange.indices(self.number)
        expected = self.module.shards[0].dtype
        if gradient.dtype != expected:
            exchange.fail(
                f"the gradients of {self.module.name!r} are reduced in {gradient.dtype}, and at "
                f"attach it was to be {expected}; attach after the last change to the mixed "
                "precision policy, to dtypes of parameters and to their grad_dtype"
            )
        if gradient.numel() != exchange.num_parts * self.module.num_elements:
            # Some parameters have no gradient, and what came does not say which.
            engine.expect_alive()
            if self.running.config.momentum:
                exchange.fail(
                    f"some parameters of {self.module.name!r} have no gradient, {_NEEDS_ALL}"
                )
            exchange.passed += 1
            engine.note_passed(indices)
            if not self._has_warned:
                self._has_warned = True
                # It never raises: the other ranks are going to wait for this one.
                warn_or_log(
                    f"some parameters of {self.module.name!r} have no gradient: in such passes its "
                    "gradients are sent uncompressed. model.set_reduce_scatter_unused_params(True) "
                    "reduces zeros for them, where this torch has it"
                )
            return False
        real = torch.view_as_real(gradient).view(-1) if gradient.is_complex() else gradient
        self.start(indices, real).wait()
        return True


class ReplicaHook(GradientHook, dist.ProcessGroup):
    """Averages over replicas. What FSDP2 calls in place of the group of one module's replicas, with
    which it only reduces gradients.

    Attributes:
        wrapped: that group.
    """

    def __init__(self, exchange: Gradients, module: ShardedModule, number: int) -> None:
        GradientHook.__init__(self, exchange, module, number)
        dist.ProcessGroup.__init__(self, self.running.rank, self.running.world_size)
        self.wrapped = self.running.group

    # torch.distributed finds the wrapped group wherever it looks this one up, as for the log of an
    # exception.
    def __eq__(self, other: object) -> bool:
        return other is self or other is self.wrapped

    def __hash__(self) -> int:
        return hash(self.wrapped)

    def __call__(self, gradient: torch.Tensor, op: object) -> None:
        """Replaces this rank's shards by their reduction.

        Args:
            gradient: what the reduce-scatter gave; of complex numbers, their parts.
            op: SUM or AVG.
        """
        if self.module.shards[0].dtype.is_complex:
            gradient = torch.view_as_complex(gradient)
        if not self._average(gradient):
            dist.all_reduce(gradient, op=op, group=self.wrapped)
        elif op == dist.ReduceOp.SUM:
            gradient.mul_(self.running.world_size)

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions
    ) -> dist.Work:
        (gradient,) = tensors
        self(gradient, opts.reduceOp)
        return _Done()


class _Done(dist.Work):
    """The handle of a collective that is over."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class ReduceScatterHook(GradientHook):
    """Reduces the gradients of all shards. What ``set_custom_reduce_scatter`` takes."""

    exchange: ReduceScatter

    def set(self) -> None:
        super().set()
        self._group_name = self.module.reduce_scatter_group

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
        averages = op == dist.ReduceOp.AVG
        if self.running.engine is not None:
            self._expect_usable(group, op, async_op)
        if not self._average(input_tensor):
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        size, rank = output_tensor.numel(), self.running.rank
        output_tensor.copy_(input_tensor[rank * size : (rank + 1) * size])
        if not averages:
            output_tensor.mul_(self.running.world_size)
        return None

    def _expect_usable(self, group: dist.ProcessGroup, op: object, async_op: bool) -> None:
        if group.group_name != self._group_name:
            self.exchange.fail(
                f"{self.module.name!r} is reduced in process group {group.group_name!r}, and at "
                f"attach in {self._group_name!r}; attach after the last change to its groups"
            )
        if async_op or op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            is_named = isinstance(op, dist.ReduceOp.RedOpType)
            named = str(op) if is_named else "a sum that the backend multiplies by a factor"
            self.exchange.fail(
                f"{self.module.name!r} is to be reduced by {named}, async_op={async_op}; with a "
                "codec only sums and averages are: call set_force_sum_reduction_for_comms(True) "
                "beside set_gradient_divide_factor()"
            )


class GatherHook(ModuleHook):
    """Gathers the parameters of all ranks. What ``set_custom_all_gather`` takes.

    Every rank decodes the messages of all ranks, its own included, so that all compute with the
    same parameters. FSDP2 hands over a copy of this rank's: the parameters themselves do not
    change.
    """

    exchange: AllGather

    def __init__(self, exchange: AllGather, module: ShardedModule, number: int) -> None:
        super().__init__(exchange, module, number)
        size, gathered = self.running.world_size, [m.gathered for m in self.exchange.modules]
        first = size * sum(map(len, gathered[: self.number]))
        self._indices = range(first, first + size * len(gathered[self.number]))
        self._kept: object = None  # of which parameters is what was gathered last, if it is kept

    def set(self) -> None:
        module, reduces = self.module, self.module.reduce_scatter
        self._default = module.all_gather
        super().set()
        if self.running.transport.on_host:
            module.reduce_scatter = Settled(reduces, self.exchange)

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
        exchange, engine = self.exchange, self.running.engine
        exchange.counts[self.number] += 1
        if engine is None or exchange.exact or self.module.gathers_again:
            if not self.module.gathers_again:
                self._kept = None
            exchange.passed += 1
            exchange.settle()  # a rank that has found an error does not come to this
            work: dist.Work | None = self._default(
                output_tensor=output_tensor,
                input_tensor=input_tensor,
                group=group,
                async_op=async_op,
            )
            return work
        exchange.end_others_after(lambda: self._expect_unchanged(input_tensor, group))
        keeps, backward = self.running.config.keep_gathered, _in_backward()
        content = self._content(input_tensor) if keeps else None
        if backward and keeps and self._kept == content:
            answer = functools.partial(engine.decode_kept, self._indices, output_tensor)
            if exchange.end_others_after(answer):
                return None
        self._kept = content
        own = output_tensor.view(self.running.world_size, -1)[self.running.rank]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        if backward:
            Variable._execution_engine.queue_callback(exchange.settle)  # at the end
        pending = self.start(self._indices, output_tensor)
        if self.running.transport.on_host:
            return _Gathering(pending, exchange)
        exchange.end_others_after(pending.wait)
        return None

    def _content(self, input_tensor: torch.Tensor) -> object:
        """What parameters must still be where kept messages answer: somebody else may have changed
        them since, such as an evaluation of averaged weights between a forward and its backward
        pass. On a device, whose host must not wait, what torch notes of it.
        """
        if self.running.transport.on_host:
            return _native.parameter_hashes([input_tensor])
        return self.module.fingerprint()

    def _expect_unchanged(self, given: torch.Tensor, group: dist.ProcessGroup) -> None:
        running, name = self.running, self.module.name
        if group.group_name != running.group_name:
            self.exchange.fail(
                f"{name!r} is gathered in process group {group.group_name!r}, and was sharded over "
                f"{running.group_name!r} at attach; attach after the last fully_shard"
            )
        expected = running.parameters[self._indices[0]].dtype
        if given.dtype != expected:
            self.exchange.fail(
                f"the parameters of {name!r} are gathered in {given.dtype}, and at attach it was "
                f"to be {expected}; attach after the last change to the mixed precision policy and "
                "to dtypes of parameters"
            )


def _in_backward() -> bool:
    """Not by FSDP2's state: after an exception that is of the pass that has ended, and in forward
    passes that checkpointing repeats it is that of a forward pass.
    """
    return torch._C._current_graph_task_id() != -1


class _Gathering(dist.Work):
    """What FSDP2 waits for, so that a gather that it begins early travels meanwhile."""

    def __init__(self, pending: _native.PendingExchange, exchange: AllGather) -> None:
        super().__init__()
        self._pending = pending
        self._exchange = exchange

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._exchange.end_others_after(self._pending.wait)
        return True

    def is_completed(self) -> bool:
        return self._pending.is_completed()


class Settled:
    """A reduce-scatter, which a rank that has found an error in a gather does not come to: the
    others must hear of it before they wait there.

    Attributes:
        exchange: of the reduce-scatter; None: it is not gradferry's.
    """

    def __init__(self, comm: Any, gathers: AllGather) -> None:
        self.exchange = getattr(comm, "exchange", None)
        self._comm, self._gathers = comm, gathers

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


# --- the exchanges of a model ---------------------------------------------------------------------


class Replicas(Gradients):
    """The average over ranks that hold the same shards."""

    name, what = "replicas", "group of replicas"
    hook, slot = ReplicaHook, "all_reduce_group"


class ReduceScatter(Gradients):
    """The reduce-scatter of gradients within a replica."""

    name, what = "reduce_scatter", "reduce-scatter"
    hook, slot = ReduceScatterHook, "reduce_scatter"

    @property
    def num_parts(self) -> int:
        return self.running.world_size


class AllGather(Exchange):
    """The all-gathers of parameters within a replica.

    On a host the result of a gather is used before the commits of all ranks have come, so that
    these travel meanwhile: an error that only another rank has seen is raised by the next gather,
    or by `settle`, before a reduce-scatter and at the end of a pass.

    Attributes:
        exact: whether FSDP2 itself gathers, for now.
        others: exchanges of the model, which end with this one.
    """

    name, what = "all_gather", "all-gather"
    hook, slot = GatherHook, "all_gather"
    rules_option, averages = "all_gather_rules", False
    exact = False
    others: Sequence[Running] = ()

    def settle(self, *, on_device: bool = False) -> None:
        """Waits until all ranks have said that what they gathered, and used, is right. On a device,
        where the host waits for that, only if asked.

        Raises:
            GradferryError: it is not, the same on all ranks.
        """
        engine = self.running.engine
        if engine is not None and (on_device or self.running.transport.on_host):
            self.end_others_after(engine.settle)

    def end_others_after(self, act: Callable[[], Result]) -> Result:
        """Acts. An error ends the other exchanges, too, for whose messages ranks may wait."""
        try:
            return act()
        except GradferryError as error:
            end_all(self.others, str(error))
            raise

    def meet(self, purpose: str, remedy: str) -> None:
        """Waits, outside of a pass, until all ranks call this. Raises PeerError on all if one does
        not.

        Args:
            purpose: what ranks that stay away did not do.
            remedy: what to do about it.
        """
        self.settle()
        group = self.running.group
        try:
            # Before those that wait for a message of this rank give up.
            place = rendezvous_place(group, self.running.transport.device)
            meet(group, 0.9 * timeout_of(group, place), purpose)
        except PeerError as error:
            text = f"{str(error).partition(';')[0]}; {remedy}"
            end_all([self.running], text)
            raise PeerError(text) from None
