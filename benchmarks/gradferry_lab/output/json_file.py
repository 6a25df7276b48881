"""Results as JSON: {"schema": 1, "results_of": "bench train", "environment": {...}, "rows": [...]},
a row on each line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradferry.core.durable import durable_file
from gradferry.errors import ConfigError
from rich.console import Console

from gradferry_lab.output.environment import environment, occasion
from gradferry_lab.output.table import print_line

SCHEMA = 1


def write_json(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    place: Mapping[str, Any] | None = None,
    *,
    results_of: str,
) -> None:
    """Writes rows with their environment; numbers that are not finite become null.

    Replaces the file atomically. `place`: the environment; by default the current one, with date
    and command line. `results_of`: the command, which tells the kind of rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(environment() | occasion() if place is None else dict(place), indent=1)
    lines = ",\n".join(json.dumps(finite(row), allow_nan=False) for row in rows)
    text = (
        f'{{\n"schema": {SCHEMA},\n"results_of": {json.dumps(results_of)},\n'
        f'"environment": {head},\n"rows": [\n{lines}\n]\n}}\n'
    )
    with durable_file(path) as file:
        file.write(text.encode())


def save_rows(
    console: Console,
    path: Path | None,
    rows: Sequence[Mapping[str, Any]],
    place: Mapping[str, Any] | None = None,
    *,
    results_of: str,
) -> None:
    """As `write_json`, where --json names a file, and says so."""
    if path is not None:
        write_json(path, rows, place, results_of=results_of)
        print_line(console, f"Written: {path}")


def read_json(path: Path) -> dict[str, Any]:
    """Reads what write_json has written. Raises ConfigError when the file is something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ConfigError(f"{path} holds no results of schema {SCHEMA}")
    return document


def finite(value: Any) -> Any:
    """`value` with null for every number that is not finite, in all its parts."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value
