"""Saved states with parts that are lost, changed or foreign, as hypothesis draws them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TENSORS = {
    "fp64": lambda: torch.ones(16, dtype=torch.float64),
    "two dimensions": lambda: torch.ones(4, 4),
    "empty": lambda: torch.empty(0),
    "no ids": lambda: torch.empty(0, dtype=torch.int64),
    "one id": lambda: torch.zeros(1, dtype=torch.int64),
    "negative ids": lambda: torch.tensor([-1, -(2**63)]),
    "huge ids": lambda: torch.tensor([2**62, 2**63 - 1]),
    "ids twice": lambda: torch.zeros(3, dtype=torch.int64),
    "not finite": lambda: torch.full((64,), float("nan")),
    "infinite": lambda: torch.full((64,), float("-inf")),
    "another size": lambda: torch.ones(48),
    "no multiple of a block": lambda: torch.ones(17),
    "strided": lambda: torch.ones(96)[::2],
    "meta": lambda: torch.empty(64, device="meta"),
    "sparse": lambda: torch.ones(64).to_sparse(),
    "complex": lambda: torch.ones(8, dtype=torch.complex64),
    "needs a gradient": lambda: torch.ones(64, requires_grad=True),
}


@dataclasses.dataclass(frozen=True)
class Foreign:
    """One of TENSORS, by its name: some do not travel between processes."""

    name: str


TEXTS = (
    *("", "q4", "none", "exact", "flat", "two_level", "q4:bits=3", "\ud800", "slot_0", "NaN", "[]"),
    *("[[0, 1], [2]]", "[[0], [1], [2]]", "[[0, 0], [2]]", "[0]", "{}", "[[[]]]", "1e999"),
    *('[["0"]]', "[" * 100_000, "9" * 5000, "[" + "9" * 5000 + "]", '[{"name": 1}]', "[null]"),
)
NUMBERS = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1, 2**64, -(2**63) - 1]),
    st.none().map(lambda _: 10**5000),  # Python does not write out such a number
    st.floats(),
    st.sampled_from([1e-45, 1e-39, 2.0**-126, 3.5e38, 1e300, 5e-324]),
    st.booleans(),
)
VALUES = st.one_of(
    NUMBERS,
    st.none(),
    st.sampled_from(TEXTS),
    st.text(max_size=20),
    st.binary(max_size=8),
    st.sampled_from(sorted(TENSORS)).map(Foreign),
    st.sampled_from([np.int64(3), np.float32("nan"), np.arange(3), np.array("q4")]),
    st.recursive(
        NUMBERS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=5,
    ),
)
KEYS = st.one_of(
    st.sampled_from(
        [
            *("slot_0", "slot_1", "slot_2", "slot_3", "slot_00", "slot_-1", "slot_" + "9" * 5000),
            *("nodes", "choice", "format", "worker_tiles", "compressed_warmup", "", 0, None, (1,)),
        ]
    ),
    st.text(max_size=8),
)
# (where, what): a part of the state by its number, or a new key; a value, or its loss.
LOSS = "(lost)"
CHANGES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 30), KEYS.map(lambda key: ("new", key))),
        st.one_of(VALUES, st.just(LOSS)),
    ),
    min_size=1,
    max_size=3,
)


def examples(count: int) -> settings:
    """The same ones in every run."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Examples, for processes in which hypothesis does not run."""
    found: list[Any] = []

    @examples(count)
    @given(strategy)
    def keep(value: Any) -> None:
        found.append(value)

    keep()
    return found


def made(value: Any) -> Any:
    """What stands for a value that does not travel."""
    return TENSORS[value.name]() if isinstance(value, Foreign) else value


def damaged(saved: Mapping[str, Any], changes: list[tuple[Any, Any]]) -> dict[str, Any]:
    """A copy of a state with these changes."""
    wrong: dict[Any, Any] = copy.deepcopy(dict(saved))
    places = [(wrong, key) for key in wrong]
    for part in [value for value in wrong.values() if isinstance(value, dict)]:
        places += [(part, key) for key in part]
        places += [(p, key) for p in part.values() if isinstance(p, dict) for key in p]
    for where, what in changes:
        owner, key = (wrong, where[1]) if isinstance(where, tuple) else places[where % len(places)]
        if isinstance(what, str) and what == LOSS:
            owner.pop(key, None)
        else:
            owner[key] = made(what)
    return wrong
