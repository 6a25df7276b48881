"""The state of a communication hook: what a user holds, prints, asks and saves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradferry.core.config import Config, make_config
from gradferry.core.options import Options
from gradferry.core.parameters import ParameterLayout
from gradferry.ddp import step_numbers
from gradferry.ddp.advice import warn_about_rules, watch_optimizer
from gradferry.ddp.binding import Binding, bind
from gradferry.ddp.description import choice_of, describe
from gradferry.ddp.momentum import KeptMomentum
from gradferry.ddp.save_load import load, save
from gradferry.errors import ConfigError, StateError


class HookState:
    """Compression of one DistributedDataParallel's gradients.

    Args:
        codec: a codec string such as ``"q4"``, ``"off"`` for the backend's own all-reduce, or
            ``"auto"``: dense steps while the training and the link are measured, then the most
            precise codec, ``"off"`` included, within 2 % of the fastest predicted step; looked at
            again every thousand steps and more. Codecs below 3 bits are chosen in momentum mode
            only. ``stats()["choice"]`` says what was chosen and why. For models on the CPU.
        ddp: the model. Without it, call `bind` before the first backward pass.
        rules: dicts with ``codec`` and any of ``name`` (a shell-style pattern of the whole name,
            such as ``"*embedding*"``), ``min_dims``, ``max_dims``, ``min_size``, ``max_size``
            (elements); the first that matches a parameter gives its codec, and there is a warning
            of one that matches none. Others get ``exact`` when they have at most one dimension or
            fewer than 1024 elements, else ``codec``. float64 and complex parameters are always
            ``exact``.
        error_feedback: which residuals are kept: ``"none"``, ``"owner"``, ``"worker"``,
            ``"both"``, or ``"auto"``: both below 8 bits per element and in momentum mode, owner
            from there on. With both, what was applied plus what is withheld is what the gradients
            add up to; without the worker residual, 4 bytes per element, what a rank's own rounding
            takes off is gone.
        momentum: between 0 and 1. Gradients arrive as their momentum m = momentum * m +
            (1 - momentum) * gradient, which the worker residual carries beside what was withheld
            (less of it behind ``topk``, whose elements wait for their turn anyway):
            for an optimizer that has none of its own, as `gradferry.optim.momentum_mode` makes
            it, or for `gradferry.optim.OneBitAdam`. Takes one synced backward pass per optimizer
            step, no sparse gradients and no ``find_unused_parameters``.
        warmup_steps: first steps in which gradients arrive without momentum, and travel with the
            codec of `warmup`.
        warmup: the codec of the first `warmup_steps`, in place of every parameter's own but
            ``exact``. ``"exact"`` sends gradients as they are, so that these steps have the bits of
            a training without compression. Another, such as ``"q8"``, sends less, with the error
            feedback of all other steps; in momentum mode what it has withheld then comes with the
            momentum. Behind an adaptive optimizer, which learns its variance from what arrives,
            take one of 3 bits or more.
        grad_scaler: the `torch.amp.GradScaler` that scales the loss. Residuals follow its scale,
            exactly where that changes by powers of two.
        nonfinite: ``"propagate"`` hands NaN and infinity on to every rank; ``"raise"`` raises
            `StateError` on every rank, after which this hook, like after any error, is finished.
        exact_skip: whether a step whose result holds a NaN or infinity, which a GradScaler
            skips, leaves the residuals as it found them. Without it such a step moves them by what
            arrived less what was given, wherever that is finite. Costs a copy of the residuals.
            With ``grad_scaler`` a step is all synced backward passes since ``scaler.update()``;
            without, each such pass is a step of its own.
        check_every: number of steps after which all ranks compare hashes of their parameters, and
            raise `DivergedError` if those differ; 0 for never. Reads the model once and sends 8
            bytes per parameter. Not for uneven inputs under ``join()``: there a rank without
            input stops updating.
        seed: of the codecs' random numbers; equal on all ranks.

    Raises:
        ConfigError: an argument or the model cannot be used.
        RankMismatchError: ranks differ in configuration or model.
        PeerError: a rank failed to set up its connections or memory.
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
    ) -> None:
        self._ask(Options.among(locals()))
        if ddp is None:
            make_config(self._options)
        else:
            self.bind(ddp)

    @classmethod
    def _attached(cls, ddp: DistributedDataParallel, options: Options) -> HookState:
        """For `gradferry.attach`: bound, and the native hook is registered."""
        state = cls.__new__(cls)
        state._ask(options)
        state._bind(ddp, native=True)
        return state

    def _ask(self, options: Options) -> None:
        # Nothing is checked here: with a model, a wrong option must first be told to all ranks.
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

    def _bound(self) -> Binding:
        if self._binding is None:
            raise StateError(
                "this HookState is not bound to a model; pass the DistributedDataParallel to "
                "HookState(codec, ddp), or call state.bind(ddp) before the first backward pass"
            )
        return self._binding

    @property
    def config(self) -> Config:
        """The options, checked, as all ranks agreed on them; with ``"auto"`` of the present codec.

        Raises StateError, like all that follow, when the state is not bound.
        """
        return self._bound().running.config

    @property
    def parameters(self) -> tuple[ParameterLayout, ...]:
        """What the model reduces, in its order, each with its codec and residuals."""
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
    def passes_through(self) -> bool:
        """Whether every bucket takes the backend's own all-reduce at present."""
        return self._bound().running.engine is None

    def stats(self) -> dict[str, Any]:
        """Counters since the hook was attached, of this rank.

        Returns:
            A dict. Milliseconds are sums over steps, taken where the work is done: nothing waits
            for them. Zeros for a hook that passes everything through:

            - ``steps``: the current step, counted from 0.
            - ``buckets``, ``chunks``: sent so far.
            - ``gradient_bytes``: uncompressed size of all buckets so far.
            - ``wire_bytes``: bytes sent to other ranks so far, headers and padding included.
            - ``ratio``: bytes that an uncompressed ring all-reduce would have sent, over
              ``wire_bytes``; 0.0 before the first bucket.
            - ``residual_bytes``, ``workspace_bytes``: memory held.
            - ``workspace_allocations``: how often workspace was allocated or a plan was made.
            - ``in_flight``: buckets under way.
            - ``host_waits``: how often the host waited for a device that was a step behind.
            - ``fallbacks``: buckets that took the backend's own all-reduce.
            - ``encode_ms``: on the thread that DDP calls from.
            - ``network_ms``: waiting for messages, and checking them, on the finishing thread.
            - ``reduce_ms``, ``decode_ms``: on the finishing thread.
            - ``exposed_ms``: what DDP's thread was held up: inside the hook, and after its last
              bucket until all were complete. On a device these times are the host's: of handing
              work to streams.
            - ``worker_residual_ratio``, ``owner_residual_ratio``: norm of the residual over norm of
              the gradient it was withheld from (this rank's; the average), in the last step, on a
              sample of about 64 tiles; 0.0 without such a residual, and on a device.
            - ``choice``: a dict of ``codec`` (in use) and ``reason``; with ``"auto"`` also of
              ``step`` (since when), ``next_check`` (the step at which it is looked at again) and
              ``predicted_ms`` (of a step, by codec, when it was last looked at).
            - ``step_buckets``: for each bucket of the last finished step, the indices of its
              parameters (in the order of the model's reduced parameters).

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

        On the thread that steps the optimizer (any of `torch.optim`), and for as long as this
        state exists. What the callback raises is raised there.

        Args:
            callback: gets a dict of the numbers of that step alone, on this rank, with the keys of
                `stats` that are about steps: ``step`` (counted from 0), ``buckets``, ``chunks``,
                ``gradient_bytes``, ``wire_bytes``, ``ratio``, ``fallbacks``, ``encode_ms``,
                ``network_ms``, ``reduce_ms``, ``decode_ms``, ``exposed_ms``,
                ``worker_residual_ratio`` and ``owner_residual_ratio``.

        Returns:
            A handle whose ``remove()`` ends the calls.

        Raises:
            StateError: the state is not bound.
        """
        return step_numbers.call_after_steps(self, callback, self.world_size)

    def events(self) -> list[dict[str, Any]]:
        """The last 256 buckets, oldest first; an error that finishes the hook ends with the last 8.

        Returns:
            Dicts with ``step``, ``bucket``, ``chunks``, ``gradient_bytes``; the instants
            ``begin_ms`` (DDP handed it in), ``encoded_ms`` (DDP's thread went on) and
            ``complete_ms`` (0.0: never) on the clock of ``time.monotonic()``; and ``encode_ms``,
            ``network_ms``, ``reduce_ms``, ``decode_ms``.

        Raises:
            StateError: the state is not bound.
        """
        engine = self._bound().running.engine
        return [] if engine is None else engine.events()

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save to go on exactly where it stopped. Not collective.

        Save it with the model and the optimizer, of every rank: by ``torch.save`` to a file per
        rank, by `gradferry.checkpoint.save`, or by torch.distributed.checkpoint, for which a
        HookState is a ``Stateful``.

        Returns:
            A dict of numbers and strings, equal on all ranks, and ``slot_<rank>``: a dict of this
            rank's residuals (fp32) and the tiles it owns (int64), tensors of one dimension.

        Raises:
            StateError: the state is not bound, failed, or is in the middle of a step.
        """
        return save(self._bound())

    def load_state_dict(self, state_dict: Mapping[str, Any], on_resize: str = "strict") -> None:
        """Restores what `state_dict` returned. Call it on every rank: with ``"auto"``, whose choice
        it restores as well, it is collective.

        At the world size it was saved with, a training goes on as if it had not stopped, to the
        bit. Load the model and the optimizer of the same moment.

        Args:
            state_dict: what this rank saved, or the states of all ranks as
                `gradferry.checkpoint.merge` makes them one.
            on_resize: what to do when another number of ranks saved it. ``"strict"`` refuses.
                ``"mean"`` takes the states of all ranks and keeps what the averaged gradient still
                misses: every rank gets the mean of the worker residuals, in one rounding, and
                the owner residuals of the tiles it owns now (to and from a world of one, behind
                ``topk`` in momentum mode, what gives as much momentum). ``"drop"`` begins without
                residuals (and without momentum).

        Raises:
            ConfigError: another ``on_resize``.
            StateError: the state is of another codec, model, seed, momentum or world size, misses a
                slot or has one too many, is damaged or newer; or the hook is in the middle of a
                step. Nothing was changed.
        """
        load(self._bound(), state_dict, on_resize)

    def skip_step(self) -> None:
        """Tells that the gradients of the last step will not be used. Not collective.

        Call it, on every rank, when you leave out an optimizer step although its gradients are
        finite; skips of a GradScaler are noticed without it. The residuals become what they were
        before the step, to the bit. With ``grad_scaler`` that is before the first synced backward
        pass since the last ``scaler.update()``; without, before the last synced backward pass.

        Raises:
            StateError: the hook has no ``exact_skip=True``, or is in the middle of a step; or,
                without ``grad_scaler``, between the last two synced backward passes no optimizer
                stepped, no parameter was written in place and no step was skipped, so that both may
                belong to the step.
        """
        engine = self._bound().running.engine
        if engine is not None:
            engine.skip_step()

    def scale_residuals(self, factor: float) -> None:
        """Multiplies both residuals, and so the momentum that one of them carries. Not collective.

        Call it with the same factor on every rank, for example when a learning rate jumps: what
        was withheld before will be applied at the new rate.

        Args:
            factor: 0 forgets what was withheld; powers of two are exact.

        Raises:
            StateError: the hook is in the middle of a step.
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
    """What a user's `state` is bound to.

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
    """What the hook of a user's `state` keeps, for an optimizer that hands its momentum over.

    Raises:
        ConfigError: it is no HookState.
        StateError: it is not bound.
    """
    return KeptMomentum(bound_to(state))


def _unbound(options: Options) -> HookState:
    return HookState(**vars(options))
