"""The residuals of all ranks in a trainer's checkpoint: in a folder there, or gathered.

A folder of the trainer takes files from every rank. Lightning writes one file, from rank 0, and
deletes it by its path: files beside it would stay behind, so all states are gathered into it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradferry import checkpoint
from gradferry.averaging.saved_state import ON_RESIZE, signed
from gradferry.core.agreement import Record, content_of, on_all_ranks, rendezvous_place
from gradferry.ddp.state import HookState
from gradferry.errors import ConfigError, StateError

FOLDER = "gradferry"
_KEY = "hook"


def check_on_resize(on_resize: object) -> None:
    """Raises ConfigError, before a training begins that could not be resumed."""
    if on_resize not in ON_RESIZE:
        raise ConfigError(f"on_resize={on_resize!r} is none of {', '.join(ON_RESIZE)}")


def save(folder: Path, state: HookState, group: dist.ProcessGroup) -> None:
    """Writes a file per rank, as `gradferry.checkpoint.save` does. Collective."""
    checkpoint.save(folder, {_KEY: state.state_dict()}, group)


def load(folder: Path, state: HookState, group: dist.ProcessGroup, on_resize: str) -> None:
    """Restores what `save` wrote. Collective.

    Args:
        folder: in the trainer's checkpoint.
        state: of the hook.
        group: of its model.
        on_resize: as for `HookState.load_state_dict`. ``"drop"`` also accepts a checkpoint without
            the folder.

    Raises:
        StateError: it is missing, damaged or of another training. RankMismatchError: some ranks do
            not see it. The same text on every rank.
    """
    saved = None

    def read() -> Record:
        nonlocal saved
        saved = _read(folder, state, on_resize) if checkpoint.exists(folder) else None
        return {"sight of the checkpoint, which must be in a folder that all share": bool(saved)}

    on_all_ranks(read, group, _place(group), str(folder), alike=True)
    restore(saved, state, group, on_resize, str(folder))


def restore(
    saved: dict[str, Any] | None,
    state: HookState,
    group: dist.ProcessGroup,
    on_resize: str,
    where: str,
) -> None:
    """Loads on every rank or fails on every rank. Collective. None: nothing was saved."""

    def load() -> None:
        if saved is not None:
            state.load_state_dict(saved, on_resize)
        elif on_resize != "drop":
            raise StateError(
                "the checkpoint holds nothing of gradferry: it was saved without, or the training "
                "ended while it was saved; resume from another one, or begin without what was "
                "withheld, with on_resize='drop'"
            )

    on_all_ranks(load, group, _place(group), where)


def gather(state: HookState, group: dist.ProcessGroup) -> dict[str, Any] | None:
    """The merged states of all ranks, on the first rank; None on the others. Collective."""
    place = _place(group)
    mine: dict[str, Any] = {}
    on_all_ranks(lambda: mine.update(state.state_dict()), group, place, "saving")
    states = []
    # One at a time, since each may be as large as the model. Not sent to the first rank alone, for
    # which NCCL would connect it to every other.
    for rank in range(state.world_size):
        sent = content_of(mine, rank, group, place)
        if state.rank == 0:
            states.append(sent)
    return checkpoint.merge(states) if states else None


def _read(folder: Path, state: HookState, on_resize: str) -> dict[str, Any]:
    """What this rank loads: its own state, or those of all ranks, merged."""
    try:
        saved = _of_hook(checkpoint.load(folder, state.rank))
    except StateError:
        saved = _of_hook(checkpoint.load(folder, 0))
        if saved.get("world_size", 0) > state.rank:
            raise
        if on_resize == "fold" and isinstance(slot := saved.get("slot_0"), dict):
            # What rank 0 has withheld is its own.
            saved = signed({**saved, "slot_0": {name: each[:0] for name, each in slot.items()}})
    if on_resize == "mean" and saved.get("nodes") != json.dumps(state.nodes.members):
        saved = checkpoint.merge(map(_of_hook, checkpoint.load_all(folder)))
    return saved


def _of_hook(content: dict[str, Any]) -> dict[str, Any]:
    saved = content.get(_KEY)
    if not isinstance(saved, dict):
        raise StateError(f"it was not saved by an integration of gradferry: it has no {_KEY!r}")
    return saved


def _place(group: dist.ProcessGroup) -> torch.device:
    return rendezvous_place(group, torch.device(group._device_types[0].type))
