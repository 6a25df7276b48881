"""The saved state of what runs, and its conversion to another world size.

Every rank saves a *slot* with its residuals. State that is equal on all ranks is stored beside the
slots. So the states of all ranks can be merged, and torch.distributed.checkpoint, which stores only
one value per key, stores every slot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

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
from gradferry.core.codec_spec import CodecSpec
from gradferry.core.warn import warn
from gradferry.errors import ConfigError, StateError

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
        _check_identity(saved, {"world_size": running.world_size}, on_resize)
        if holds_residuals(saved):
            warn("gradients pass through without gradferry: the saved residuals are not used")
        return _steps_and_scale(saved)[0]
    check(running, saved, on_resize)
    return _go_on(running, saved, *_residuals(running, saved, on_resize, chosen))


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
        if _is_of_other_shards(saved.get(LAYOUT), mine[LAYOUT]):
            mine[LAYOUT] = saved[LAYOUT]
        check(running, saved, on_resize, mine)
        is_known = len(_slots(saved)) == int(saved["world_size"]) or not could_lose
        if on_resize != "drop" and (holds_residuals(saved) or not is_known):
            raise StateError(
                "the saved state is of other shards, and residuals stay with their shard: load it "
                "with as many shards as saved it, or go on without residuals, with "
                "on_resize='drop'"
            )
    return _go_on(running, states[0], zero_residual(0), zero_residual(0))


def _go_on(
    running: Running, saved: Mapping[str, Any], worker: torch.Tensor, owner: torch.Tensor
) -> int:
    steps, scale = _steps_and_scale(saved)
    if running.engine is not None:
        running.engine.load_state(
            steps=steps, worker_residual=worker, owner_residual=owner, loss_scale=scale
        )
    return steps


def is_of_these_shards(running: Running, saved: object) -> bool:
    """False where a state is of the same model, divided among other ranks."""
    kept = saved.get(LAYOUT) if isinstance(saved, Mapping) else None
    return not _is_of_other_shards(kept, running.saved_layout)


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


def check(
    running: Running,
    saved: Mapping[str, Any],
    on_resize: str,
    identity: Mapping[str, Any] | None = None,
) -> None:
    """Checks that a state fits a running engine, or what has this identity.

    Raises:
        ConfigError: unknown ``on_resize``.
        StateError: another hook saved it, or its residuals hold what this one's will not.
    """
    _check_identity(saved, identity or _identity(running), on_resize)
    step, _ = _steps_and_scale(saved)
    until = saved.get(COMPRESSED_WARMUP, 0)
    if type(until) is not int or (step < until) != running.config.holds_gradients(step):
        config = running.config
        raise StateError(
            f"the saved state is of step {step} of a training whose warm-up was compressed for "
            f"{shown(until)} steps, this hook has warmup_steps={config.warmup_steps} and "
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


def _residuals(
    running: Running, saved: Mapping[str, Any], on_resize: str, chosen: CodecSpec | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The worker and the owner residual with which this rank continues. Arguments as for `load`,
    of a state that was checked.

    Raises:
        StateError: the state does not fit.
    """
    identity, rank, tiles = _identity(running), running.rank, running.tiles()
    slots, saved_size = _slots(saved), saved["world_size"]
    is_same = saved_size == running.world_size and _members(saved) == _members(identity)
    is_same &= same(saved[LAYOUT], identity[LAYOUT])
    if is_same and (rank in slots or on_resize != "fold"):
        if rank not in slots:
            raise StateError(
                f"the saved state has no slot_{rank}, only {_names(slots)}; every rank loads what "
                "it saved itself, or the merged states of all ranks"
            )
        mine = slots[rank]
        # A rank without residuals may have saved it, such as one without an engine.
        if any(value.numel() for value in mine.values()):
            for kind in KINDS:
                if not torch.equal(mine[f"{kind}_tiles"], held_tiles(tiles, kind)):
                    raise StateError(
                        f"the saved state's slot_{rank} has the {kind} residuals of other tiles "
                        "than this rank; it was damaged"
                    )
        return mine["worker"], mine["owner"]
    if on_resize == "strict":
        raise StateError(
            f"the saved state has {_what_differs(saved, identity)}; load the merged states of all "
            "ranks with on_resize='mean', this rank's own with on_resize='fold', or begin without "
            "residuals with on_resize='drop'"
        )
    if on_resize == "drop":
        return zero_residual(0), zero_residual(0)
    held = running.residuals_in(saved_size, codec=chosen)
    if on_resize == "fold":
        if not (_is_flat(saved) and _is_flat(identity)):
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
        worker, owner = fold(slot, (saved_size, running.world_size), tiles, held)
    else:
        missing = next((r for r in range(saved_size) if r not in slots), None)
        if missing is not None:
            raise StateError(
                f"on_resize='mean' needs the slots of all {shown(saved_size)} ranks, and "
                f"slot_{missing} is missing; merge the states of all ranks first"
            )
        worker, owner = resize([slots[r] for r in range(saved_size)], _members(saved), tiles, held)
    if not running.config.holds_gradients(saved["steps"]):
        # From saved residuals to those that deliver the same momentum.
        before = running.momentum_shares(exchanges=saved_size != 1, codec=chosen)
        now = running.momentum_shares(exchanges=running.transport.exchanges)
        rescale(
            worker, owner, tiles, [ours / theirs for ours, theirs in zip(now, before, strict=True)]
        )
    if on_resize == "mean" and not (worker.any() or owner.any()):
        return zero_residual(0), zero_residual(0)  # a world of one needs no memory
    return worker, owner


def _steps_and_scale(saved: Mapping[str, Any]) -> tuple[int, float]:
    """Finished steps, and the loss scale of the residuals. Raises StateError."""
    steps, scale = saved["steps"], saved["loss_scale"]
    if type(steps) is not int or not 0 <= steps < 2**63:
        raise StateError(f"the saved state has steps {shown(steps)}, which is no count")
    if type(scale) is not float or not (scale == 0 or _SMALLEST_SCALE <= scale < 2.0**128):
        raise StateError(f"the saved state has loss_scale {shown(scale)}, which is no scale")
    return steps, scale


def _check_identity(
    saved: Mapping[str, Any], identity: Mapping[str, Any], on_resize: str = "strict"
) -> None:
    """Checks that the state was saved by a hook like the one that loads it.

    Args:
        saved: from `save` or `merge`.
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


def _is_of_other_shards(saved: object, mine: str) -> bool:
    """Whether a layout is of the same model, divided among other ranks than this one."""
    try:
        theirs, ours = _parameters(saved), _parameters(mine)
        known = [{(each["name"], each["dtype"]) for each in part} for part in (theirs, ours)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False
    return theirs != ours and known[0] == known[1]


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


def _names(slots: Iterable[int]) -> str:
    return ", ".join(f"slot_{number}" for number in sorted(slots)) or "no slot"
