"""Parametrizations that multiply: a few rows are quick, the rest of the product is slow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def rows(*axes: Sequence[Any]) -> list[Any]:
    """All rows of the product. Quick ones, along the diagonal, have every value of each axis."""
    quick = [
        tuple(axis[number % len(axis)] for axis in axes) for number in range(max(map(len, axes)))
    ]
    product = itertools.product(*axes)
    return [pytest.param(*row, marks=() if row in quick else pytest.mark.slow) for row in product]
