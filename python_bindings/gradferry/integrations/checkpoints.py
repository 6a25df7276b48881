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

from gradferry import _native, checkpoint
from gradferry.averaging.saved_state import ON_RESIZE, signed
from gradferry.core.agreement import gather_records, on_all_ranks, rendezvous_place
from gradferry.core.rendezvous import world_ranks
from gradferry.ddp.state import HookState
from gradferry.errors import ConfigError, StateError

FOLDER = "gradferry"
_KEY = "hook"
_PIECE = 1 << 24  # elements of a tensor that are sent at a time, from every rank


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
        StateError: it is missing, damaged or of another training, or some ranks do not see it; the
            same text on every rank.
    """
    seen = gather_records({"found": checkpoint.exists(folder)}, group, _place(group))
    named = zip(world_ranks(group), seen, strict=True)
    blind = [rank for rank, record in named if not record["found"]]
    if 0 < len(blind) < len(seen):
        raise StateError(
            f"{_native.name_ranks(blind)} cannot see {folder}, and other ranks can: it must be on "
            "a file system that all ranks share"
        )
    saved = None

    def read() -> None:
        nonlocal saved
        saved = _read(folder, state, on_resize)

    if not blind:
        on_all_ranks(read, group, _place(group), str(folder))
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
    slot: dict[str, torch.Tensor] = mine.pop(f"slot_{state.rank}")
    sizes = gather_records({name: held.numel() for name, held in slot.items()}, group, place)
    slots: list[dict[str, torch.Tensor]] = [{} for _ in sizes]
    for name, held in sorted(slot.items()):
        parts = _gather_tensor(held, [size[name] for size in sizes], group, place)
        for target, part in zip(slots, parts, strict=False):  # none but on the first rank
            target[name] = part
    if state.rank != 0:
        return None
    return {**mine, **{f"slot_{rank}": content for rank, content in enumerate(slots)}}


def _gather_tensor(
    mine: torch.Tensor, sizes: list[int], group: dist.ProcessGroup, place: torch.device
) -> list[torch.Tensor]:
    """One-dimensional tensors of all ranks on the CPU of the first, in pieces: they may be as large
    as the model, and need not fit beside it on its device.
    """
    is_first = dist.get_rank(group) == 0
    whole = [mine.new_empty(size) for size in sizes] if is_first else []
    for begin in range(0, max(sizes), _PIECE):
        length = min(_PIECE, max(sizes) - begin)
        piece = torch.zeros(length, dtype=mine.dtype, device=place)
        part = mine[begin : begin + length]
        piece[: part.numel()] = part.to(place)
        received = [torch.empty_like(piece) for _ in whole]
        dist.gather(piece, received if is_first else None, group=group, group_dst=0)
        for target, piece in zip(whole, received, strict=True):
            room = target[begin : begin + length]
            room.copy_(piece[: room.numel()])
    return whole


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
