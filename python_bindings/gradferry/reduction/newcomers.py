"""What members of a group have in common reaches those who lack it: tensors and an optimizer."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradferry.core.agreement import Record
from gradferry.core.meeting import say_failed, wait_or_hear
from gradferry.errors import PeerError, ProtocolError

_REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WHOLE = (torch.int64, torch.int32, torch.uint8, torch.bool)
# What an option that is a tensor may be, and what an optimizer may keep of a parameter.
_OPTION_DTYPES = {str(dtype): dtype for dtype in (*_REAL, *_WHOLE)}
_DTYPES = {**_OPTION_DTYPES, **{str(d): d for d in (torch.complex64, torch.complex128)}}
_MOST_ENTRIES = 8  # of a parameter
_MOST_NUMBERS = 1 << 10  # in an option that is a tensor
_State = dict[int, dict[str, Any]]


def outline(optimizer: torch.optim.Optimizer) -> Record:
    """What an optimizer has, without the content of tensors: a record for `hand_on`.

    Tensors of dtypes that optimizers do not use, and values that `_written` refuses, are left out.
    """
    saved = optimizer.state_dict()
    entries: list[list[Any]] = []
    for index, kept in sorted(saved["state"].items()):
        for key, value in sorted(kept.items()):
            if isinstance(value, torch.Tensor) and str(value.dtype) in _DTYPES:
                entries.append([index, key, str(value.dtype), list(value.shape)])
            elif _is_plain(value):
                entries.append([index, key, None, value])
    groups = [_options_written(group) for group in saved["param_groups"]]
    return {"entries": entries, "groups": groups}


def _is_plain(value: object) -> bool:
    try:
        return json.loads(json.dumps(value, allow_nan=False)) is not None
    except (TypeError, ValueError):
        return False


def _written(value: object) -> Any:
    """An option as JSON, from which `_read` makes it with its type. Raises TypeError or
    ValueError.

    Numbers, texts, None and lists stand for themselves; all else is a dict of its kind.
    """
    if isinstance(value, torch.Tensor):
        if str(value.dtype) not in _OPTION_DTYPES or value.numel() > _MOST_NUMBERS:
            raise TypeError("no tensor of a few numbers")
        numbers = _written(value.detach().flatten().tolist())
        return {"tensor": [str(value.dtype), list(value.shape), numbers]}
    if isinstance(value, tuple):
        return {"tuple": [_written(each) for each in value]}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("JSON has no such keys")
        return {"dict": {key: _written(each) for key, each in value.items()}}
    if isinstance(value, list):
        return [_written(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(float(value))}
    return json.loads(json.dumps(value))


def _text(written: object) -> str:
    return json.dumps(written, sort_keys=True)


def _options_written(group: Mapping[str, Any]) -> Record:
    """The options of a group that can be written."""
    options: Record = {}
    for key, value in group.items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            if key != "params":
                options[key] = _written(value)
    return options


def _read(written: Any, device: torch.device) -> Any:
    """An option that another rank has written, its tensors on a device. Raises ValueError,
    TypeError or what torch raises, where `_written` returns no such thing.
    """
    if isinstance(written, list):
        return [_read(each, device) for each in written]
    if not isinstance(written, dict):
        return written
    ((kind, content),) = written.items()
    if kind == "tuple" and isinstance(content, list):
        return tuple(_read(each, device) for each in content)
    if kind == "dict" and isinstance(content, dict):
        return {key: _read(each, device) for key, each in content.items()}
    if kind == "number":
        return float(content)
    if kind != "tensor":
        raise ValueError(f"{kind!r} is no kind of option")
    dtype, shape, numbers = content
    numbers = _read(numbers, device)
    if len(numbers) > _MOST_NUMBERS or not all(isinstance(each, int | float) for each in numbers):
        raise ValueError("no tensor of a few numbers")
    if not all(type(each) is int and each >= 0 for each in shape):
        raise ValueError("no shape")
    return torch.tensor(numbers, dtype=_OPTION_DTYPES[dtype], device=device).view(shape)


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
        raw = message.flatten().view(torch.uint8)  # backends lack some dtypes
        try:
            wait_or_hear(group.broadcast(raw, source), group)
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
    """Takes over rates and other options from what `outline` returned elsewhere. What is equal
    already stays the same object; a tensor that is not is replaced by another, as
    ``load_state_dict`` does.

    Raises:
        ProtocolError: as `hand_on`. Nothing was changed.
    """
    _, groups = _checked(outlined, optimizer)
    for own, options in zip(optimizer.param_groups, groups, strict=True):
        mine = _options_written(own)
        for key, (written, value) in options.items():
            # Texts of 1, 1.0 and True differ.
            if key not in mine or _text(mine[key]) != _text(written):
                own[key] = value


def _checked(
    outlined: object, optimizer: torch.optim.Optimizer
) -> tuple[list[Any], list[dict[str, tuple[Any, Any]]]]:
    """The entries of an outline from another rank; and by group its options, as they were written
    and as values. Raises ProtocolError.
    """
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
        options = [
            {key: (each, _read(each, _device_of(own_group, key))) for key, each in group.items()}
            for own_group, group in zip(own, groups if good else (), strict=good)
        ]
        for group in options:
            for key, (written, value) in group.items():
                good = good and _text(_written(value)) == _text(written)
                good = good and (key != "lr" or isinstance(value, int | float | torch.Tensor))
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError):
        good = False
    if not good:
        raise ProtocolError(
            f"what a rank says of its outer optimizer fits none of {len(places)} parameters: its "
            "state must have tensors of their shapes, and its options must be as they are "
            "written; start every rank with the same code"
        )
    return entries, options


def _device_of(group: Mapping[str, Any], key: str) -> torch.device:
    """Where a tensor of this option is; on the host, unless there is one elsewhere."""
    mine = group.get(key)
    return mine.device if isinstance(mine, torch.Tensor) else torch.device("cpu")


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
