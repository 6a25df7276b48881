"""The saved state of what runs, and its conversion to another world size.

Every rank saves a *slot* with its residuals. State that is equal on all ranks is stored beside the
slots. So the states of all ranks can be merged, and torch.distributed.checkpoint, which stores only
one value per key, stores every slot.

Digests cover what is beside the slots, and each slot together with that. `expect_sound` compares
them before a state is loaded; all other functions trust what they get.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch

from gradferry import _native
from gradferry.averaging.running import Running
from gradferry.averaging.tiles import (
    KINDS,
    Slot,
    fold,
    held_tiles,
    ids,
    rescale,
    resize,
    zero_residual,
)
from gradferry.core.agreement import record_hash
from gradferry.core.codec_spec import CodecSpec
from gradferry.core.values import shown
from gradferry.core.warn import warn
from gradferry.errors import ConfigError, StateError

FORMAT = 4
LAYOUT = "layout"  # of every parameter, as JSON text
NODES = "nodes"  # ranks by node, as JSON text
# For how many steps residuals hold what is missing of gradients, before they hold momentum. Always
# there: torch.distributed.checkpoint loads the keys that the new hook has.
COMPRESSED_WARMUP = "compressed_warmup"
DIGEST = "digest"
CHOICE = "choice"  # of codec="auto"; a state of a named codec has none
_OF_ALL_RANKS = (
    *("format", NODES, "codec", "world_size", "error_feedback", "momentum", "seed", LAYOUT),
    *("steps", "loss_scale", COMPRESSED_WARMUP),
)
_OF_ONE_RANK = (*KINDS, *(f"{kind}_tiles" for kind in KINDS))
ON_RESIZE = ("strict", "mean", "fold", "drop")
_SLOT = re.compile(r"slot_(0|[1-9][0-9]{0,5})")
# The name of a part of a sharded model that has a state of its own.
_PART = re.compile(r"shard_\d+_of_\d+(_at(_\d+)+)?|group_of_rank_\d+")

SavedState = dict[str, Any]


def save(running: Running, passed_steps: int, kept: Mapping[str, Any] | None = None) -> SavedState:
    """The state of this rank, not `signed` yet.

    Args:
        running: between steps.
        passed_steps: steps that passed through, where there is no engine to count them.
        kept: what this returned for the same engine, and nobody uses any more: its memory is used
            again.

    Raises:
        StateError: the engine failed, or is in the middle of a step.
    """
    steps, worker, owner, scale = passed_steps, zero_residual(0), zero_residual(0), 0.0
    name, config, tiles = f"slot_{running.rank}", running.config, running.tiles()
    if running.engine is not None:
        slot = (kept or {}).get(name, {})
        before = slot.get("worker"), slot.get("owner")
        steps, worker, owner, scale = running.engine.state(
            kept_worker=before[0], kept_owner=before[1]
        )
        # The memory was used, so that there are as many elements, of the same tiles.
        if kept is not None and worker is before[0] and owner is before[1]:
            return {**kept, "steps": steps, "loss_scale": scale}
    return {
        "format": FORMAT,
        **_identity(running),
        "steps": steps,
        "loss_scale": scale,
        COMPRESSED_WARMUP: config.warmup_steps if config.holds_gradients(0) else 0,
        name: {
            "worker": worker,
            "owner": owner,
            "worker_tiles": held_tiles(tiles, "worker") if worker.numel() else ids(()),
            "owner_tiles": held_tiles(tiles, "owner") if owner.numel() else ids(()),
        },
    }


def signed(state: Mapping[str, Any]) -> SavedState:
    """The state with digests of what it holds now."""
    slots, digest = {name: state[name] for name in _slot_names(state)}, _digest(state)
    slots = {name: {**s, DIGEST: _slot_digest(name, s, digest)} for name, s in slots.items()}
    return {**state, **slots, DIGEST: digest}


def expect_sound(saved: Any, on_resize: object) -> None:
    """Checks that a state is what `signed` returned, or merged of that.

    Raises:
        ConfigError: unknown ``on_resize``.
        StateError: it is not.
    """
    if not (isinstance(on_resize, str) and on_resize in ON_RESIZE):
        raise ConfigError(f"on_resize={shown(on_resize)} is none of {', '.join(ON_RESIZE)}")
    if isinstance(saved, Mapping) and not same(saved.get("format", FORMAT), FORMAT):
        raise StateError(
            f"the saved state has format {shown(saved['format'])}, and this gradferry reads format "
            f"{FORMAT}; load it with the version that saved it"
        )
    part = "it"
    try:
        digest = _digest(saved)
        is_sound = same(saved[DIGEST], digest)
        for part in _slot_names(saved) if is_sound else ():
            slot: Mapping[str, torch.Tensor] = dict(saved[part])
            is_sound = torch.equal(slot[DIGEST].cpu(), _slot_digest(part, slot, digest))
            if not is_sound:
                break
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        is_sound = False  # it may hold anything
    if not is_sound:
        raise StateError(
            f"the saved state, of type {type(saved).__name__}, is not what state_dict() returned: "
            f"{part} was damaged, or changed since; load another one"
        )


def load(
    running: Running,
    saved: Mapping[str, Any],
    on_resize: str,
    *,
    chosen: CodecSpec | None = None,
    is_own: bool = True,
) -> int:
    """Restores what `save` returned, on this rank.

    Args:
        running: between steps.
        saved: of this rank, or merged of all.
        on_resize: see `HookState.load_state_dict`.
        chosen: the codec that codec="auto" had chosen when the state was saved.
        is_own: False: for another part of a sharded model, for ``"drop"`` alone.

    Returns:
        The number of steps that were finished.

    Raises:
        StateError: see `HookState.load_state_dict`.
    """
    steps: int = saved["steps"]
    if running.engine is not None:
        check(running, saved, on_resize)
        worker, owner = _residuals(running, saved, on_resize, chosen, is_own=is_own)
        scale: float = saved["loss_scale"]
        running.engine.load_state(
            steps=steps, worker_residual=worker, owner_residual=owner, loss_scale=scale
        )
    elif holds_residuals(saved):
        warn("gradients pass through without gradferry: the saved residuals are not used")
    return steps


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
    """Checks that a state fits a running engine. With ``"drop"`` the model may be another one.

    Raises:
        StateError: another hook saved it, or its residuals hold what this one's will not.
    """
    config = running.config
    for field, ours in _identity(running).items():
        theirs = saved[field]
        differs = theirs != ours and field not in ("world_size", NODES)
        if not differs or (field == LAYOUT and on_resize == "drop"):
            continue
        what = f"{field} {theirs!r}, this hook has {ours!r}"
        raise StateError(
            f"the saved state has {_difference(theirs, ours) if field == LAYOUT else what}; load "
            "it with the arguments and the model it was saved with, or, if only the model or its "
            "shards are others, begin without residuals with on_resize='drop'"
        )
    step, until = saved["steps"], saved[COMPRESSED_WARMUP]
    if (step < until) != config.holds_gradients(step):
        raise StateError(
            f"the saved state is of step {step} of a training whose warm-up was compressed for "
            f"{until} steps, this hook has warmup_steps={config.warmup_steps} and "
            f"warmup={str(config.warmup)!r}: before the end of a compressed warm-up residuals do "
            "not hold momentum; load it with the arguments it was saved with"
        )


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
            elif not same(merged[key], value):
                raise StateError(
                    f"the states to merge differ in {key}: {shown(merged[key])} and "
                    f"{shown(value)}; they are not of one step of one training"
                )
    if not merged:
        raise StateError("there is no state to merge")
    return merged


def _residuals(
    running: Running,
    saved: Mapping[str, Any],
    on_resize: str,
    chosen: CodecSpec | None,
    *,
    is_own: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The worker and the owner residual with which this rank continues. Arguments as for `load`,
    of a state that was checked.

    Raises:
        StateError: the state does not fit.
    """
    identity, rank, tiles = _identity(running), running.rank, running.tiles()
    slots, saved_size, nodes = _slots(saved), saved["world_size"], json.loads(saved[NODES])
    is_same = is_own and all(saved[field] == identity[field] for field in (NODES, LAYOUT))
    if is_same and (rank in slots or on_resize != "fold"):
        if rank not in slots:
            raise StateError(
                f"the saved state has no slot_{rank}, only {_names(slots)}; every rank loads what "
                "it saved itself, or the merged states of all ranks"
            )
        return slots[rank]["worker"], slots[rank]["owner"]
    if on_resize == "strict":
        field = NODES if saved_size == running.world_size else "world_size"
        raise StateError(
            f"the saved state has {field} {saved[field]!s:.400}, this hook has "
            f"{identity[field]!s:.400}; load the merged states of all ranks with "
            "on_resize='mean', this rank's own with on_resize='fold', or begin without residuals "
            "with on_resize='drop'"
        )
    if on_resize == "drop":
        return zero_residual(0), zero_residual(0)
    if on_resize == "fold":
        if not running.exchange.nodes.is_flat or len(nodes) < saved_size:
            raise StateError(
                "on_resize='fold' is for the flat exchange: ranks of a node share residuals; "
                "load the merged states of all ranks with on_resize='mean'"
            )
        if len(slots) != 1:
            raise StateError(
                "on_resize='fold' takes what this rank itself saved, and the state has "
                f"{_names(slots)}; load that, or the merged states of all ranks with "
                "on_resize='mean'"
            )
        (slot,) = slots.values()
        worker, owner = fold(slot, (saved_size, running.world_size), tiles)
    else:
        missing = next((r for r in range(saved_size) if r not in slots), None)
        if missing is not None:
            raise StateError(
                f"on_resize='mean' needs the slots of all {saved_size} ranks, and "
                f"slot_{missing} is missing; merge the states of all ranks first"
            )
        worker, owner = resize([[slots[rank] for rank in node] for node in nodes], tiles)
    if not running.config.holds_gradients(saved["steps"]):
        # From saved residuals to those that deliver the same momentum.
        before = running.momentum_shares(exchanges=saved_size != 1, codec=chosen)
        now = running.momentum_shares(exchanges=running.transport.exchanges)
        rescale(worker, owner, tiles, before, now)
    if on_resize == "mean" and not (worker.any() or owner.any()):
        return zero_residual(0), zero_residual(0)  # a world of one needs no memory
    return worker, owner


def _slot_names(saved: Mapping[Any, Any]) -> list[str]:
    return [key for key in saved if isinstance(key, str) and _SLOT.fullmatch(key)]


def _slots(saved: Mapping[str, Any]) -> dict[int, Slot]:
    """The slots by rank, on the host whatever ``map_location`` they were loaded with."""
    return {
        int(name.removeprefix("slot_")): {key: saved[name][key].cpu() for key in _OF_ONE_RANK}
        for name in _slot_names(saved)
    }


def _digest(state: Mapping[str, Any]) -> int:
    """Of what is equal on all ranks."""
    return record_hash([state.get(name) for name in (*_OF_ALL_RANKS, CHOICE)])


def _slot_digest(name: str, slot: Slot, beside: int) -> torch.Tensor:
    """Of a slot, in a state with this digest: a tensor, since integrations gather slots as such."""
    values = [slot[key] for key in _OF_ONE_RANK]
    kinds = [[str(value.dtype), list(value.shape)] for value in values]
    return ids([record_hash([name, beside, kinds, _native.parameter_hashes(values)]) >> 1])


def same(one: object, other: object) -> bool:
    """Whether two fields of states are equal. What `state_dict` never writes equals nothing."""
    return isinstance(one, str | int | float | dict | type(None)) and bool(one == other)


def holds_residuals(saved: Mapping[str, Any]) -> bool:
    """Whether residuals of a state hold something."""
    return any(bool(slot[kind].any()) for slot in _slots(saved).values() for kind in KINDS)


def _difference(saved: str, mine: str) -> str:
    """The first parameter that differs between two layouts, for an error message."""
    theirs, ours = json.loads(saved), json.loads(mine)
    index = next(i for i, (they, we) in enumerate(zip_longest(theirs, ours)) if they != we)
    they, we = ((each[index:] or [{}])[0] for each in (theirs, ours))
    name = f"parameter {index} ({(we or they)['name']})"
    if not (they and we):
        return f"{name}, this hook has none" if they else f"no {name}"
    field = next(key for key in we if they.get(key) != we[key])
    return f"{name} with {field} {they.get(field)!r}, this hook has {we[field]!r}"


def _names(slots: Iterable[int]) -> str:
    return ", ".join(f"slot_{number}" for number in sorted(slots)) or "no slot"
