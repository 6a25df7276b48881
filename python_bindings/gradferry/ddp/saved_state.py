"""What a checkpoint holds of a hook, and how it becomes the state of another world.

Every rank saves a *slot*: its residuals. What is equal on all ranks lies beside the slots, so that
states of all ranks can be merged, and so that torch.distributed.checkpoint, which stores one of all
values with the same key, stores every slot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from gradferry import _native
from gradferry.errors import ConfigError, StateError

FORMAT = 2
LAYOUT = "layout"  # of every parameter, as JSON text
# For how many steps residuals hold what is missing of gradients, before they hold momentum.
COMPRESSED_WARMUP = "compressed_warmup"
ON_RESIZE = ("strict", "mean", "drop")
_SLOT = re.compile(r"slot_(\d+)")

_NO_PLACE = (
    "a world of one rank uses gradients as they are and has no place for the saved residuals; load "
    "with on_resize='drop'"
)
_OTHER_SIZE = "the saved worker residuals have another size than this hook's; they were damaged"

SavedState = dict[str, Any]


@dataclass(frozen=True)
class Tile:
    """A tile with residuals; offsets in elements, -1 where this rank has none."""

    id: int
    num_elements: int
    worker_offset: int
    owner_offset: int
    parameter: int


@dataclass(frozen=True)
class Residuals:
    """Of one rank, as the engine holds them."""

    steps: int
    worker: torch.Tensor
    owner: torch.Tensor
    loss_scale: float


def zero_residual(num_elements: int) -> torch.Tensor:
    """Of one dimension on the CPU, in fp32 whatever torch's default is."""
    return torch.zeros(num_elements, dtype=torch.float32, device="cpu")


def pack(
    identity: Mapping[str, Any], rank: int, mine: Residuals, tiles: Sequence[Tile]
) -> SavedState:
    """The state of one rank.

    Args:
        identity: what must be equal where the state is loaded; ``world_size`` is among it.
        rank: whose slot this is.
        mine: its residuals.
        tiles: of its layout.
    """
    owned = sorted((t for t in tiles if t.owner_offset >= 0), key=lambda t: t.owner_offset)
    return {
        "format": FORMAT,
        **identity,
        "steps": mine.steps,
        "loss_scale": mine.loss_scale,
        f"slot_{rank}": {
            "worker": mine.worker,
            "owner": mine.owner,
            "owner_tiles": torch.tensor([t.id for t in owned], dtype=torch.int64, device="cpu"),
        },
    }


def merge(states: Iterable[Mapping[str, Any]]) -> SavedState:
    """The states of several ranks as one, for loading in another world size.

    Args:
        states: what `HookState.state_dict` returned, of different ranks at the same step.

    Raises:
        StateError: there are none, they differ beside their slots, or a slot comes twice.
    """
    merged: SavedState = {}
    for state in states:
        for key, value in state.items():
            if key not in merged:
                merged[key] = value
            elif _SLOT.fullmatch(key):
                raise StateError(f"two of the states to merge hold {key}; merge one per rank")
            elif merged[key] != value and key == LAYOUT and isinstance(merged[key], str):
                raise StateError(
                    "the states to merge are of different models: "
                    + _layout_difference(value, merged[key], "another")
                )
            elif merged[key] != value:
                raise StateError(
                    f"the states to merge differ in {key}: {merged[key]!r} and {value!r}; they are "
                    "not of one step of one training"
                )
    if not merged:
        raise StateError("there is no state to merge")
    return merged


def unpack(
    saved: Mapping[str, Any],
    identity: Mapping[str, Any],
    rank: int,
    sizes: tuple[int, int],
    tiles: Sequence[Tile],
    factors: Sequence[float],
    on_resize: str,
) -> Residuals:
    """What `rank` goes on with.

    Args:
        saved: from `pack` or `merge`.
        identity: of the hook that loads.
        rank: of the hook that loads.
        sizes: elements of its worker and owner residual.
        tiles: of its layout.
        factors: by parameter, its share of a momentum divided by that of the hook that saved.
        on_resize: see `HookState.load_state_dict`.

    Raises:
        ConfigError: unknown ``on_resize``.
        StateError: the state does not fit.
    """
    if on_resize not in ON_RESIZE:
        raise ConfigError(f"on_resize={on_resize!r} is none of {', '.join(ON_RESIZE)}")
    check_identity(saved, identity)
    steps, scale = steps_and_scale(saved)
    slots = _slots(saved)
    world_size, saved_size = identity["world_size"], saved["world_size"]
    if saved_size == world_size:
        if rank not in slots:
            raise StateError(
                f"the saved state has no slot_{rank}, only {_names(slots)}; every rank loads what "
                "it saved itself, or the merged states of all ranks"
            )
        worker, owner = slots[rank]["worker"], slots[rank]["owner"]
    elif on_resize == "strict":
        raise StateError(
            f"the saved state has world_size {saved_size}, this hook has {world_size}; load the "
            "merged states of all ranks with on_resize='mean', or begin without residuals with "
            "on_resize='drop'"
        )
    elif on_resize == "drop":
        worker, owner = zero_residual(sizes[0]), zero_residual(sizes[1])
    else:
        missing = [r for r in range(saved_size) if r not in slots]
        if missing:
            raise StateError(
                f"on_resize='mean' needs the slots of all {saved_size} ranks, and "
                f"slot_{missing[0]} is missing; merge the states of all ranks first"
            )
        every = [slots[r] for r in range(saved_size)]
        worker, owner = _resize(every, sizes, tiles, alone=world_size == 1)
        rescale(worker, owner, tiles, factors)
    return Residuals(steps, worker, owner, scale)


def steps_and_scale(saved: Mapping[str, Any]) -> tuple[int, float]:
    """Finished steps, and the loss scale of the residuals. Raises StateError."""
    steps, scale = saved["steps"], saved["loss_scale"]
    if not isinstance(steps, int) or not 0 <= steps < 2**64:
        raise StateError(f"the saved state has steps {steps!r}, which is no count")
    if not isinstance(scale, float) or not 0 <= scale < float("inf"):
        raise StateError(f"the saved state has loss_scale {scale!r}, which is no scale")
    return steps, scale


def check_identity(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raises StateError unless the state was saved by a hook like the one that loads it."""
    if saved.get("format", FORMAT) != FORMAT:
        raise StateError(
            f"the saved state has format {saved['format']!r}, and this gradferry reads format "
            f"{FORMAT}; load it with the version that saved it"
        )
    missing = sorted({"format", *identity, "steps", "loss_scale"} - set(saved))
    if missing:
        raise StateError(f"the saved state lacks {', '.join(missing)}; it is not a state_dict")
    for field, mine in identity.items():
        if field == LAYOUT:
            _check_layout(saved[field], mine)
        elif field != "world_size" and saved[field] != mine:
            raise StateError(
                f"the saved state has {field} {saved[field]!r}, this hook has {mine!r}; "
                "load it with the arguments and the model it was saved with"
            )


def _check_layout(saved: object, mine: str) -> None:
    if saved != mine:
        raise StateError(
            f"the saved state is of another model: {_layout_difference(saved, mine, 'this hook')}; "
            "load it with the arguments and the model it was saved with"
        )


def _layout_difference(saved: object, mine: str, who: str) -> str:
    """The first parameter that differs, in words."""
    try:
        pairs: Iterator[tuple[Any, Any]]
        pairs = zip_longest(json.loads(str(saved)), json.loads(mine), fillvalue={})
        for index, (they, we) in enumerate(pairs):
            if they == we:
                continue
            name = f"parameter {index} ({(we or they)['name']})"
            if not (they and we):
                holder, other = ("it", who) if they else (who, "it")
                return f"{holder} has {name}, {other} has only {index} parameters"
            field = next(key for key in we if they.get(key) != we[key])
            return f"{name} has {field} {they.get(field)!r}, {who} has {we[field]!r}"
    except (ValueError, TypeError, KeyError, AttributeError, StopIteration):
        pass
    return "what it says of its parameters was damaged"


def _slots(saved: Mapping[str, Any]) -> dict[int, Mapping[str, torch.Tensor]]:
    size = saved["world_size"]
    slots = {int(m[1]): saved[m[0]] for key in saved if (m := _SLOT.fullmatch(key))}
    for number, slot in slots.items():
        if not isinstance(size, int) or number >= size:
            raise StateError(f"the saved state has slot_{number}, though {size!r} ranks saved it")
        for field, dtype in (
            ("worker", torch.float32),
            ("owner", torch.float32),
            ("owner_tiles", torch.int64),
        ):
            value = slot.get(field) if isinstance(slot, Mapping) else None
            name = f"the saved state's slot_{number}, {field},"
            if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.dim() != 1:
                raise StateError(f"{name} is not a tensor of {dtype} with one dimension")
            if not value.isfinite().all():
                raise StateError(f"{name} is not finite; it was damaged")
    return slots


def _names(slots: Iterable[int]) -> str:
    return ", ".join(f"slot_{number}" for number in sorted(slots)) or "no slot"


def _resize(
    slots: Sequence[Mapping[str, torch.Tensor]],
    sizes: tuple[int, int],
    tiles: Sequence[Tile],
    *,
    alone: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank gets the mean of the worker residuals, and the owner residuals of its tiles.

    So the mean of the worker residuals plus the owner residuals, which is what the averaged
    gradient still misses, stays what it was. A world of one has no owner residual: there it joins
    the worker's.
    """
    saved_size = slots[0]["worker"].numel()
    if any(slot["worker"].numel() != saved_size for slot in slots):
        raise StateError("the saved slots have worker residuals of different sizes; one is damaged")
    total = torch.zeros(saved_size, dtype=torch.float64, device="cpu")
    for slot in slots:
        total += slot["worker"]
    worker = (total / len(slots)).float()
    if saved_size != sizes[0]:
        if worker.any():
            raise StateError(_NO_PLACE if alone else _OTHER_SIZE)
        worker = zero_residual(sizes[0])
    owner = zero_residual(sizes[1])
    for tile, values in _owner_tiles(slots, tiles):
        if tile.owner_offset >= 0:
            owner[tile.owner_offset : tile.owner_offset + tile.num_elements] = values
        elif alone and tile.worker_offset >= 0:
            worker[tile.worker_offset : tile.worker_offset + tile.num_elements] += values
        elif alone and values.any():
            raise StateError(_NO_PLACE)
    return worker, owner


def rescale(
    worker: torch.Tensor, owner: torch.Tensor, tiles: Iterable[Tile], factors: Sequence[float]
) -> None:
    """Multiplies the residuals of every parameter by its factor, where that is finite."""
    for tile in tiles:
        factor = factors[tile.parameter]
        for residual, offset in ((worker, tile.worker_offset), (owner, tile.owner_offset)):
            if factor != 1 and offset >= 0:
                part = residual[offset : offset + tile.num_elements]
                scaled = part * factor
                part.copy_(torch.where(scaled.isfinite(), scaled, part))


def _owner_tiles(
    slots: Sequence[Mapping[str, torch.Tensor]], tiles: Sequence[Tile]
) -> Iterator[tuple[Tile, torch.Tensor]]:
    alignment = _native.RESIDUAL_ALIGNMENT  # elements: where tiles start in an owner residual
    by_id = {tile.id: tile for tile in tiles}
    seen: set[int] = set()
    for number, slot in enumerate(slots):
        offset = 0
        for tile_id in slot["owner_tiles"].tolist():
            tile = by_id.get(tile_id)
            if tile is None or tile_id in seen:
                raise StateError(
                    f"the saved state's slot_{number} owns tile {tile_id}, which "
                    f"{'the model lacks' if tile is None else 'another slot owns, too'}"
                )
            seen.add(tile_id)
            values = slot["owner"][offset : offset + tile.num_elements]
            offset += -(-tile.num_elements // alignment) * alignment
            if values.numel() == tile.num_elements:
                yield tile, values
        if offset != slot["owner"].numel():
            raise StateError(
                f"the saved state's slot_{number} has {slot['owner'].numel()} owner residuals for "
                f"tiles of {offset}; it was damaged"
            )
