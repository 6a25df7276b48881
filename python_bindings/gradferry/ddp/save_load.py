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
from gradferry.reduction.saved_state import SavedState, withheld_in


def save(bound: Binding) -> SavedState:
    """See `HookState.state_dict`."""
    state = save_load.save(bound.running, bound.hook.finished_steps())
    if bound.chooser is not None:
        state["choice"] = bound.chooser.choice.saved()
    return {**bound.passed_on, **state}


def load(bound: Binding, saved: Mapping[str, Any], on_resize: str) -> None:
    """See `HookState.load_state_dict`, which calls this."""
    if bound.chooser is not None:
        _restore_choice(bound, bound.chooser, saved, on_resize)
        if bound.running.engine is None:
            return
    # A world of one chooses no codec, but may load a state in which others chose one.
    has_choice = isinstance(saved, Mapping) and "choice" in saved
    choice = Choice.restored(saved["choice"]) if has_choice else None
    chosen = None if choice is None else choice.codec
    bound.resume(save_load.load(bound.running, saved, on_resize, chosen=chosen))
    bound.passed_on.clear()
    if choice is not None:
        bound.passed_on["choice"] = choice.saved()


def _restore_choice(
    bound: Binding, chooser: Chooser, saved: Mapping[str, Any], on_resize: str
) -> None:
    record: Record
    try:
        save_load.check(bound.running, saved, on_resize)
        # Where nothing chose, the measurement begins after loading.
        chose = "choice" in saved or (saved["world_size"] > 1 and withheld_in(saved))
        choice = Choice.restored(saved.get("choice")) if chose else Choice()
        record = {"choice": choice.saved(), "steps": saved["steps"]}
    except GradferryError as error:
        record = error_record(error)
    group, place = bound.running.group, bound.running.transport.device
    records = gather_records(record, group, meeting_place(group, place))
    raise_first_error(records, group)
    raise_first_mismatch(records, group)
    chooser.restore(bound.hook, choice, int(saved["steps"]))
