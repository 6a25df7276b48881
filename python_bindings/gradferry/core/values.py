"""Values of options, of whatever library."""

from __future__ import annotations

import operator


def as_whole(value: object) -> int | None:
    """The value if it is a whole number, also one of NumPy or torch; no bool is."""
    is_bool = "bool" in str(getattr(value, "dtype", type(value)))
    if is_bool or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # of a tensor without a value
        return None


def shown(value: object) -> str:
    """A value, which may be anything, in an error message."""
    try:
        text = repr(value)
    except Exception:  # of a number with very many digits, for example
        text = f"of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."
