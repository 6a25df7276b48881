"""Saved states: whether two are equal, and copies of which a part is lost or wrong."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

LOST, NAN = "(lost)", "(not finite)"  # in place of a value


def same(one: Any, other: Any) -> bool:
    """Whether two saved states, or lists of tensors and arrays, are equal to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def damaged(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with this value at a path, or without it, or with its last element not finite."""
    wrong = inner = copy.deepcopy(state)
    *parts, last = path
    for part in parts:
        inner = inner[part]
    if isinstance(value, str) and value == LOST:
        del inner[last]
    elif isinstance(value, str) and value == NAN:
        inner[last].view(-1)[-1] = torch.nan
    else:
        inner[last] = value
    return wrong
