"""`Reducer`: averages named tensors over ranks through a codec, without DDP."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer
from typing_extensions import Unpack

from gradferry import _native
from gradferry.averaging import save_load
from gradferry.averaging.advice import warn_about_rules, watch_optimizer
from gradferry.averaging.description import describe
from gradferry.averaging.handle import Averaging
from gradferry.averaging.running import Running, propose
from gradferry.averaging.start import start, usable_group
from gradferry.averaging.step_numbers import Stats, call_after_steps
from gradferry.averaging.tensor_calls import (
    TensorCalls,
    Tensors,
    Work,
    check_memory,
    expect_plain,
    short,
)
from gradferry.core.config import CHUNK_BYTES, Config, make_config, mebibytes
from gradferry.core.device import CPU
from gradferry.core.options import Options, takes_options
from gradferry.errors import ConfigError, StateError

__all__ = ["Reducer", "Work"]

BUCKET_CAP_MB = _native.BUCKET_CAP_MB


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
    passed. ``check_every`` compares the registered tensors, which must be parameters; a step of
    others that replaced them is an error.

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
        self._watches = False  # the optimizer
        self._averaged: list[weakref.ref[torch.Tensor]] = []  # in the last call, in order
        # What reads parameters themselves, or concerns their optimizer.
        self._reads = bool(running.config.check_every or running.config.momentum)
        if self._reads:
            call_after_steps(partial(_look, weakref.ref(self)), owner=self)
        self._calls = TensorCalls(running, named, int(bucket_cap_mb * 2**20))
        warn_about_rules([(running, "rules")])

    def all_reduce(self, tensors: Tensors | None = None, async_op: bool = False) -> Work | None:
        """Replaces tensors by their average over all ranks. Collective.

        Every call averages all registered tensors, and is a step: the compression error of one call
        is added in the next, except where all ranks pass zeros.

        Args:
            tensors: a sequence in the order of registration, or a mapping by name, with the shapes,
                dtypes and device of the registered tensors; other strides are allowed. None: the
                registered tensors themselves. They must not require grad: pass gradients.
            async_op: if true, returns at once. Wait for the result before the next call. Not with
                ``check_every`` or ``grad_scaler``.

        Returns:
            None, or with `async_op` the `Work` to wait for.

        Raises:
            StateError: the tensors are not what was registered, the last call was not waited for,
                another thread is in a call, or the process group was destroyed; or with
                ``nonfinite="raise"`` an average is not finite.
            PeerError, ProtocolError: another rank failed, or sent what it must not.
            DivergedError: registered parameters differ between ranks.

        Any error ends the Reducer on all ranks, which may be in this call already. The contents of
        the tensors are then unspecified.
        """
        if isinstance(tensors, list | tuple | Mapping) and (self._reads or not self._watches):
            self._watch_gradients(tensors)
        return self._calls.all_reduce(tensors, async_op)

    def _watch_gradients(self, tensors: Tensors) -> None:
        """Watches the optimizer of registered parameters whose gradients are averaged. The
        optimizer of local SGD, which steps between averages, never sees what is averaged.
        """
        running = self._started
        if isinstance(tensors, Mapping):
            tensors = [tensors[name] for name in self._calls.names if name in tensors]
        if self._reads:
            self._averaged = [weakref.ref(each) for each in tensors]
        gradients = {id(p.grad) for p in running.tensors() if p.is_leaf and p.grad is not None}
        if not self._watches and any(id(each) in gradients for each in tensors):
            self._watches = True
            watch_optimizer(running)

    def _expect_registered(self, optimizer: Optimizer) -> None:
        """Ends all ranks if an optimizer has stepped on averages with parameters that have replaced
        registered ones.
        """
        trained = {id(p.grad): p for group in optimizer.param_groups for p in group["params"]}
        tensors = zip(self._calls.names, self._averaged, self._started.tensors(), strict=False)
        for name, reference, registered in tensors:
            gradient = reference()
            if gradient is None or not isinstance(registered, torch.nn.Parameter):
                continue
            # A copy of a parameter, such as fp32 master weights, may have its gradient, too.
            is_own = trained.get(id(gradient), registered) is registered
            if not is_own and registered.grad is not gradient:
                self._calls.fail(
                    f"what was averaged as {name!r} is the gradient of another parameter than the "
                    "one that was registered, which momentum= and check_every= look at: make a "
                    "new Reducer of the parameters that train now"
                )

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank must save to continue exactly where it stopped. Not collective.

        Returns:
            What `HookState.state_dict` returns.

        Raises:
            StateError: an error has ended the Reducer, or the last call was not waited for.
        """
        return self._saved()

    def _saved(self, kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The state, as `save_load.save` returns it."""
        self._engine_at_rest("save the state")
        return save_load.save(self._started, self._calls.count, kept)

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
        self._engine_at_rest("load a state")
        with self._loading():
            self._calls.count = save_load.load(self._started, state_dict, on_resize)

    @property
    def _running(self) -> Running:
        return self._started

    def _engine_at_rest(self, what: str) -> _native.BucketEngine | None:
        self._calls.expect_waited_for(what)
        return self._started.engine

    def _passed_buckets(self) -> int:
        return self._calls.buckets_passed

    def _passed_steps(self) -> int:
        return self._calls.count

    def stats(self) -> Stats:
        """The numbers of `HookState.stats`, and ``packing_bytes``: memory of buckets into which
        tensors are copied.
        """
        return {**super().stats(), "packing_bytes": self._calls.packing_bytes}

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a Reducer is connected to other ranks and cannot be copied or pickled: save its "
            "state_dict(), and make a new one"
        )

    def __repr__(self) -> str:
        config = self._started.config
        return f"Reducer(codec={str(config.codec)!r}, tensors={len(self.parameters)})"

    def __str__(self) -> str:
        return describe(self._started, self.stats())


def _look(reducer: weakref.ref[Reducer], optimizer: Optimizer) -> None:
    if (mine := reducer()) is not None:
        mine._expect_registered(optimizer)


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
            f"named_tensors={short(named_tensors)} must be pairs of a name and a tensor, such as "
            "model.named_parameters()"
        ) from None
    for entry in entries:
        pair = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (None, None)
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"named_tensors has {short(entry)}, which is no pair of a name and a tensor; pass "
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


def calls_of(reducer: Reducer) -> TensorCalls:
    """The calls of a Reducer, for what is built on it."""
    return reducer._calls
