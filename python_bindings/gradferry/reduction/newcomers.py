"""What members of a group have in common reaches those who lack it: tensors and an optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradferry.core.agreement import Record
from gradferry.core.meeting import say_failed, wait_or_hear
from gradferry.errors import PeerError, ProtocolError

# What an optimizer may keep of a parameter.
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.int64)}
_MOST_ENTRIES = 8  # of a parameter
_State = dict[int, dict[str, Any]]


def outline(optimizer: torch.optim.Optimizer) -> Record:
    """What an optimizer has, without the content of tensors: a record for `hand_on`.

    Tensors of dtypes that optimizers do not use, and values that JSON has not, are left out.
    """
    saved = optimizer.state_dict()
    entries: list[list[Any]] = []
    for index, kept in sorted(saved["state"].items()):
        for key, value in sorted(kept.items()):
            if isinstance(value, torch.Tensor) and str(value.dtype) in _DTYPES:
                entries.append([index, key, str(value.dtype), list(value.shape)])
            elif _is_plain(value):
                entries.append([index, key, None, value])
    groups = [
        {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
        for group in saved["param_groups"]
    ]
    return {"entries": entries, "groups": groups}


def _is_plain(value: object) -> bool:
    try:
        return json.loads(json.dumps(value, allow_nan=False)) is not None
    except (TypeError, ValueError):
        return False


def hand_on(
    tensors: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    outlined: object,
    source: int,
    group: dist.ProcessGroup,
    place: torch.device,
    *,
    takes: bool,
) -> None:
    """Gives tensors, and the state of their optimizer, to ranks that lack them. Collective.

    Args:
        tensors: of equal shapes and dtypes on all ranks.
        optimizer: of these tensors, with the options of the source (`adopt_options`).
        outlined: what `outline` returned on the source.
        source: the rank in the group that has them.
        group: of the ranks.
        place: a device that the group has a backend for.
        takes: whether this rank puts what it receives in the place of what it has.

    Raises:
        ProtocolError: the outline fits no optimizer of these tensors.
        PeerError: a rank was lost. Nothing was changed here.
    """
    entries, _ = _checked(outlined, optimizer)
    mine = optimizer.state_dict()
    gives = group.rank() == source

    def travel(shape: Sequence[int], dtype: torch.dtype, value: torch.Tensor | None) -> Any:
        message = torch.empty(tuple(shape), dtype=dtype, device=place)
        if value is not None:
            message.copy_(value)
        try:
            wait_or_hear(group.broadcast(message, source), group)
        except RuntimeError as error:
            say_failed(group)  # to ranks that are not connected with the one that was lost
            raise PeerError(
                f"a rank was lost while newcomers got what the others have: {error}"
            ) from error
        return message

    received: list[torch.Tensor] = []
    state: _State = {}
    with torch.no_grad():
        for tensor in tensors:
            message = travel(tensor.shape, tensor.dtype, tensor if gives else None)
            if takes:
                received.append(message)
        for index, key, dtype, content in entries:
            if dtype is not None:
                value = mine["state"][index][key] if gives else None
                content = travel(content, _DTYPES[dtype], value)
            if takes:
                state.setdefault(index, {})[key] = content
        for tensor, message in zip(tensors, received, strict=takes):
            tensor.copy_(message)
    if takes:
        optimizer.load_state_dict({"state": state, "param_groups": mine["param_groups"]})


def adopt_options(optimizer: torch.optim.Optimizer, outlined: object) -> None:
    """Takes over rates and other options from what `outline` returned elsewhere.

    Raises:
        ProtocolError: as `hand_on`.
    """
    _, groups = _checked(outlined, optimizer)
    for own, given in zip(optimizer.param_groups, groups, strict=True):
        own.update(given)


def _checked(
    outlined: object, optimizer: torch.optim.Optimizer
) -> tuple[list[Any], list[Mapping[str, Any]]]:
    """The entries and groups of an outline from another rank. Raises ProtocolError."""
    own = optimizer.param_groups
    places = [parameter for group in own for parameter in group["params"]]  # as state_dict() counts
    given = outlined if isinstance(outlined, dict) else {}
    entries, groups = given.get("entries"), given.get("groups")
    if not isinstance(entries, list) or not isinstance(groups, list):
        entries, groups = [], []  # which no optimizer has
    good = len(groups) == len(own)
    good = good and all(type(group) is dict and "params" not in group for group in groups)
    good = good and len(entries) <= _MOST_ENTRIES * len(places)
    try:
        for index, key, dtype, content in entries if good else ():
            good = good and type(index) is int and 0 <= index < len(places) and type(key) is str
            if dtype is not None:
                shape = list(places[index].shape)
                good = good and dtype in _DTYPES and (content == shape or content == [])
            else:
                good = good and isinstance(content, int | float)
        good = good and len({(e[0], e[1]) for e in entries}) == len(entries)
    except (TypeError, ValueError, IndexError):
        good = False
    if not good:
        raise ProtocolError(
            f"what a rank says of its outer optimizer fits none of {len(places)} parameters: its "
            "state must have tensors of their shapes; start every rank with the same code"
        )
    return entries, groups


def count_of(record: Mapping[str, Any], key: str) -> int:
    """A count that another rank has sent. Raises ProtocolError."""
    value = record.get(key)
    if type(value) is not int or not 0 <= value < 2**63:
        raise ProtocolError(
            f"a rank says that it has {value!r} {key}; start every rank with one version"
        )
    return value


def hashes_of(record: Mapping[str, Any]) -> list[int]:
    """What another rank has sent of its common parameters. Raises ProtocolError."""
    hashes = record.get("common")
    if not isinstance(hashes, list) or not all(type(each) is int for each in hashes):
        raise ProtocolError(
            "a rank has sent something else than the hashes of its common parameters; start every "
            "rank with one version"
        )
    return hashes
