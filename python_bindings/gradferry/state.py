"""The state of a communication hook: what a user holds, prints, asks and saves."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradferry import binding
from gradferry.config import Config, make_config
from gradferry.errors import ConfigError, StateError

STATE_FORMAT = 1
COUNTERS = (
    "steps",
    "buckets",
    "chunks",
    "gradient_bytes",
    "wire_bytes",
    "residual_bytes",
    "workspace_bytes",
    "workspace_allocations",
    "in_flight",
    "host_waits",
)


class HookState:
    """Compression of one DistributedDataParallel's gradients.

    Args:
        codec: a codec string such as ``"q4"``, or ``"off"`` for the backend's own all-reduce.
        ddp: the model. Without it, call `bind` before the first backward pass.
        rules: dicts with ``codec`` and any of ``name`` (a shell-style pattern), ``min_dims``,
            ``max_dims``, ``min_size``, ``max_size`` (elements); the first that matches a parameter
            gives its codec. Others get ``exact`` when they have at most one dimension or fewer
            than 1024 elements, else ``codec``. float64 and complex parameters are always
            ``exact``.
        error_feedback: which residuals are kept: ``"none"``, ``"owner"``, ``"worker"``,
            ``"both"``, or ``"auto"``: owner at 3 bits per element and more, both below.
        momentum: not available in this version.
        warmup_steps: first steps in which every gradient travels as ``exact``.
        grad_scaler: not available in this version.
        nonfinite: ``"propagate"`` hands NaN and infinity on to every rank; ``"raise"`` raises
            `StateError` on every rank, after which this hook, like after any error, is finished.
        exact_skip: not available in this version.
        check_every: not available in this version.
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
        grad_scaler: object | None = None,
        nonfinite: str = "propagate",
        exact_skip: bool = False,
        check_every: int = 0,
        seed: int = 0,
    ) -> None:
        self._init(
            codec,
            rules=rules,
            error_feedback=error_feedback,
            momentum=momentum,
            warmup_steps=warmup_steps,
            grad_scaler=grad_scaler,
            nonfinite=nonfinite,
            exact_skip=exact_skip,
            check_every=check_every,
            seed=seed,
        )
        if ddp is None:
            self._make_config()
        else:
            self.bind(ddp)

    def _init(self, codec: str, **arguments: Any) -> None:
        # Nothing is checked here: with a model, a wrong argument must first be told to all ranks.
        self._codec = codec
        self._arguments = arguments
        self._binding: binding.Binding | None = None

    def _make_config(self) -> Config:
        if self._binding is not None:
            raise StateError(
                "this HookState is bound to a model already; make one HookState for each model"
            )
        return make_config(self._codec, **self._arguments)

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
        self._binding = binding.bind(ddp, self._make_config, native=native)
        if native and ddp.logger is not None:
            ddp.logger._set_comm_hook_name(f"gradferry:{self._binding.config.codec}")

    def _bound(self) -> binding.Binding:
        if self._binding is None:
            raise StateError(
                "this HookState is not bound to a model; pass the DistributedDataParallel to "
                "HookState(codec, ddp), or call state.bind(ddp) before the first backward pass"
            )
        return self._binding

    def stats(self) -> dict[str, Any]:
        """Counters since the hook was attached, of this rank.

        Returns:
            A dict, with zeros for a hook that passes everything through:

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
            - ``step_buckets``: for each bucket of the last finished step, the indices of its
              parameters (in the order of the model's reduced parameters).

        Raises:
            StateError: the state is not bound.
        """
        bound = self._bound()
        if bound.engine is None:
            return {**dict.fromkeys(COUNTERS, 0), "step_buckets": [], "ratio": 0.0}
        stats: dict[str, Any] = bound.engine.stats()
        ring = 2 * (bound.world_size - 1) / bound.world_size * stats["gradient_bytes"]
        stats["ratio"] = ring / stats["wire_bytes"] if stats["wire_bytes"] else 0.0
        return stats

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save to go on exactly where it stopped. Not collective.

        Returns:
            A dict of integers, strings and two fp32 tensors: the residuals.

        Raises:
            StateError: the state is not bound, failed, or buckets are in flight.
        """
        engine = self._bound().engine
        if engine is None:
            steps, worker, owner = 0, torch.empty(0), torch.empty(0)
        else:
            steps, worker, owner = engine.state()
        return {**self._identity(), "steps": steps, "worker": worker, "owner": owner}

    def load_state_dict(self, state_dict: Mapping[str, Any], on_resize: str = "strict") -> None:
        """Restores what `state_dict` returned on the same rank. Not collective.

        Args:
            state_dict: of the same codec, model, rank and world size.
            on_resize: only ``"strict"`` in this version.

        Raises:
            ConfigError: another ``on_resize``.
            StateError: the dict belongs to another codec, model, rank or world size, is
                incomplete or newer, or buckets are in flight.
        """
        if on_resize != "strict":
            raise ConfigError(f"on_resize={on_resize!r} is not available; use 'strict'")
        engine = self._bound().engine
        if engine is None:
            warnings.warn(
                "this hook passes gradients through: the saved residuals are not used",
                stacklevel=2,
            )
            return
        identity = self._identity()
        missing = sorted({*identity, "steps", "worker", "owner"} - set(state_dict))
        if missing:
            raise StateError(f"the saved state lacks {', '.join(missing)}; it is not a state_dict")
        for field, own in identity.items():
            if state_dict[field] != own:
                raise StateError(
                    f"the saved state has {field} {state_dict[field]!r}, this hook has {own!r}; "
                    "load it with the arguments, model, rank and world size it was saved with"
                )
        for field in ("worker", "owner"):
            if not isinstance(state_dict[field], torch.Tensor):
                raise StateError(f"the saved state's {field} residual is not a tensor")
            if not state_dict[field].isfinite().all():
                raise StateError(
                    f"the saved state's {field} residual is not finite; it was damaged"
                )
        steps = state_dict["steps"]
        if not isinstance(steps, int) or not 0 <= steps < 2**64:
            raise StateError(f"the saved state has steps {steps!r}, which is no count")
        engine.load_state(
            steps=steps,
            worker_residual=state_dict["worker"],
            owner_residual=state_dict["owner"],
        )

    def _identity(self) -> dict[str, Any]:
        bound = self._bound()
        return {
            "format": STATE_FORMAT,
            "codec": str(bound.config.codec),
            "rank": bound.rank,
            "world_size": bound.world_size,
            "error_feedback": bound.config.error_feedback,
            "seed": bound.config.seed,
            "layout_hash": bound.layout_hash,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        if self._binding is not None:
            warnings.warn(
                "a copied or pickled HookState is not bound to a model, and a copied "
                "DistributedDataParallel has no communication hook: attach again",
                stacklevel=2,
            )
        return (_unbound, (self._codec, self._arguments))

    def __repr__(self) -> str:
        return f"HookState(codec={self._codec!r}, bound={self._binding is not None})"

    def __str__(self) -> str:
        if self._binding is None:
            return repr(self)
        return describe(self._binding)


def _unbound(codec: str, arguments: dict[str, Any]) -> HookState:
    return HookState(codec, **arguments)


def describe(bound: binding.Binding) -> str:
    """The outcome of the rules, line by line, as ``print(state)`` shows it."""
    if bound.engine is None:
        reason = "GRADFERRY_DISABLE=1" if bound.config.disabled else "codec 'off'"
        return f"gradferry: passes through ({reason}), process group {bound.group_name!r}"
    total = sum(p.num_elements for p in bound.parameters)
    lines = [
        f"gradferry: {bound.config.codec}, error feedback {bound.config.error_feedback}, "
        f"rank {bound.rank} of {bound.world_size}, process group {bound.group_name!r}"
    ]
    for codec in dict.fromkeys(p.codec for p in bound.parameters):
        members = [p for p in bound.parameters if p.codec == codec]
        elements = sum(p.num_elements for p in members)
        bits = sum(p.num_elements * codec.bits(p.dtype) for p in members) / max(elements, 1)
        lines.append(
            f"  {codec}: {len(members)} parameters, {elements:,} elements "
            f"({elements / total if total else 0:.1%}), {bits:.2f} bits/element"
        )
    exempt = [p.name for p in bound.parameters if not p.codec.lossy]
    if exempt:
        shown = ", ".join(exempt[:4]) + (f", and {len(exempt) - 4} more" if len(exempt) > 4 else "")
        lines.append(f"  exempt from compression: {shown}")
    stats = bound.engine.stats()
    lines.append(
        f"  memory: residuals {stats['residual_bytes'] / 2**20:.1f} MiB, "
        f"workspace {stats['workspace_bytes'] / 2**20:.1f} MiB"
    )
    return "\n".join(lines)
