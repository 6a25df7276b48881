"""Parametrizations that multiply: a few rows are quick, the rest of the product is slow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def rows(*axes: Sequence[Any], turns: int = 1) -> list[Any]:
    """All rows of the product. Quick ones have every value of each axis: they go along the
    diagonal, and in every further turn along one that is shifted by an axis' place.
    """
    quick = [
        tuple(axis[(number + turn * place) % len(axis)] for place, axis in enumerate(axes))
        for turn in range(turns)
        for number in range(max(map(len, axes)))
    ]
    product = itertools.product(*axes)
    return [pytest.param(*row, marks=() if row in quick else pytest.mark.slow) for row in product]
