"""Results as JSON: {"schema": 1, "environment": {...}, "rows": [...]}."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradferry.reporting.environment import environment

SCHEMA = 1


def write_json(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows with the present environment; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": SCHEMA, "environment": environment(), "rows": _finite(rows)}
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
