"""Saves the state of a hook for a checkpoint, and loads it, with the choice of codec="auto"."""

from __future__ import annotations

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
from gradferry.errors import GradferryError
from gradferry.reduction import save_load
from gradferry.reduction.saved_state import SavedState


def save(bound: Binding) -> SavedState:
    """See `HookState.state_dict`."""
    state = save_load.save(bound.running, bound.hook.finished_steps())
    if bound.chooser is not None:
        state["choice"] = bound.chooser.choice.saved()
    return state


def load(bound: Binding, saved: Mapping[str, Any], on_resize: str) -> None:
    """See `HookState.load_state_dict`, which calls this."""
    if bound.chooser is not None:
        _restore_choice(bound, bound.chooser, saved)
        if bound.running.engine is None:
            return
    # A world of one chooses no codec, but may load a state in which others chose one.
    has_choice = isinstance(saved, Mapping) and "choice" in saved
    chosen = Choice.restored(saved["choice"]).codec if has_choice else None
    steps = save_load.load(bound.running, saved, on_resize, chosen=chosen)
    if bound.handover is not None and steps is not None:
        bound.hook.resume(steps)
        bound.handover.start(bound.hook)


def _restore_choice(bound: Binding, chooser: Chooser, saved: Mapping[str, Any]) -> None:
    record: Record
    try:
        save_load.check(bound.running, saved)
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
