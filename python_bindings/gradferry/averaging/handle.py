"""What a user's handles have in common: `HookState`, `Reducer` and `fsdp.ShardedState`."""

from __future__ import annotations

import numbers
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import Any, cast

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from gradferry import _native
from gradferry.averaging import step_numbers
from gradferry.averaging.description import as_asked
from gradferry.averaging.running import Running
from gradferry.averaging.step_numbers import Stats, call_after_steps, was_skipped
from gradferry.core.config import Config
from gradferry.core.nodes import Nodes
from gradferry.core.parameters import ParameterLayout
from gradferry.errors import ConfigError


class Averaging(ABC):
    """Options, counters and residuals of named tensors that are averaged over ranks."""

    parts: tuple[str, ...] = ()  # of a sharded model: the keys of its own saved states

    @property
    @abstractmethod
    def _running(self) -> Running:
        """Raises StateError where there is none."""

    def _ring_bytes(self) -> float:
        """Bytes that an uncompressed ring would have sent so far."""
        running = self._running
        return running.ring_share * float(running.stats()["gradient_bytes"])

    def _repr_html_(self) -> str:
        """What a notebook shows: the text of ``print()``."""
        return f"<pre>{escape(str(self))}</pre>"

    def _engine_at_rest(self) -> _native.BucketEngine | None:
        """The engine, if any, for what is done between steps. It checks that itself."""
        return self._running.engine

    @abstractmethod
    def _passed_buckets(self) -> int:
        """Buckets that took the backend's own all-reduce."""

    @abstractmethod
    def _passed_steps(self) -> int:
        """Steps that have ended, where there is no engine to count them."""

    def _choice(self) -> dict[str, Any]:
        """The entry ``choice`` of `stats`."""
        return as_asked(self._running)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state that this rank must save to continue exactly where it stopped."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any], on_resize: str = "strict") -> None:
        """Restores what `state_dict` returned."""

    @property
    def config(self) -> Config:
        """The options as all ranks agreed on them; with ``"auto"``, for the current codec.

        Raises:
            StateError: a `HookState` is not bound. So do all properties and methods below.
        """
        return self._running.config

    @property
    def parameters(self) -> tuple[ParameterLayout, ...]:
        """What is averaged, in order, with codecs and residuals: the parameters that DDP reduces,
        or the tensors of a `Reducer`.
        """
        return self._running.parameters

    @property
    def rank(self) -> int:
        """This rank, in the process group."""
        return self._running.rank

    @property
    def world_size(self) -> int:
        """Ranks of the process group."""
        return self._running.world_size

    @property
    def nodes(self) -> Nodes:
        """The nodes between which gradients are exchanged; every rank is alone in the flat
        exchange.
        """
        return self._running.exchange.nodes

    @property
    def passes_through(self) -> bool:
        """Whether every bucket currently takes the backend's own all-reduce."""
        return self._running.engine is None

    def _total_steps(self) -> int:
        """The entry ``total_steps`` of `stats`."""
        engine = self._running.engine
        return self._passed_steps() if engine is None else int(engine.stats()["steps"])

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Keeps the numbers of steps taken while a loaded state moves the count of the training."""
        running = self._running
        taken = self._total_steps() - running.steps_before
        yield
        running.steps_before = self._total_steps() - taken

    def stats(self) -> Stats:
        """Counters of this rank. Unless a key says otherwise it is a sum since the hook was
        attached, or the `Reducer` made; loading a checkpoint changes no sum.

        Times are floats in milliseconds; each thread times its own work, so nothing waits for them.
        Where everything passes through they are zeros. The keys:

        - ``steps``: steps taken; a step counts from its first bucket. Every call of a `Reducer` is
          a step.
        - ``total_steps``: steps of the training, those before a loaded checkpoint included.
        - ``buckets``, ``chunks``: number sent.
        - ``gradient_bytes``: uncompressed size of all buckets.
        - ``wire_bytes``: bytes sent to other nodes, headers and padding included; in the flat
          exchange, to other ranks.
        - ``local_bytes``: bytes sent to other ranks of the node; 0 in the flat exchange.
        - ``ratio``: bytes that an uncompressed ring would have sent, divided by ``wire_bytes``;
          0.0 before the first bucket. The ring does what the hook does, an all-reduce or a
          reduce-scatter. With two levels both are what leaves the node, and the ring's bytes are
          divided among the ranks of the node.
        - ``residual_bytes``, ``workspace_bytes``: memory held now.
        - ``workspace_allocations``: how often workspace was allocated or a plan was made.
        - ``in_flight``: buckets that are not complete now.
        - ``host_waits``: how often the host waited for a device that was a step behind.
        - ``fallbacks``: buckets that took the backend's own all-reduce.
        - ``encode_ms``: encoding, on the thread that hands over buckets: that on which DDP
          calls the hook, or on which `Reducer.all_reduce` is called; with ``async_op`` one of
          its own. With two levels that thread only copies gradients for the other ranks of the
          node; sums and encoding are on the finishing thread.
        - ``network_ms``: waiting for messages and checking them, on the finishing thread.
        - ``reduce_ms``, ``decode_ms``: reducing and decoding, on the finishing thread.
        - ``exposed_ms``: delay of that thread: time in which it handed over buckets, and after
          the last one until all were complete. On a device, all these times are those of the
          host while it enqueues work.
        - ``worker_residual_ratio``, ``owner_residual_ratio``: norm of the residual over norm of
          the gradient that it remained of (this rank's, or its part of the node's sum; the
          average), in the last step, on a sample of about 64 tiles; 0.0 without such a
          residual, and on a device.
        - ``choice``: a dict of ``codec`` and ``exchange`` (``"flat"``, ``"two-level"``) in use,
          and ``reason``; with ``"auto"`` also of ``step`` (when they came into use),
          ``next_check`` (the step in which candidates are tried again) and ``measured_ms`` (of a
          step, from the last trial, by codec: ``"q4"``, or, where there are two exchanges to
          choose from, ``"q4 (two-level)"``).
        - ``step_buckets``: for each bucket of the last finished step, the indices of its
          parameters (in the order of `parameters`).

        Returns:
            A dict with these keys; `Stats` has their types.
        """
        running = self._running
        stats = running.stats()
        stats["total_steps"] = self._total_steps()
        stats["steps"] = stats["total_steps"] - running.steps_before
        stats["fallbacks"] = self._passed_buckets()
        stats["ratio"] = step_numbers.ratio(self._ring_bytes(), stats["wire_bytes"])
        stats["choice"] = self._choice()
        return cast(Stats, stats)

    def on_step(self, callback: Callable[[dict[str, Any]], None]) -> RemovableHandle:
        """Calls `callback` after every optimizer step that followed new gradients.

        The callback runs on the thread that steps the optimizer (any of `torch.optim`), for as long
        as this object exists. Its exceptions are raised there.

        Args:
            callback: gets a dict with the numbers of that step alone, on this rank, with the
                meaning that they have in `stats`: ``step`` (of the training, from 0), ``buckets``,
                ``chunks``, ``gradient_bytes``, ``wire_bytes``, ``local_bytes``, ``ratio``,
                ``fallbacks``, ``encode_ms``, ``network_ms``, ``reduce_ms``, ``decode_ms``,
                ``exposed_ms``, ``worker_residual_ratio`` and ``owner_residual_ratio``.

        Returns:
            A handle whose ``remove()`` ends the calls.

        Raises:
            ConfigError: the callback cannot be called.
        """
        if not callable(callback):
            raise ConfigError(f"on_step({callback!r}): pass a function, which gets a dict")
        weak = weakref.ref(self)
        before: Mapping[str, Any] = self.stats()
        ring_before = self._ring_bytes()

        def after_step(optimizer: Optimizer) -> None:
            nonlocal before, ring_before
            state = weak()
            if state is None or was_skipped(optimizer):
                return
            now: Mapping[str, Any] = state.stats()
            step = {key: now[key] - before[key] for key in step_numbers.SUMS}
            # The optimizer of another model, or buckets that are not complete.
            if step["buckets"] + step["fallbacks"] == 0 or now["in_flight"]:
                return
            before, last_ring, ring_before = now, ring_before, state._ring_bytes()
            step["ratio"] = step_numbers.ratio(ring_before - last_ring, step["wire_bytes"])
            ratios = {key: now[key] for key in step_numbers.RATIOS}
            callback({"step": now["total_steps"] - 1, **step, **ratios})

        return call_after_steps(after_step, owner=self)

    def events(self) -> list[dict[str, Any]]:
        """The last 256 buckets, oldest first; the first error ends with the last 8.

        Returns:
            Dicts with ``step``, ``bucket``, ``chunks``, ``gradient_bytes``; the times ``begin_ms``
            (it was handed over), ``encoded_ms`` (the thread that did so continued) and
            ``complete_ms`` (0.0: never) on the clock of ``time.monotonic()``; and the durations
            ``encode_ms``, ``network_ms``, ``reduce_ms``, ``decode_ms``. All times are in
            milliseconds.
        """
        engine = self._running.engine
        return [] if engine is None else engine.events()

    def scale_residuals(self, factor: float) -> None:
        """Multiplies both residuals, and with them the momentum that they carry. Not collective.

        gradferry itself multiplies them only when the loss scale changes: any other factor than 1
        loses gradient or adds to it.

        Call it with the same factor on every rank, for example when a learning rate jumps: the
        residuals will be applied at the new rate.

        Args:
            factor: finite in fp32; 0 drops the residuals; powers of two are exact.

        Raises:
            ConfigError: the factor is no such number.
            StateError: an error has ended the engine, or this is the middle of a step.
        """
        is_number = isinstance(factor, numbers.Real) and not isinstance(factor, bool)
        if not is_number or not abs(factor) <= torch.finfo(torch.float32).max:
            raise ConfigError(f"factor={factor!r} must be a number that is finite in fp32")
        engine = self._engine_at_rest()
        if engine is not None:
            engine.scale_residuals(factor)
