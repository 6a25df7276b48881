"""Calls that average named tensors: checks, buckets, and what comes back."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist

from gradferry import _native
from gradferry.averaging.packing import Bucket, Packed, Packing, is_dense
from gradferry.averaging.running import Running
from gradferry.errors import GradferryError, StateError

Tensors = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


class _Pending(Protocol):
    def wait(self) -> None: ...
    def is_completed(self) -> bool: ...


class Work:
    """One call of `Reducer.all_reduce` on its way. Wait for it before the next one.

    Until `wait` has returned do not read or write the tensors.
    """

    def __init__(self, pending: _Pending, packed: Packed, end: Callable[[str], None]) -> None:
        self._call: tuple[_Pending, Packed] | None = (pending, packed)  # None: settled
        self._unpacked = packed.unpacked
        self._end = weakref.WeakMethod(end)  # of what holds the last call
        # Not the exception itself, whose traceback would keep the engine alive.
        self._error: tuple[type[GradferryError], str] | None = None
        self._lock = threading.Lock()

    def wait(self) -> bool:
        """Returns when the tensors hold the average; on a device, when the current stream waits
        for that.

        Returns:
            True.

        Raises:
            PeerError, ProtocolError, StateError, DivergedError: as `Reducer.all_reduce`. The
                contents of the tensors are then unspecified. Every further call raises it, too.
        """
        with self._lock:
            if self._call is not None:
                self._settle(*self._call)
            elif self._unpacked is not None:
                self._unpacked.wait()  # for the current stream, which may be another one
            if self._error is not None:
                kind, text = self._error
                raise kind(text)
        return True

    def _settle(self, pending: _Pending, packed: Packed) -> None:
        try:
            pending.wait()  # an interrupt leaves it as it is: wait() can be called again
            packed.unpack()
        except GradferryError as error:
            self._error = type(error), str(error)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._error = StateError, text
            if end := self._end():
                end(text)
        self._call = None

    def is_completed(self) -> bool:
        """Whether `wait` returns, or raises, without waiting for another rank."""
        call = self._call
        return call is None or call[0].is_completed()

    @property
    def _is_settled(self) -> bool:
        return self._call is None

    def _refuse(self, text: str) -> None:
        """Settles a call for which nobody has waited in time; one that is settled stays so."""
        if self._call is not None:
            self._error, self._call = (StateError, text), None

    def __del__(self) -> None:
        if getattr(self, "_call", None) is not None:
            warnings.warn(  # noqa: TID251  garbage collection runs under any frame
                "nobody has waited for an all_reduce(async_op=True): its tensors do not hold the "
                "average; call work.wait()",
                ResourceWarning,
                stacklevel=2,
            )


class _PassedThrough:
    """The backend's own all-reduce, as the hook of DDP posts it."""

    def __init__(self, buckets: Iterable[Bucket], group: dist.ProcessGroup) -> None:
        self._works = []
        for _, flat in buckets:
            flat.div_(group.size())
            real = torch.view_as_real(flat) if flat.is_complex() else flat
            self._works.append(group.allreduce(real))

    def wait(self) -> None:
        errors = []
        for work in self._works:  # all: nobody may write to tensors of a call that has returned
            try:
                work.wait()
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class TensorCalls:
    """The calls of one `Reducer`, one after the other.

    Attributes:
        count: of calls; each is a step.
        buckets_passed: how many took the backend's own all-reduce.

    Args:
        running: with its engine started.
        named: names and tensors, as registered.
        bucket_cap_bytes: as for `Packing`.
    """

    def __init__(
        self,
        running: Running,
        named: Sequence[tuple[str, torch.Tensor]],
        bucket_cap_bytes: int,
    ) -> None:
        self._running = running
        self._names = {name: index for index, (name, _) in enumerate(named)}
        self._tensors = [tensor for _, tensor in named]
        self._dtypes = [tensor.dtype for tensor in self._tensors]
        self._packing = Packing(
            running.parameters, self._dtypes, running.transport.device, bucket_cap_bytes
        )
        engine = running.engine
        self._engine_calls = None if engine is None else _native.AllReducer(engine=engine)
        self._work: Work | None = None  # of the last call
        self._ended: str | None = None  # why
        self._busy = threading.Lock()  # held by the thread that is in all_reduce()
        self.count = 0
        self.buckets_passed = 0

    @property
    def packing_bytes(self) -> int:
        """See `Packing.num_bytes`."""
        return self._packing.num_bytes

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in the order of registration."""
        return list(self._names)

    def all_reduce(self, tensors: Tensors | None, async_op: bool) -> Work | None:
        """See `Reducer.all_reduce`."""
        engine = self._running.engine
        if engine is not None:
            engine.expect_alive()  # the first error is the one to look at
        elif self._ended is not None:
            raise StateError(f"an earlier call failed: {self._ended}")
        if not self._busy.acquire(blocking=False):
            self.fail("another thread is in all_reduce(): call it from one thread at a time")
        try:
            if self._work is not None and not self._work._is_settled:
                self._work._refuse(_NOT_WAITED_FOR)
                self.fail(_NOT_WAITED_FOR)
            if async_op:
                self._expect_async()
            self._work = self._post(self._checked(tensors), async_op)
            self.count += 1
            if async_op:
                return self._work
            self._work.wait()
            return None
        except GradferryError:
            raise
        except BaseException as error:
            # Buckets may be on their way: the next call would meet them.
            if self._work is not None:
                self._work._refuse("this call was interrupted")
            text = f"{type(error).__name__}: {error}"
            self._end(text)
            if not isinstance(error, Exception):
                raise
            raise StateError(text) from error
        finally:
            self._busy.release()

    def _expect_async(self) -> None:
        """Options with which a thread in the background would read what the caller changes."""
        config = self._running.config
        if config.check_every:
            self.fail(
                "check_every= compares parameters, which may change during "
                "all_reduce(async_op=True): call it without async_op, or leave check_every out"
            )
        if config.grad_scaler is not None:
            self.fail(
                "grad_scaler= has a scale that may change during all_reduce(async_op=True): call "
                "it without async_op, or unscale first and leave grad_scaler out"
            )

    def _post(self, tensors: Sequence[torch.Tensor], async_op: bool) -> Work:
        try:
            group = self._running.group
        except StateError as error:
            self.fail(f"{error}; make a Reducer over a new one")
        packed = self._packing.pack(tensors)
        engine = self._running.engine
        if engine is None or self._engine_calls is None:
            self.buckets_passed += len(packed.buckets)
            return Work(_PassedThrough(packed.buckets, group), packed, self._end)
        # On a device, handing over is no more than enqueueing behind the current stream.
        in_background = async_op and self._running.transport.on_host
        pending = self._engine_calls.start(packed.buckets, in_background=in_background)
        return Work(pending, packed, self._end)

    def _checked(self, tensors: Tensors | None) -> list[torch.Tensor]:
        """The tensors to average, in the order of registration."""
        try:
            mine = self._in_order(tensors)
            for name, index in self._names.items():
                self._check(name, mine[index], index)
            check_memory(list(self._names), mine)
        except StateError as error:
            self.fail(str(error))
        return mine

    def _in_order(self, tensors: Tensors | None) -> list[torch.Tensor]:
        if tensors is None:
            return self._tensors
        if isinstance(tensors, Mapping):
            unknown = [name for name in tensors if name not in self._names]
            missing = [name for name in self._names if name not in tensors]
            if unknown or missing:
                raise StateError(
                    f"the tensors have {unknown[0]!r}, which was not registered"
                    if unknown
                    else f"the tensors lack {missing[0]!r}: every call averages all registered "
                    "ones; pass zeros, or make a Reducer for each part"
                )
            return [tensors[name] for name in self._names]
        if isinstance(tensors, torch.Tensor):
            raise StateError("a single tensor was passed; pass a list, or a mapping by name")
        if isinstance(tensors, Set):
            raise StateError("a set has no order that all ranks share; pass a list, or a mapping")
        mine = list(tensors)
        if len(mine) != len(self._names):
            raise StateError(
                f"{len(mine)} tensors were passed and {len(self._names)} registered: every call "
                "averages all of them; pass zeros, or make a Reducer for each part"
            )
        return mine

    def _check(self, name: str, tensor: torch.Tensor, index: int) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise StateError(
                f"{name!r} is {short(tensor)}, not a tensor; where a parameter has no gradient "
                "pass zeros, on this rank alone or on all"
            )
        expect_plain(name, tensor)
        shape, place = self._running.parameters[index].shape, self._running.transport.device
        expected = (shape, self._dtypes[index], place, torch.strided)
        found = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout)
        for what, now, then in zip(_FIELDS, found, expected, strict=True):
            if now != then:
                raise StateError(
                    f"{name!r} has {what} {now}, and {then} was registered: make a new Reducer "
                    "where tensors change"
                )
        if tensor.requires_grad:
            raise StateError(
                f"{name!r} requires grad: a codec would round a parameter itself; pass its "
                "gradient, [parameter.grad for parameter in ...], or parameter.detach() if its "
                "average is what you want"
            )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise StateError(
                f"{name!r} was made in inference mode and cannot be changed outside; pass its "
                "clone()"
            )

    def fail(self, message: str) -> NoReturn:
        """Ends the calls of all ranks, which may be waiting for this one."""
        self._end(message)
        raise StateError(message)

    def _end(self, message: str) -> None:
        """Without an engine the others wait for as long as the process group does."""
        self._ended = message
        engine = self._running.engine
        if engine is not None:
            engine.fail(f"rank {self._running.world_rank}: {message}")

    def expect_waited_for(self, what: str) -> None:
        """Raises StateError if the last call is on its way; `what` cannot be done then."""
        if self._work is not None and not self._work._is_settled:
            raise StateError(
                f"cannot {what}: the last all_reduce(async_op=True) was not waited for; call its "
                "work.wait() first"
            )

    def keep_no_tensors(self) -> None:
        """Lets the registered tensors go: from now on every call passes its own."""
        self._tensors = []


_NOT_WAITED_FOR = (
    "the last all_reduce(async_op=True) was not waited for: call its work.wait() before the next "
    "one"
)
_FIELDS = ("shape", "dtype", "device", "layout")


def expect_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises StateError for a tensor that is spread over ranks, such as a parameter under FSDP2."""
    if hasattr(tensor, "to_local"):
        raise StateError(
            f"{name!r} is a {type(tensor).__name__}, whose parts are on several ranks; pass this "
            "rank's, tensor.to_local(), over the group of ranks that hold the same part"
        )


def check_memory(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Raises StateError if an average could be written to one place twice."""
    first: dict[int, str] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if _may_overlap_itself(tensor):
            raise StateError(
                f"elements of {name!r} share memory (expand() and unfold() do so); pass a clone()"
            )
        if first.setdefault(id(tensor), name) != name:
            raise StateError(_shared(first[id(tensor)], name))
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), index)
        for index, tensor in enumerate(tensors)
        if tensor.numel()
    )
    # Those that are not dense may lie between each other, but not in a dense one.
    last = last_dense = (0, -1)  # end and index of what reaches farthest so far
    for begin, end, index in spans:
        dense = is_dense(tensors[index])
        reaches, other = last if dense else last_dense
        if begin < reaches:
            raise StateError(_shared(*(names[each] for each in sorted((index, other)))))
        last = max(last, (end, index))
        if dense:
            last_dense = max(last_dense, (end, index))


def _shared(first: str, second: str) -> str:
    return (
        f"{first!r} and {second!r} share memory, which would be averaged twice; register what is "
        "shared once"
    )


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in sides)) * tensor.element_size()


def _may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether a step in some dimension may end where smaller steps lead, too."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return bool(tensor.numel())
        reach += max(size - 1, 0) * stride
    return False


def short(value: object) -> str:
    """A value for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
