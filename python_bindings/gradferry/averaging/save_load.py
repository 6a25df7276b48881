"""The state of a running engine for a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gradferry.averaging.running import Running
from gradferry.core.codec_spec import CodecSpec
from gradferry.core.warn import warn
from gradferry.errors import StateError
from gradferry.residuals.saved_state import (
    COMPRESSED_WARMUP,
    LAYOUT,
    NODES,
    Residuals,
    SavedState,
    check_identity,
    holds_all_slots,
    holds_residuals,
    is_of_other_shards,
    pack,
    shown,
    steps_and_scale,
    unpack,
)
from gradferry.residuals.tiles import zero_residual


def save(running: Running, passed_steps: int, kept: Mapping[str, Any] | None = None) -> SavedState:
    """The state of this rank.

    Args:
        running: between steps.
        passed_steps: steps that passed through, where there is no engine to count them.
        kept: what this returned for the same engine, and nobody uses any more: its memory is used
            again.

    Raises:
        StateError: the engine failed, or is in the middle of a step.
    """
    if running.engine is None:
        nothing = zero_residual(0)
        mine = Residuals(passed_steps, nothing, nothing, 0.0)
    else:
        slot = (kept or {}).get(f"slot_{running.rank}", {})
        worker, owner = slot.get("worker"), slot.get("owner")
        mine = Residuals(*running.engine.state(kept_worker=worker, kept_owner=owner))
        # The memory was used, so that there are as many elements, of the same tiles.
        if kept is not None and mine.worker is worker and mine.owner is owner:
            return {**kept, "steps": mine.steps, "loss_scale": mine.loss_scale}
    state = pack(_identity(running), running.rank, mine, running.tiles())
    config = running.config
    state[COMPRESSED_WARMUP] = config.warmup_steps if config.holds_gradients(0) else 0
    return state


def load(
    running: Running,
    saved: Mapping[str, Any],
    on_resize: str,
    *,
    chosen: CodecSpec | None = None,
) -> int:
    """Restores what `save` returned, on this rank.

    Args:
        running: between steps.
        saved: of this rank, or merged of all.
        on_resize: see `HookState.load_state_dict`.
        chosen: the codec that codec="auto" had chosen when the state was saved.

    Returns:
        The number of steps that were finished.

    Raises:
        ConfigError, StateError: see `HookState.load_state_dict`.
    """
    if running.engine is None:
        check_identity(saved, {"world_size": running.world_size}, on_resize)
        if holds_residuals(saved):
            warn("gradients pass through without gradferry: the saved residuals are not used")
        return steps_and_scale(saved)[0]
    check(running, saved, on_resize)
    mine = unpack(
        saved,
        _identity(running),
        running.rank,
        running.tiles(),
        running.residuals_in(saved["world_size"], codec=chosen),
        _momentum_factors(running, saved, chosen),
        on_resize,
    )
    running.engine.load_state(
        steps=mine.steps,
        worker_residual=mine.worker,
        owner_residual=mine.owner,
        loss_scale=mine.loss_scale,
    )
    return mine.steps


def load_of_other_shards(
    running: Running, states: Sequence[Mapping[str, Any]], on_resize: str
) -> int:
    """Goes on at the step of a training whose model was divided among other ranks, without
    residuals: those of a shard stay with it.

    Args:
        running: between steps.
        states: of the shards of that training, as far as they are there.
        on_resize: ``"drop"`` loses their residuals.

    Returns:
        The number of steps that were finished.

    Raises:
        ConfigError: unknown ``on_resize``.
        StateError: another hook saved them, or they have residuals. Nothing was changed.
    """
    could_lose = any(any(each.residuals) for each in running.parameters)
    for saved in states:
        mine = _identity(running)
        if is_of_other_shards(saved.get(LAYOUT), mine[LAYOUT]):
            mine[LAYOUT] = saved[LAYOUT]
        _check(running, saved, mine, on_resize)
        is_known = holds_all_slots(saved) or not could_lose
        if on_resize != "drop" and (holds_residuals(saved) or not is_known):
            raise StateError(
                "the saved state is of other shards, and residuals stay with their shard: load it "
                "with as many shards as saved it, or go on without residuals, with "
                "on_resize='drop'"
            )
    steps, scale = steps_and_scale(states[0])
    if running.engine is not None:
        nothing = zero_residual(0)
        running.engine.load_state(
            steps=steps, worker_residual=nothing, owner_residual=nothing, loss_scale=scale
        )
    return steps


def is_of_these_shards(running: Running, saved: object) -> bool:
    """False where a state is of the same model, divided among other ranks."""
    kept = saved.get(LAYOUT) if isinstance(saved, Mapping) else None
    return not is_of_other_shards(kept, running.saved_layout)


def _identity(running: Running) -> dict[str, Any]:
    """The fields that must be equal where the state is loaded, or make loading a resize."""
    return {
        NODES: json.dumps(running.exchange.nodes.members),
        "codec": running.codec_asked_for,
        "world_size": running.world_size,
        "error_feedback": running.config.error_feedback,
        "momentum": running.config.momentum,
        "seed": running.config.seed,
        LAYOUT: running.saved_layout,
    }


def check(running: Running, saved: Mapping[str, Any], on_resize: str) -> None:
    """Checks that a state fits a running engine.

    Raises:
        ConfigError: unknown ``on_resize``.
        StateError: another hook saved it, or its residuals hold what this one's will not.
    """
    _check(running, saved, _identity(running), on_resize)


def _check(
    running: Running, saved: Mapping[str, Any], identity: Mapping[str, Any], on_resize: str
) -> None:
    check_identity(saved, identity, on_resize)
    step, _ = steps_and_scale(saved)
    until = saved.get(COMPRESSED_WARMUP, 0)
    if type(until) is not int or (step < until) != running.config.holds_gradients(step):
        config = running.config
        raise StateError(
            f"the saved state is of step {step} of a training whose warm-up was compressed for "
            f"{shown(until)} steps, this hook has warmup_steps={config.warmup_steps} and "
            f"warmup={str(config.warmup)!r}: before the end of a compressed warm-up residuals do "
            "not hold momentum; load it with the arguments it was saved with"
        )


def _momentum_factors(
    running: Running, saved: Mapping[str, Any], chosen: CodecSpec | None
) -> list[float]:
    """By parameter, the factor from saved residuals to those that deliver the same momentum."""
    if running.config.holds_gradients(saved["steps"]):
        return [1.0] * len(running.parameters)
    before = running.momentum_shares(exchanges=saved["world_size"] != 1, codec=chosen)
    now = running.momentum_shares(exchanges=running.transport.exchanges)
    return [ours / theirs for ours, theirs in zip(now, before, strict=True)]
