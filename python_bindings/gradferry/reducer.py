"""`Reducer`: averages named tensors over ranks through a codec, without DDP."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy
from typing_extensions import Unpack

from gradferry import _native
from gradferry.averaging import saved_state
from gradferry.averaging.advice import warn_about_rules, watch_optimizer
from gradferry.averaging.description import describe
from gradferry.averaging.handle import Averaging
from gradferry.averaging.running import Running, propose
from gradferry.averaging.start import start, usable_group
from gradferry.averaging.step_numbers import Stats
from gradferry.core.config import CHUNK_BYTES, Config, make_config, mebibytes
from gradferry.core.device import CPU
from gradferry.core.options import Options, takes_options
from gradferry.core.parameters import ParameterLayout
from gradferry.core.values import shown
from gradferry.errors import ConfigError, GradferryError, StateError

__all__ = ["Reducer", "Work"]

BUCKET_CAP_MB = _native.BUCKET_CAP_MB
Tensors = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
Bucket = tuple[tuple[int, ...], torch.Tensor]  # indices of tensors; their elements, flat and real


@takes_options()
class Reducer(Averaging):
    """Averages named tensors over the ranks of a process group, through a codec. Collective.

    The engine of `gradferry.attach` without DistributedDataParallel: for a training loop or a
    method of your own, such as local SGD, which averages the change of parameters now and then.

    >>> reducer = gradferry.Reducer(model.named_parameters(), "q4")
    >>> loss.backward()
    >>> reducer.all_reduce([parameter.grad for parameter in model.parameters()])
    >>> optimizer.step()

    A step is a call of `all_reduce`. With ``momentum`` tensors receive the momentum of what is
    passed. ``check_every`` compares the registered tensors, which must be parameters: where others
    replace them, make a new Reducer.

    Args:
        named_tensors: pairs of a name and a tensor, or a mapping of them. They say what every call
            averages: names, shapes, dtypes, device, and the order of elements in memory, which must
            be equal on all ranks. Residuals are kept by name. A Reducer keeps the tensors.
        codec: as for `gradferry.attach`, but not ``"auto"``, which tries codecs in the steps of a
            training. By default parameters with at most one dimension or fewer than 1024 elements
            are sent as they are; so is a flat buffer, unless ``rules`` names a codec for it.
        group: of the ranks that average; the default group if None. torch.distributed need not know
            it (docs/guide/reducer.md). Keep it: a Reducer does not.
        bucket_cap_mb: in MiB. Tensors travel together in buckets of at most this size, into which
            they are copied, unless they lie in memory one behind the other, as views of one flat
            tensor do; a larger tensor travels alone. Averages do not depend on it.
        **options: see `gradferry.Options`.

    Raises:
        ConfigError: an argument or tensor cannot be used.
        RankMismatchError: ranks differ in options or tensors.
        PeerError: a rank did not come, or failed to set up its connections or memory.
        StateError: there is no process group.
    """

    _CHUNK_BYTES = CHUNK_BYTES
    _RECOVERY_HINT = (
        "This Reducer is finished, on all ranks. To go on, make a new one on every rank."
    )

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
        codec: str = "q4",
        group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        **options: Unpack[Options],
    ) -> None:
        members = usable_group(group)
        named: list[tuple[str, torch.Tensor]] = []
        problem: Exception | None = None
        try:  # what is wrong here must be said on all ranks
            named = _checked_names(named_tensors)
        except Exception as error:
            problem = error
        device = named[0][1].device if named else CPU

        def propose_here() -> Running:
            if problem is not None:
                raise problem
            config = replace(make_config(codec, options), chunk_bytes=self._CHUNK_BYTES)
            check_config(config, named)
            record = {"way in": "Reducer", "bucket_cap_mb": bucket_cap(bucket_cap_mb)}
            return propose(config, members, device, named, record, self._RECOVERY_HINT)

        self._started = running = start(
            members,
            _place_in(members, device),
            propose_here,
            lambda running: running,
            purpose="make a Reducer",
        )
        if running.config.momentum:  # of gradients, on whose average an optimizer steps
            watch_optimizer(running)
        self._names = {name: index for index, (name, _) in enumerate(named)}
        self._tensors = [tensor for _, tensor in named]
        self._dtypes = [tensor.dtype for tensor in self._tensors]
        cap, place = int(bucket_cap_mb * 2**20), running.transport.device
        self._packing = Packing(running.parameters, self._dtypes, place, cap)
        engine = running.engine
        self._engine_calls = None if engine is None else _native.Exchanger(engine=engine)
        self._work: Work | None = None  # of the last call
        self._ended: str | None = None  # why
        self._busy = threading.Lock()  # held by the thread that is in all_reduce()
        self._count = self._buckets_passed = 0
        warn_about_rules([(running, "rules")])

    def all_reduce(self, tensors: Tensors | None = None, async_op: bool = False) -> Work | None:
        """Replaces tensors by their average over all ranks. Collective.

        Every call averages all registered tensors, and is a step: the compression error of one call
        is added in the next, except where all ranks pass zeros.

        Args:
            tensors: a sequence in the order of registration, or a mapping by name, with the shapes,
                dtypes and device of the registered tensors; other strides are allowed. None: the
                registered tensors themselves. They must not require grad: pass gradients.
            async_op: if true, returns at once. The next call waits for this one. Not with
                ``check_every`` or ``grad_scaler``.

        Returns:
            None, or with `async_op` the `Work` to wait for.

        Raises:
            StateError: the tensors are not what was registered, another thread is in a call, or the
                process group was destroyed; or with ``nonfinite="raise"`` an average is not finite.
            PeerError, ProtocolError: another rank failed, or sent what it must not.
            DivergedError: registered parameters differ between ranks.

        Any error ends the Reducer on all ranks, which may be in this call already. The contents of
        the tensors are then unspecified.
        """
        engine = self._started.engine
        if engine is not None:
            engine.expect_alive()  # the first error is the one to look at
        elif self._ended is not None:
            raise StateError(f"an earlier call failed: {self._ended}")
        if not self._busy.acquire(blocking=False):
            text = "another thread is in all_reduce(): call it from one thread at a time"
            self._end(text)
            raise StateError(text)
        try:
            self._engine_at_rest()
            mine = self._in_order(tensors)
            self._check(mine, async_op)
            self._work = self._post(mine, async_op)
            self._count += 1
            if async_op:
                return self._work
            self._work.wait()
            return None
        except BaseException as error:
            # Buckets may be on their way: the next call would meet them.
            is_ours = isinstance(error, GradferryError)
            text = str(error) if is_ours else f"{type(error).__name__}: {error}"
            self._end(text)
            if is_ours or not isinstance(error, Exception):
                raise
            raise StateError(text) from error
        finally:
            self._busy.release()

    def _end(self, message: str) -> None:
        """Ends the calls of all ranks, which may be waiting for this one. Without an engine they
        wait for as long as the process group does.
        """
        self._ended = message
        engine = self._started.engine
        if engine is not None:
            engine.fail(f"rank {self._started.world_rank}: {message}")

    def _post(self, tensors: Sequence[torch.Tensor], async_op: bool) -> Work:
        try:
            group = self._started.group
        except StateError as error:
            raise StateError(f"{error}; make a Reducer over a new one") from None
        packed = self._packing.pack(tensors)
        engine = self._started.engine
        if engine is None or self._engine_calls is None:
            self._buckets_passed += len(packed.buckets)
            return Work(_PassedThrough(packed.buckets, group), packed)
        # On a device, handing over is no more than enqueueing behind the current stream.
        in_background = async_op and self._started.transport.on_host
        pending = self._engine_calls.start(packed.buckets, in_background=in_background)
        return Work(pending, packed)

    def _check(self, tensors: Sequence[torch.Tensor], async_op: bool) -> None:
        for name in ("check_every", "grad_scaler") if async_op else ():
            if getattr(self._started.config, name):
                raise StateError(
                    f"{name}= looks at what may change during all_reduce(async_op=True): call it "
                    f"without async_op, or leave {name} out"
                )
        for name, index in self._names.items():
            self._check_one(name, tensors[index], index)
        check_memory(self._names, tensors)

    def _in_order(self, tensors: Tensors | None) -> list[torch.Tensor]:
        if tensors is None:
            return self._tensors
        if isinstance(tensors, Mapping):
            if unknown := [name for name in tensors if name not in self._names]:
                raise StateError(f"the tensors have {unknown[0]!r}, which was not registered")
            if missing := [name for name in self._names if name not in tensors]:
                raise StateError(
                    f"the tensors lack {missing[0]!r}: every call averages all registered ones; "
                    "pass zeros, or make a Reducer for each part"
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

    def _check_one(self, name: str, tensor: torch.Tensor, index: int) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise StateError(
                f"{name!r} is {shown(tensor)}, not a tensor; where a parameter has no gradient "
                "pass zeros, on this rank alone or on all"
            )
        expect_plain(name, tensor)
        shape, place = self._started.parameters[index].shape, self._started.transport.device
        expected = (shape, self._dtypes[index], place, torch.strided)
        found = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout)
        for what, now, then in zip(
            ("shape", "dtype", "device", "layout"), found, expected, strict=True
        ):
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

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank must save to continue exactly where it stopped. Not collective.

        Returns:
            What `HookState.state_dict` returns.

        Raises:
            StateError: an error has ended the Reducer.
        """
        return saved_state.signed(self._saved())

    def _saved(self, kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The state for this process, as `saved_state.save` returns it."""
        self._engine_at_rest()
        return saved_state.save(self._started, self._count, kept)

    def load_state_dict(self, state_dict: Mapping[str, Any], on_resize: str = "strict") -> None:
        """Restores what `state_dict` returned, of a Reducer or of a hook. Call it on every rank.

        Args:
            state_dict: what this rank saved, or the states of all ranks, merged by
                `gradferry.checkpoint.merge`.
            on_resize: as for `HookState.load_state_dict`.

        Raises:
            ConfigError: another ``on_resize``.
            StateError: as for `HookState.load_state_dict`. Nothing was changed.
        """
        self._engine_at_rest()
        saved_state.expect_sound(state_dict, on_resize)
        self._resume(state_dict, on_resize)

    def _resume(self, state: Mapping[str, Any], on_resize: str = "strict") -> None:
        """Restores a state of this process, which nobody else has had."""
        with self._loading():
            self._count = saved_state.load(self._started, state, on_resize)

    @property
    def _running(self) -> Running:
        return self._started

    def _engine_at_rest(self) -> _native.BucketEngine | None:
        if self._work is not None:
            self._work.wait()
        return self._started.engine

    def _passed_buckets(self) -> int:
        return self._buckets_passed

    def _passed_steps(self) -> int:
        return self._count

    def stats(self) -> Stats:
        """The numbers of `HookState.stats`, and ``packing_bytes``: memory of buckets into which
        tensors are copied.
        """
        return {**super().stats(), "packing_bytes": self._packing.num_bytes}

    def __repr__(self) -> str:
        config = self._started.config
        return f"Reducer(codec={str(config.codec)!r}, tensors={len(self.parameters)})"

    def __str__(self) -> str:
        return describe(self._started, self.stats())


def _place_in(group: dist.ProcessGroup, wanted: torch.device) -> torch.device:
    """Where ranks can meet, even if what they are to average lies elsewhere, or is wrong."""
    types = [kind.type for kind in group._device_types]
    if wanted.type in types or CPU.type in types:
        return wanted
    return torch.device(types[0], torch.accelerator.current_device_index())


def _checked_names(
    named_tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
) -> list[tuple[str, torch.Tensor]]:
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    named: dict[str, torch.Tensor] = {}
    try:
        entries = list(pairs)
    except TypeError:
        raise ConfigError(
            f"named_tensors={shown(named_tensors)} must be pairs of a name and a tensor, such as "
            "model.named_parameters()"
        ) from None
    for entry in entries:
        pair = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (None, None)
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"named_tensors has {shown(entry)}, which is no pair of a name and a tensor; pass "
                "model.named_parameters(), or [('name', tensor), ...]"
            )
        if name in named:
            raise ConfigError(f"two tensors are called {name!r}; residuals are kept by name")
        if is_lazy(tensor):
            raise ConfigError(f"{name!r} has no shape yet: pass a batch through its lazy module")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
            raise ConfigError(f"{name!r} {kind}; only dense tensors are sent")
        named[name] = tensor
    if not named:
        raise ConfigError("named_tensors is empty: there is nothing to average")
    try:
        for name, tensor in named.items():
            expect_plain(name, tensor)
        check_memory(list(named), list(named.values()))
    except StateError as error:
        raise ConfigError(str(error)) from None
    return list(named.items())


def check_config(config: Config, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raises ConfigError for what a Reducer of these tensors cannot do."""
    if config.chooses:
        raise ConfigError(
            "codec='auto' tries codecs in the steps of a training with DistributedDataParallel, of "
            "which a Reducer sees nothing; name a codec, such as 'q4'"
        )
    for name, tensor in named:
        if config.check_every and not isinstance(tensor, torch.nn.Parameter):
            raise ConfigError(
                f"check_every={config.check_every} compares what was registered, which must be "
                f"equal on all ranks at every call, and {name!r} is no parameter; register "
                "parameters and average their gradients, or leave it out"
            )


def bucket_cap(value: float) -> float:
    """An option `bucket_cap_mb`. Raises ConfigError."""
    return mebibytes("bucket_cap_mb", value, BUCKET_CAP_MB)


def expect_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises StateError for a tensor that is spread over ranks, such as a parameter under FSDP2."""
    if hasattr(tensor, "to_local"):
        raise StateError(
            f"{name!r} is a {type(tensor).__name__}, whose parts are on several ranks; pass this "
            "rank's, tensor.to_local(), over the group of ranks that hold the same part"
        )


def check_memory(names: Iterable[str], tensors: Iterable[torch.Tensor]) -> None:
    """Raises StateError if an average could be written to one place twice.

    Of tensors whose memory has gaps only `expand` is refused: they are copied, and read before
    anything is written, so that what they share is averaged once.
    """
    dense = []
    for name, tensor in zip(names, tensors, strict=True):
        sides = zip(tensor.shape, tensor.stride(), strict=True)
        if tensor.numel() and is_dense(tensor):
            dense.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name))
        elif tensor.numel() and any(size > 1 and step == 0 for size, step in sides):
            raise StateError(f"elements of {name!r} share memory, by expand(); pass a clone()")
    for (_, end, first), (begin, _, second) in pairwise(sorted(dense)):
        if begin < end:
            raise StateError(
                f"{first!r} and {second!r} share memory, which would be averaged twice; register "
                "what is shared once"
            )


# --- a call ---


class _Pending(Protocol):
    def wait(self) -> None: ...
    def is_completed(self) -> bool: ...


class Work:
    """One call of `Reducer.all_reduce` on its way.

    Until `wait` has returned do not read or write the tensors.
    """

    def __init__(self, pending: _Pending, packed: Packed) -> None:
        self._call: tuple[_Pending, Packed] | None = (pending, packed)  # None: settled
        self._unpacked = packed.unpacked
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
            self._error = StateError, f"{type(error).__name__}: {error}"
        self._call = None

    def is_completed(self) -> bool:
        """Whether `wait` returns, or raises, without waiting for another rank."""
        call = self._call
        return call is None or call[0].is_completed()


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


# --- tensors as buckets ---


@dataclass
class Packed:
    """The buckets of one call.

    Attributes:
        buckets: in the order of all ranks.
        copies: tensors, and their views of a bucket that is no memory of theirs.
    """

    buckets: list[Bucket]
    copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    unpacked: torch.Event | None  # on a device; the next call may be on another stream

    @torch.no_grad()
    def unpack(self) -> None:
        """Copies what the buckets hold to the tensors."""
        for tensors, views in self.copies:
            _copy(tensors, views)
        if self.unpacked is not None:
            self.unpacked.record()


@dataclass
class _Room:
    """Tensors that travel together, and what they are copied to, made when it is first needed."""

    indices: tuple[int, ...]
    layouts: Sequence[ParameterLayout]
    dtype: torch.dtype
    flat: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)


class Packing:
    """How tensors are divided into buckets, equal on all ranks.

    Tensors of one dtype share a bucket, in their order, until it is full. Those that lie one behind
    the other, each with its elements as in the registered tensor, are averaged where they are; so
    is one that is alone in its bucket. Others are copied there and back.

    Args:
        parameters: of the tensors, as agreed by all ranks.
        dtypes: of the tensors.
        device: where the tensors are.
        cap_bytes: of a bucket of several tensors, at most.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterLayout],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        cap_bytes: int,
    ) -> None:
        self._device = device
        self._unpacked = None if device.type == "cpu" else torch.Event(device)
        self._rooms = [
            _Room(indices, [parameters[index] for index in indices], dtypes[indices[0]])
            for indices in _divided(parameters, dtypes, cap_bytes)
        ]

    @property
    def num_bytes(self) -> int:
        """Memory of buckets that tensors are copied to, so far."""
        return sum(room.flat.nbytes for room in self._rooms if room.flat is not None)

    @torch.no_grad()
    def pack(self, tensors: Sequence[torch.Tensor]) -> Packed:
        """Tensors with the shapes, dtypes and device of the registered ones, as buckets."""
        if self._unpacked is not None:
            self._unpacked.wait()
        packed = Packed([], [], self._unpacked)
        for room in self._rooms:
            mine = [tensors[index] for index in room.indices]
            flat = _in_place(room.layouts, mine)
            if flat is None:
                flat = self._filled(room, mine)
                packed.copies.append((mine, room.views))
            else:
                # The engine writes behind the back of autograd, which must notice.
                for each in mine:
                    if not each.is_inference():
                        torch.autograd.graph.increment_version(each)
            packed.buckets.append((room.indices, flat))
        return packed

    @torch.inference_mode(False)
    def _filled(self, room: _Room, tensors: list[torch.Tensor]) -> torch.Tensor:
        if room.flat is None:
            size, begin = sum(layout.num_elements for layout in room.layouts), 0
            room.flat = torch.empty(size, dtype=room.layouts[0].dtype, device=self._device)
            for layout in room.layouts:
                part = room.flat[begin : begin + layout.num_elements]
                begin += layout.num_elements
                if room.dtype.is_complex:
                    part = torch.view_as_complex(part.view(-1, 2))
                room.views.append(part.as_strided(layout.shape, layout.strides))
        _copy(room.views, tensors)
        return room.flat


def _in_place(
    layouts: Sequence[ParameterLayout], tensors: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """The tensors' own memory, if their elements lie there as all ranks expect."""
    first = tensors[0]
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != storage or tensor.storage_offset() != offset:
            return None
        offset += tensor.numel()
    if offset * first.element_size() > first.untyped_storage().nbytes():
        return None  # two storages begin at one address
    for layout, tensor in zip(layouts, tensors, strict=True):
        if tensor.is_conj() or tensor.is_neg() or not is_dense(tensor):
            return None
        if tuple(_native.bucket_strides(tensor)) != layout.strides:
            return None
    real = torch.view_as_real(first) if first.is_complex() else first
    return real.detach().as_strided((sum(each.num_elements for each in layouts),), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, each once."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _divided(
    parameters: Sequence[ParameterLayout], dtypes: Sequence[torch.dtype], cap_bytes: int
) -> list[tuple[int, ...]]:
    """Indices by bucket."""
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, (parameter, dtype) in enumerate(zip(parameters, dtypes, strict=True)):
        num_bytes = parameter.num_elements * parameter.dtype.itemsize
        bucket, filled = open_buckets.get(dtype, ([], 0))
        if not bucket or filled + num_bytes > cap_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[dtype] = bucket, filled + num_bytes
    return [tuple(bucket) for bucket in buckets]


def _copy(into: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    if any(tensor.is_complex() or tensor.is_neg() for tensor in (*into, *of)):
        for one, other in zip(into, of, strict=True):
            one.copy_(other)
    else:
        torch._foreach_copy_(into, of)
