"""Values of options, of whatever library."""

from __future__ import annotations

import operator


def as_whole(value: object) -> int | None:
    """The value if it is a whole number, also one of NumPy or torch; no bool is."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
