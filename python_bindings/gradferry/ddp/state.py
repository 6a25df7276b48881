"""`HookState`: a user's handle to a hook, for options, counters and checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradferry.core.config import Config, make_config
from gradferry.core.nodes import AUTO, Nodes
from gradferry.core.options import WORKSPACE_CAP_MB, Options
from gradferry.core.parameters import ParameterLayout
from gradferry.ddp import step_numbers
from gradferry.ddp.advice import warn_about_rules, watch_optimizer
from gradferry.ddp.binding import Binding, bind
from gradferry.ddp.description import choice_of, describe
from gradferry.ddp.momentum import KeptMomentum
from gradferry.ddp.save_load import load, save
from gradferry.ddp.surroundings import warn_about_surroundings
from gradferry.errors import ConfigError, StateError


class HookState:
    """Compression of one DistributedDataParallel's gradients.

    Args:
        codec: a codec string such as ``"q4"``, ``"off"`` for the backend's own all-reduce, or
            ``"auto"``. ``"auto"`` measures training and link during dense steps, then takes the
            most precise codec, or ``"off"``, within 2 % of the fastest predicted step, and checks
            again after 1000 steps, then less often after every change. It chooses codecs below 3
            bits in momentum mode only. ``stats()["choice"]`` explains the choice.
        ddp: the model. Without it, call `bind` before the first backward pass.
        rules: dicts with ``codec`` and any of ``name`` (a shell-style pattern of the whole name,
            such as ``"*embedding*"``), ``min_dims``, ``max_dims``, ``min_size``, ``max_size``
            (elements). The first rule that matches a parameter gives its codec; a rule that matches
            no parameter causes a warning. Other parameters get ``exact`` if they have at most one
            dimension or fewer than 1024 elements, else ``codec``. float64 and complex parameters
            are always ``exact``.
        error_feedback: which residuals are kept: ``"none"``, ``"owner"``, ``"worker"``,
            ``"both"``, or ``"auto"``: both below 8 bits per element and in momentum mode, else the
            owner residual. With both, what was applied plus what is withheld equals the sum of the
            gradients. Without the worker residual, which takes 4 bytes per element, the rounding
            error of a rank's own encoding is lost.
        momentum: between 0 and 1. Instead of gradients, the hook delivers their momentum
            m = momentum * m + (1 - momentum) * gradient, which the worker residual stores together
            with what was withheld. ``topk`` uses a smaller momentum, because its elements already
            wait before they are sent. Use it with an optimizer that has no momentum of its own, as
            `gradferry.optim.momentum_mode` makes it, or with `gradferry.optim.OneBitAdam`. Needs
            one synced backward pass per optimizer step; refuses sparse gradients and
            ``find_unused_parameters``.
        warmup_steps: number of first steps in which gradients arrive without momentum, and are sent
            with the codec `warmup`.
        warmup: the codec of the first `warmup_steps`, for all parameters that are not ``exact``.
            ``"exact"`` sends gradients as they are, so that these steps have the bits of a training
            without compression. Another one, such as ``"q8"``, sends less, with error feedback as
            in all other steps; in momentum mode, what it has withheld then enters the momentum. An
            adaptive optimizer learns its variance from what arrives, and needs 3 bits or more here.
        grad_scaler: the `torch.amp.GradScaler` that scales the loss. Residuals follow its scale,
            exactly where that changes by powers of two.
        nonfinite: ``"propagate"`` delivers NaN and infinity to every rank; ``"raise"`` raises
            `StateError` on every rank, after which the hook is finished, as after any error.
        exact_skip: if true, a step whose result holds a NaN or infinity, which a GradScaler skips,
            leaves the residuals unchanged. If false, such a step changes them by the difference
            between what it was given and what it delivered, wherever that is finite. Costs a copy
            of the residuals. With ``grad_scaler``, a step is all synced backward passes since
            ``scaler.update()``; without, every synced backward pass is a step.
        check_every: number of steps after which all ranks compare hashes of their parameters, and
            raise `DivergedError` if those differ; 0 for never. Reads the model once and sends 8
            bytes per parameter. Not for uneven inputs under ``join()``: there a rank without
            input stops updating.
        seed: of the codecs' random numbers; equal on all ranks.
        workspace_cap_mb: the most memory for messages, in MiB, on the device of the model: chunks
            get smaller as the world grows, then fewer are in flight. ``print(state)`` shows what is
            used.
        nodes: which ranks share a node, and with it a network card. Ranks of a node first add up
            their gradients, and nodes exchange the compressed sums: *two levels*. ``"auto"``:
            those that run on one machine and in one network namespace; where that makes only one
            node, or nodes of one rank each, the exchange is *flat*, every rank with every other.
            ``"flat"``: always flat. A whole number: so many consecutive ranks of the process group.
            A DeviceMesh of two dimensions: its rows. ``print(state)`` says which exchange runs, and
            why. Nodes of different sizes work. Results depend on the nodes: bits are equal on all
            ranks, but other than those of the flat exchange. On a device, where two levels have not
            run on a GPU yet, ``"auto"`` is flat with a codec that is named; with codec ``"auto"``
            both exchanges are measured, as on the CPU, and the faster one is taken.

    Raises:
        ConfigError: an argument or the model cannot be used.
        RankMismatchError: ranks differ in configuration or model.
        PeerError: a rank did not come, or failed to set up its connections or memory.
        StateError: the process group was destroyed.
    """

    def __init__(
        self,
        codec: str = "q4",
        ddp: DistributedDataParallel | None = None,
        *,
        rules: Sequence[Mapping[str, Any]] | None = None,
        error_feedback: str = "auto",
        momentum: float | None = None,
        warmup_steps: int = 0,
        warmup: str = "exact",
        grad_scaler: object | None = None,
        nonfinite: str = "propagate",
        exact_skip: bool = False,
        check_every: int = 0,
        seed: int = 0,
        workspace_cap_mb: float = WORKSPACE_CAP_MB,
        nodes: object = AUTO,
    ) -> None:
        self._ask(Options.among(locals()))
        if ddp is None:
            make_config(self._options)
        else:
            self.bind(ddp)

    @classmethod
    def _attached(cls, ddp: DistributedDataParallel, options: Options) -> HookState:
        """For `gradferry.attach`: binds a new state and registers the native hook."""
        state = cls.__new__(cls)
        state._ask(options)
        state._bind(ddp, native=True)
        return state

    def _ask(self, options: Options) -> None:
        # Nothing is checked here: with a model, all ranks must learn of a wrong option.
        self._options = options
        self._binding: Binding | None = None

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Agrees with all ranks of the model's process group and starts the engine. Collective.

        Args:
            ddp: the model whose ``register_comm_hook(state, gradferry.hook)`` gets this state.

        Raises:
            StateError: the state is bound already, or the process group was destroyed.
            ConfigError, RankMismatchError, PeerError: as for the class.
        """
        self._bind(ddp, native=False)

    def _bind(self, ddp: DistributedDataParallel, *, native: bool) -> None:
        is_bound = self._binding is not None
        self._binding = bind(ddp, self._options, native=native, is_bound=is_bound)
        running = self._binding.running
        if running.engine is not None:
            watch_optimizer(running.parameters, running.index, running.config.momentum)
            warn_about_rules(
                running.config,
                running.parameters,
                exchanges=running.transport.exchanges,
                stacklevel=4,  # the caller of `attach`, or of `bind` or the class
            )
            warn_about_surroundings(running.transport, running.group, stacklevel=4)

    def _bound(self) -> Binding:
        if self._binding is None:
            raise StateError(
                "this HookState is not bound to a model; pass the DistributedDataParallel to "
                "HookState(codec, ddp), or call state.bind(ddp) before the first backward pass"
            )
        return self._binding

    @property
    def config(self) -> Config:
        """The options as all ranks agreed on them; with ``"auto"``, for the current codec.

        Raises:
            StateError: the state is not bound. The properties below raise it as well.
        """
        return self._bound().running.config

    @property
    def parameters(self) -> tuple[ParameterLayout, ...]:
        """The parameters that DDP reduces, in the model's order, with codecs and residuals."""
        return self._bound().running.parameters

    @property
    def rank(self) -> int:
        """This rank, in the model's process group."""
        return self._bound().running.rank

    @property
    def world_size(self) -> int:
        """Ranks of the model's process group."""
        return self._bound().running.world_size

    @property
    def nodes(self) -> Nodes:
        """The nodes between which gradients are exchanged; every rank is alone in the flat
        exchange.
        """
        return self._bound().running.exchange.nodes

    @property
    def passes_through(self) -> bool:
        """Whether every bucket currently takes the backend's own all-reduce."""
        return self._bound().running.engine is None

    def stats(self) -> dict[str, Any]:
        """Counters of this rank since the hook was attached.

        Returns:
            A dict. Times are floats in milliseconds, summed over steps; each thread times its own
            work, so nothing waits for them. A hook that passes everything through has zeros:

            - ``steps``: the current step, counted from 0.
            - ``buckets``, ``chunks``: number sent so far.
            - ``gradient_bytes``: uncompressed size of all buckets so far.
            - ``wire_bytes``: bytes sent to other nodes so far, headers and padding included; in
              the flat exchange, to other ranks.
            - ``local_bytes``: bytes sent to other ranks of the node; 0 in the flat exchange.
            - ``ratio``: bytes that an uncompressed ring all-reduce would have sent, divided by
              ``wire_bytes``; 0.0 before the first bucket.
            - ``residual_bytes``, ``workspace_bytes``: memory held.
            - ``workspace_allocations``: how often workspace was allocated or a plan was made.
            - ``in_flight``: buckets that are not complete yet.
            - ``host_waits``: how often the host waited for a device that was a step behind.
            - ``fallbacks``: buckets that took the backend's own all-reduce.
            - ``encode_ms``: encoding, on the thread on which DDP calls the hook. With two levels
              that thread only copies gradients for the other ranks of the node; sums and encoding
              are on the finishing thread.
            - ``network_ms``: waiting for messages and checking them, on the finishing thread.
            - ``reduce_ms``, ``decode_ms``: reducing and decoding, on the finishing thread.
            - ``exposed_ms``: delay of DDP's thread: time inside the hook, and after its last bucket
              until all were complete. On a device, all these times are those of the host while it
              enqueues work.
            - ``worker_residual_ratio``, ``owner_residual_ratio``: norm of the residual over norm of
              the gradient it was withheld from (this rank's, or its part of the node's sum; the
              average), in the last step, on a sample of about 64 tiles; 0.0 without such a
              residual, and on a device.
            - ``choice``: a dict of ``codec`` and ``exchange`` (``"flat"``, ``"two-level"``) in use,
              and ``reason``; with ``"auto"`` also of ``step`` (when they came into use),
              ``next_check`` (the step of the next check) and ``predicted_ms`` (of a step, from the
              last check, by codec: ``"q4"``, or, where there are two exchanges to choose from,
              ``"q4 (two-level)"``), and ``measured_ms`` (likewise, of those that trained for some
              steps because predictions left it open).
            - ``step_buckets``: for each bucket of the last finished step, the indices of its
              parameters (in the order of `parameters`).

        Raises:
            StateError: the state is not bound.
        """
        bound = self._bound()
        stats = bound.running.stats()
        if bound.chooser is not None and bound.running.engine is None:
            stats["steps"] = max(0, bound.hook.finished_steps() - 1)
        stats["fallbacks"] = bound.hook.passed()
        stats["ratio"] = step_numbers.ratio(stats, bound.running.world_size)
        stats["choice"] = choice_of(bound)
        return stats

    def on_step(self, callback: Callable[[dict[str, Any]], None]) -> RemovableHandle:
        """Calls `callback` after every optimizer step that followed new gradients.

        The callback runs on the thread that steps the optimizer (any of `torch.optim`), for as long
        as this state exists. Its exceptions are raised there.

        Args:
            callback: gets a dict with the numbers of that step alone, on this rank, with the
                meaning that they have in `stats`: ``step`` (counted from 0), ``buckets``,
                ``chunks``, ``gradient_bytes``, ``wire_bytes``, ``local_bytes``, ``ratio``,
                ``fallbacks``, ``encode_ms``, ``network_ms``, ``reduce_ms``, ``decode_ms``,
                ``exposed_ms``, ``worker_residual_ratio`` and ``owner_residual_ratio``.

        Returns:
            A handle whose ``remove()`` ends the calls.

        Raises:
            StateError: the state is not bound.
        """
        return step_numbers.call_after_steps(self, callback, self.world_size)

    def events(self) -> list[dict[str, Any]]:
        """The last 256 buckets, oldest first; an error that finishes the hook ends with the last 8.

        Returns:
            Dicts with ``step``, ``bucket``, ``chunks``, ``gradient_bytes``; the times ``begin_ms``
            (DDP passed it to the hook), ``encoded_ms`` (DDP's thread continued) and ``complete_ms``
            (0.0: never) on the clock of ``time.monotonic()``; and the durations ``encode_ms``,
            ``network_ms``, ``reduce_ms``, ``decode_ms``. All times are in milliseconds.

        Raises:
            StateError: the state is not bound.
        """
        engine = self._bound().running.engine
        return [] if engine is None else engine.events()

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank must save to continue exactly where it stopped. Not collective.

        Save it on every rank, with the model and the optimizer: by ``torch.save`` to a file per
        rank, by `gradferry.checkpoint.save`, or by torch.distributed.checkpoint, for which a
        HookState is a ``Stateful``.

        Returns:
            A dict of numbers and strings, equal on all ranks, and ``slot_<rank>``: a dict of this
            rank's residuals (fp32) and the ids of the tiles it owns (int64), one-dimensional
            tensors on the CPU. With two levels also ``nodes`` (JSON text), and in the slot the
            ids of the tiles that the rank sums for its node, whose worker residuals it has.

        Raises:
            StateError: the state is not bound, failed, or is in the middle of a step.
        """
        return save(self._bound())

    def load_state_dict(self, state_dict: Mapping[str, Any], on_resize: str = "strict") -> None:
        """Restores what `state_dict` returned. Call it on every rank. With ``"auto"`` it also
        restores the choice, and is collective.

        At the same world size and on the same nodes, the training continues bit-identically. Load
        the model and the optimizer that were saved at the same time.

        Args:
            state_dict: what this rank saved, or the states of all ranks, merged by
                `gradferry.checkpoint.merge`.
            on_resize: what to do when another number of ranks saved it, or the same ranks on other
                nodes (in the flat exchange every rank is a node). ``"strict"`` refuses. ``"mean"``
                needs the states of all ranks and keeps what the averaged gradient still lacks:
                every node gets the mean of the nodes' worker residuals, rounded once, and every
                rank the owner residuals of the tiles it owns now (with ``topk`` in momentum mode,
                to and from a world of one, scaled to deliver the same momentum). ``"drop"`` begins
                without residuals (and without momentum).

        Raises:
            ConfigError: another ``on_resize``.
            StateError: the state is of another codec, model, seed, momentum, world size or nodes,
                lacks a slot or has one too many, is damaged or of another format; or the hook is in
                the middle of a step. Nothing was changed.
        """
        load(self._bound(), state_dict, on_resize)

    def skip_step(self) -> None:
        """Declares that the gradients of the last step will not be used. Not collective.

        Call it on every rank when you skip an optimizer step although its gradients are finite; the
        hook detects skips by a GradScaler itself. It restores the residuals from before the step,
        to the bit. With ``grad_scaler`` the step began with the first synced backward pass since
        the last ``scaler.update()``; without, it is the last synced backward pass.

        Raises:
            StateError: the hook has no ``exact_skip=True``, or is in the middle of a step. Without
                ``grad_scaler`` also if the last two synced backward passes may belong to one step:
                between them no optimizer stepped, no parameter was written in place and no step was
                skipped.
        """
        engine = self._bound().running.engine
        if engine is not None:
            engine.skip_step()

    def scale_residuals(self, factor: float) -> None:
        """Multiplies both residuals, and with them the momentum that they carry. Not collective.

        Call it with the same factor on every rank, for example when a learning rate jumps: what was
        withheld before will be applied at the new rate.

        Args:
            factor: finite; 0 drops what was withheld; powers of two are exact.

        Raises:
            ConfigError: the factor is not finite.
            StateError: the state is not bound, failed, or is in the middle of a step.
        """
        if not math.isfinite(factor):
            raise ConfigError(f"factor={factor!r} must be finite")
        engine = self._bound().running.engine
        if engine is not None:
            engine.scale_residuals(factor)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._binding is not None:
            warnings.warn(
                "a copied or pickled HookState is not bound to a model, and a copied "
                "DistributedDataParallel has no communication hook: attach again",
                stacklevel=2,
            )
        return (_unbound, (self._options,))

    def __repr__(self) -> str:
        return f"HookState(codec={self._options.codec!r}, bound={self._binding is not None})"

    def __str__(self) -> str:
        if self._binding is None:
            return repr(self)
        return describe(self._binding)


def bound_to(state: object) -> Binding:
    """The binding of a user's `state`.

    Raises:
        ConfigError: it is no HookState.
        StateError: it is not bound.
    """
    if not isinstance(state, HookState):
        raise ConfigError(
            f"the state is {state!r}, not a gradferry.HookState: register "
            "ddp.register_comm_hook(gradferry.HookState('q4', ddp), gradferry.hook), and give "
            "OneBitAdam the state that gradferry.attach() returns"
        )
    return state._bound()


def momentum_of(state: object) -> KeptMomentum:
    """Access to the momentum in the hook of `state`, for an optimizer that hands over its own.

    Raises:
        ConfigError: it is no HookState.
        StateError: it is not bound.
    """
    return KeptMomentum(bound_to(state))


def _unbound(options: Options) -> HookState:
    return HookState(**vars(options))
