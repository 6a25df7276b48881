"""Saves the state of a hook for a checkpoint, and loads it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from gradferry.core.agreement import (
    Record,
    error_record,
    gather_records,
    meeting_place,
    raise_first_error,
    raise_first_mismatch,
)
from gradferry.ddp.auto import Choice, Chooser
from gradferry.ddp.binding import Binding
from gradferry.ddp.residual_tiles import zero_residual
from gradferry.ddp.running import Running
from gradferry.ddp.saved_state import (
    COMPRESSED_WARMUP,
    LAYOUT,
    NODES,
    Residuals,
    SavedState,
    check_identity,
    pack,
    steps_and_scale,
    unpack,
)
from gradferry.errors import GradferryError, StateError


def save(bound: Binding) -> SavedState:
    """See `HookState.state_dict`."""
    running = bound.running
    if running.engine is None:
        nothing = zero_residual(0)
        mine = Residuals(bound.hook.finished_steps(), nothing, nothing, 0.0)
    else:
        mine = Residuals(*running.engine.state())
    state = pack(_identity(running), running.rank, mine, running.tiles())
    config = running.config
    state[COMPRESSED_WARMUP] = config.warmup_steps if config.holds_gradients(0) else 0
    if bound.chooser is not None:
        state["choice"] = bound.chooser.choice.saved()
    return state


def load(bound: Binding, saved: Mapping[str, Any], on_resize: str) -> None:
    """See `HookState.load_state_dict`, which calls this."""
    running = bound.running
    if bound.chooser is not None:
        _restore_choice(bound, bound.chooser, saved)
        if running.engine is None:
            return
    if running.engine is None:
        warnings.warn(
            "this hook passes gradients through: the saved residuals are not used",
            stacklevel=3,
        )
        return
    mine = unpack(
        saved,
        _identity(running),
        running.rank,
        running.engine.residual_sizes(),
        running.tiles(),
        _momentum_factors(running, saved),
        on_resize,
    )
    running.engine.load_state(
        steps=mine.steps,
        worker_residual=mine.worker,
        owner_residual=mine.owner,
        loss_scale=mine.loss_scale,
    )
    if bound.handover is not None:
        bound.hook.resume(mine.steps)
        bound.handover.start(bound.hook)


def _identity(running: Running) -> dict[str, Any]:
    """The fields that must be equal where the state is loaded, or make loading a resize."""
    nodes = running.exchange.nodes
    return {
        **({} if nodes.is_flat else {NODES: json.dumps(nodes.members)}),
        "codec": running.codec_asked_for,
        "world_size": running.world_size,
        "error_feedback": running.config.error_feedback,
        "momentum": running.config.momentum,
        "seed": running.config.seed,
        LAYOUT: running.saved_layout,
    }


def _check(running: Running, saved: Mapping[str, Any]) -> int:
    """Returns the step at which the state was saved.

    Raises:
        StateError: another hook saved it, or its residuals hold what this one's will not.
    """
    check_identity(saved, _identity(running))
    step, _ = steps_and_scale(saved)
    until = saved.get(COMPRESSED_WARMUP, 0)
    if not isinstance(until, int) or (step < until) != running.config.holds_gradients(step):
        config = running.config
        raise StateError(
            f"the saved state is of step {step} of a training whose warm-up was compressed for "
            f"{until!r} steps, this hook has warmup_steps={config.warmup_steps} and "
            f"warmup={str(config.warmup)!r}: before the end of a compressed warm-up residuals do "
            "not hold momentum; load it with the arguments it was saved with"
        )
    return step


def _momentum_factors(running: Running, saved: Mapping[str, Any]) -> list[float]:
    """By parameter, the factor from saved residuals to those that deliver the same momentum."""
    if running.config.holds_gradients(_check(running, saved)):
        return [1.0] * len(running.parameters)
    # A world of one chooses no codec, but may load a state in which others chose one.
    codec = Choice.restored(saved["choice"]).codec if "choice" in saved else None
    before = running.momentum_shares(exchanges=saved["world_size"] != 1, codec=codec)
    now = running.momentum_shares(exchanges=running.transport.exchanges)
    return [ours / theirs for ours, theirs in zip(now, before, strict=True)]


def _restore_choice(bound: Binding, chooser: Chooser, saved: Mapping[str, Any]) -> None:
    record: Record
    try:
        _check(bound.running, saved)
        # A world of one has chosen nothing: the measurement begins after loading.
        alone = saved["world_size"] == 1 and "choice" not in saved
        choice = Choice() if alone else Choice.restored(saved.get("choice"))
        record = {"choice": choice.saved(), "steps": saved["steps"]}
    except GradferryError as error:
        record = error_record(error)
    group, place = bound.running.group, bound.running.transport.device
    records = gather_records(record, group, meeting_place(group, place))
    raise_first_error(records)
    raise_first_mismatch(records)
    chooser.restore(bound.hook, choice, int(saved["steps"]))
