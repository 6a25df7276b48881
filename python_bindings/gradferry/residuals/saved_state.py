"""The saved state of a hook, and its conversion to another world size.

Every rank saves a *slot* with its residuals. State that is equal on all ranks is stored beside the
slots. So the states of all ranks can be merged, and torch.distributed.checkpoint, which stores only
one value per key, stores every slot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from gradferry.errors import ConfigError, StateError
from gradferry.residuals.tiles import (
    KINDS,
    Held,
    Kind,
    Slot,
    Tile,
    fold,
    held_tiles,
    ids,
    rescale,
    resize,
    zero_residual,
)

FORMAT = 3
LAYOUT = "layout"  # of every parameter, as JSON text
NODES = "nodes"  # ranks by node, as JSON text
# For how many steps residuals hold what is missing of gradients, before they hold momentum. Always
# there: torch.distributed.checkpoint loads the keys that the new hook has.
COMPRESSED_WARMUP = "compressed_warmup"
_SMALLEST_SCALE = 2.0**-126  # normal in fp32, in which engines hold it
_MOST_SHOWN = 400  # characters of a value
ON_RESIZE = ("strict", "mean", "fold", "drop")
_SLOT = re.compile(r"slot_(0|[1-9][0-9]{0,5})")
# The name of a part of a sharded model that has a state of its own.
_PART = re.compile(r"shard_\d+_of_\d+(_at(_\d+)+)?|group_of_rank_\d+")

SavedState = dict[str, Any]


@dataclass(frozen=True)
class Residuals:
    """The residuals of one rank, one-dimensional fp32 tensors on the CPU. Both of no elements:
    there are none.

    Attributes:
        steps: finished.
        worker: worker residual.
        owner: owner residual.
        loss_scale: of the gradients they remained of; 0.0: zero residuals without units.
    """

    steps: int
    worker: torch.Tensor
    owner: torch.Tensor
    loss_scale: float


def pack(
    identity: Mapping[str, Any], rank: int, mine: Residuals, tiles: Sequence[Tile]
) -> SavedState:
    """The state of one rank.

    Args:
        identity: the fields that must be equal where the state is loaded, ``world_size`` and
            ``nodes``.
        rank: that saves.
        mine: its residuals.
        tiles: of its layout.
    """

    def tiles_of(kind: Kind, residual: torch.Tensor) -> torch.Tensor:
        return held_tiles(tiles, kind) if residual.numel() else ids(())

    held = {"worker": mine.worker, "owner": mine.owner}
    ids_of = {f"{kind}_tiles": tiles_of(kind, held[kind]) for kind in KINDS}
    return {
        "format": FORMAT,
        **identity,
        "steps": mine.steps,
        "loss_scale": mine.loss_scale,
        f"slot_{rank}": {**held, **ids_of},
    }


def merge(states: Iterable[Mapping[str, Any]]) -> SavedState:
    """Merges the states of several ranks into one, for loading at another world size.

    Args:
        states: what `HookState.state_dict` returned on different ranks at the same step.

    Raises:
        StateError: there are none, they differ in more than their slots, or a slot occurs twice.
    """
    merged: SavedState = {}
    for state in states:
        if not isinstance(state, Mapping):
            raise StateError(f"a state to merge is of type {type(state).__name__}, not a dict")
        for key, value in state.items():
            if not isinstance(key, str):
                raise StateError(f"a state to merge has the key {shown(key)}; it is no state_dict")
            if key not in merged:
                merged[key] = value
            elif _PART.fullmatch(key) and isinstance(value, Mapping):
                merged[key] = merge([merged[key], value])
            elif _SLOT.fullmatch(key):
                raise StateError(f"two of the states to merge hold {key}; merge one per rank")
            elif same(merged[key], value):
                continue
            elif key == LAYOUT and isinstance(merged[key], str):
                difference = _layout_difference(value, merged[key], "another")
                if difference:
                    raise StateError(f"the states to merge are of different models: {difference}")
            else:
                raise StateError(
                    f"the states to merge differ in {key}: {shown(merged[key])} and "
                    f"{shown(value)}; they are not of one step of one training"
                )
    if not merged:
        raise StateError("there is no state to merge")
    return merged


def unpack(
    saved: Mapping[str, Any],
    identity: Mapping[str, Any],
    rank: int,
    tiles: Sequence[Tile],
    held: Held,
    factors: Sequence[float],
    on_resize: str,
) -> Residuals:
    """The residuals with which `rank` continues.

    Args:
        saved: from `pack` or `merge`, after `check_identity`.
        identity: of the hook that loads.
        rank: of the hook that loads.
        tiles: of its layout.
        held: where it was saved.
        factors: by parameter, its `momentum_share` divided by that of the hook that saved.
        on_resize: as for `check_identity`.

    Raises:
        StateError: the state does not fit.
    """
    steps, scale = steps_and_scale(saved)
    slots = _slots(saved)
    world_size, saved_size = identity["world_size"], saved["world_size"]
    same_names = same(saved[LAYOUT], identity[LAYOUT])
    is_same = same_names and saved_size == world_size and _members(saved) == _members(identity)
    if is_same and (rank in slots or on_resize != "fold"):
        if rank not in slots:
            raise StateError(
                f"the saved state has no slot_{rank}, only {_names(slots)}; every rank loads what "
                "it saved itself, or the merged states of all ranks"
            )
        if not _is_empty(slots[rank]):
            _expect_tiles(slots[rank], rank, tiles)
        worker, owner = slots[rank]["worker"], slots[rank]["owner"]
    elif on_resize == "strict":
        raise StateError(
            f"the saved state has {_what_differs(saved, identity)}; load the merged states of all "
            "ranks with on_resize='mean', this rank's own with on_resize='fold', or begin without "
            "residuals with on_resize='drop'"
        )
    elif on_resize == "drop":
        worker, owner = zero_residual(0), zero_residual(0)
    elif on_resize == "fold":
        worker, owner = _folded(saved, slots, identity, tiles, held)
        rescale(worker, owner, tiles, factors)
    else:
        missing = next((r for r in range(saved_size) if r not in slots), None)
        if missing is not None:
            raise StateError(
                f"on_resize='mean' needs the slots of all {shown(saved_size)} ranks, and "
                f"slot_{missing} is missing; merge the states of all ranks first"
            )
        every = [slots[r] for r in range(saved_size)]
        worker, owner = resize(every, _members(saved), tiles, held)
        rescale(worker, owner, tiles, factors)
        if not (worker.any() or owner.any()):
            worker, owner = zero_residual(0), zero_residual(0)  # a world of one needs no memory
    return Residuals(steps, worker, owner, scale)


def _folded(
    saved: Mapping[str, Any],
    slots: Mapping[int, Slot],
    identity: Mapping[str, Any],
    tiles: Sequence[Tile],
    held: Held,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fold`."""
    if not (_is_flat(saved) and _is_flat(identity)):
        raise StateError(
            "on_resize='fold' is for the flat exchange: ranks of a node share residuals; "
            "load the merged states of all ranks with on_resize='mean'"
        )
    if len(slots) != 1:
        raise StateError(
            f"on_resize='fold' takes what this rank itself saved, and the state has "
            f"{_names(slots)}; load that, or the merged states of all ranks with on_resize='mean'"
        )
    (slot,) = slots.values()
    return fold(slot, (saved["world_size"], identity["world_size"]), tiles, held)


def steps_and_scale(saved: Mapping[str, Any]) -> tuple[int, float]:
    """Finished steps, and the loss scale of the residuals. Raises StateError."""
    steps, scale = saved["steps"], saved["loss_scale"]
    if type(steps) is not int or not 0 <= steps < 2**63:
        raise StateError(f"the saved state has steps {shown(steps)}, which is no count")
    if type(scale) is not float or not (scale == 0 or _SMALLEST_SCALE <= scale < 2.0**128):
        raise StateError(f"the saved state has loss_scale {shown(scale)}, which is no scale")
    return steps, scale


def check_identity(
    saved: Mapping[str, Any], identity: Mapping[str, Any], on_resize: str = "strict"
) -> None:
    """Checks that the state was saved by a hook like the one that loads it.

    Args:
        saved: from `pack` or `merge`.
        identity: of the hook that loads.
        on_resize: see `HookState.load_state_dict`. With ``"drop"`` parameters may have other names.

    Raises:
        ConfigError: unknown ``on_resize``.
        StateError: it was not.
    """
    if not (isinstance(on_resize, str) and on_resize in ON_RESIZE):
        raise ConfigError(f"on_resize={shown(on_resize)} is none of {', '.join(ON_RESIZE)}")
    if not isinstance(saved, Mapping):
        raise StateError(
            f"the saved state is of type {type(saved).__name__}, not the dict that state_dict() "
            "returned"
        )
    if not same(saved.get("format", FORMAT), FORMAT):
        raise StateError(
            f"the saved state has format {shown(saved['format'])}, and this gradferry reads format "
            f"{FORMAT}; load it with the version that saved it"
        )
    needed = {"format", *identity, NODES, "steps", "loss_scale"}
    missing = sorted(needed - set(saved))
    if missing:
        raise StateError(f"the saved state lacks {', '.join(missing)}; it is not a state_dict")
    _check_ranks(saved)
    for field, mine in identity.items():
        if field == LAYOUT:
            _check_layout(saved[field], mine, named=on_resize != "drop")
        elif field not in ("world_size", NODES) and not same(saved[field], mine):
            raise StateError(
                f"the saved state has {field} {shown(saved[field])}, this hook has {mine!r}; "
                "load it with the arguments and the model it was saved with"
            )


def same(one: object, other: object) -> bool:
    """Whether two fields of states are equal. What `state_dict` never writes equals nothing."""
    return isinstance(one, str | int | float | dict | type(None)) and bool(one == other)


def shown(value: object) -> str:
    """A value of a damaged state, which may be anything, in an error message."""
    try:
        text = repr(value)
    except Exception:  # of a number with very many digits, for example
        text = f"of type {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def holds_residuals(saved: Mapping[str, Any]) -> bool:
    """Whether residuals of a state hold something. Raises StateError where they are none."""
    slots = _slots(saved).values()
    return any(bool(slot[kind].any()) for slot in slots for kind in KINDS)


def is_of_other_shards(saved: object, mine: str) -> bool:
    """Whether a layout is of the same model, divided among other ranks than this one."""
    try:
        theirs, ours = _parameters(saved), _parameters(mine)
        known = [{(each["name"], each["dtype"]) for each in part} for part in (theirs, ours)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False
    return theirs != ours and known[0] == known[1]


def holds_all_slots(saved: Mapping[str, Any]) -> bool:
    """Whether it has what every rank saved."""
    return len(_slots(saved)) == int(saved["world_size"])


def _is_empty(slot: Slot) -> bool:
    """Whether a rank without residuals saved it, such as one without an engine."""
    return all(value.numel() == 0 for value in slot.values())


def _check_layout(saved: object, mine: str, *, named: bool) -> None:
    if same(saved, mine):
        return
    difference = _layout_difference(saved, mine, "this hook", named=named)
    if difference:
        raise StateError(
            f"the saved state is of another model: {difference}; load it with the arguments and "
            "the model it was saved with"
        )


def _parameters(layout: object) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = json.loads(str(layout))
    return parameters


def _layout_difference(saved: object, mine: str, who: str, *, named: bool = True) -> str:
    """Describes the first parameter that differs, for an error message; empty: none does.

    `named`: whether names count.
    """
    try:
        pairs: Iterator[tuple[Any, Any]]
        pairs = zip_longest(_parameters(saved), _parameters(mine), fillvalue={})
        for index, (they, we) in enumerate(pairs):
            if they == (we if named else {**we, "name": they.get("name")}):
                continue
            name = f"parameter {index} ({(we or they)['name']})"
            if not (they and we):
                holder, other = ("it", who) if they else (who, "it")
                return f"{holder} has {name}, {other} has only {index} parameters"
            differs = (key for key in we if they.get(key) != we[key])
            field = next(key for key in differs if named or key != "name")
            return f"{name} has {field} {shown(they.get(field))}, {who} has {we[field]!r}"
    except (ValueError, TypeError, KeyError, AttributeError, StopIteration, RecursionError):
        return "what it says of its parameters was damaged"
    return ""


def _slots(saved: Mapping[str, Any]) -> dict[int, Slot]:
    size = saved["world_size"]
    names = [key for key in saved if isinstance(key, str)]
    found = {int(m[1]): saved[m[0]] for key in names if (m := _SLOT.fullmatch(key))}
    slots: dict[int, Slot] = {}
    for number, slot in found.items():
        if not isinstance(size, int) or number >= size:
            raise StateError(
                f"the saved state has slot_{number}, though {shown(size)} ranks saved it"
            )
        fields = {"worker": torch.float32, "owner": torch.float32}
        fields |= {"worker_tiles": torch.int64, "owner_tiles": torch.int64}
        for field, dtype in fields.items():
            value = slot.get(field) if isinstance(slot, Mapping) else None
            name = f"the saved state's slot_{number}, {field},"
            if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.dim() != 1:
                raise StateError(f"{name} is not a tensor of {dtype} with one dimension")
            if value.layout != torch.strided or value.device.type != "cpu":
                raise StateError(
                    f"{name} is {value.layout} on {value.device}; load it with map_location='cpu'"
                )
            if not value.isfinite().all():
                raise StateError(f"{name} is not finite; it was damaged")
        slots[number] = {field: slot[field] for field in fields}
    return slots


def _check_ranks(saved: Mapping[str, Any]) -> None:
    """Raises StateError if what the state says of its ranks and nodes cannot be."""
    size = saved["world_size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise StateError(
            f"the saved state has world_size {shown(size)}, which is no number of ranks"
        )
    try:
        members = _members(saved)
        ranks = [rank for node in members for rank in node]
        good = all(type(rank) is int for rank in ranks)
        good &= len(ranks) == size and sorted(ranks) == list(range(size))
        good &= list(map(sorted, members)) == sorted(members) == members and all(members)
    except (ValueError, TypeError, RecursionError):
        good = False
    if not good:
        raise StateError(
            f"the saved state has nodes {shown(saved[NODES])}, which do not say of {shown(size)} "
            "ranks which share a node; it was damaged"
        )


def _members(state: Mapping[str, Any]) -> list[list[int]]:
    """The ranks that a state or identity is of, by node."""
    members: list[list[int]] = json.loads(state[NODES])
    return members


def _is_flat(state: Mapping[str, Any]) -> bool:
    """Whether every rank is alone on its node."""
    return len(_members(state)) == int(state["world_size"])


def _what_differs(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    they, we = saved["world_size"], identity["world_size"]
    if they != we:
        return f"world_size {shown(they)}, this hook has {we}"
    theirs, ours = (
        "the flat exchange" if _is_flat(state) else f"nodes {state[NODES]}"
        for state in (saved, identity)
    )
    return f"{theirs}, this hook has {ours}; attach with nodes= as it was saved"


def _expect_tiles(slot: Slot, rank: int, tiles: Sequence[Tile]) -> None:
    """Raises StateError unless the slot's residuals are of the tiles that this rank has."""
    for kind in KINDS:
        if not torch.equal(slot[f"{kind}_tiles"], held_tiles(tiles, kind)):
            raise StateError(
                f"the saved state's slot_{rank} has the {kind} residuals of other tiles than this "
                "rank; it was damaged"
            )


def _names(slots: Iterable[int]) -> str:
    return ", ".join(f"slot_{number}" for number in sorted(slots)) or "no slot"
