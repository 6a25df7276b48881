"""Results as JSON: {"schema": 1, "results_of": "bench train", "environment": {...}, "rows": [...]},
a row on each line; and where and when a result was obtained.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from gradferry import _native
from gradferry._build_info import GRADFERRY_VERSION
from gradferry.errors import ConfigError
from rich.console import Console

from gradferry_lab.output.table import print_line, replace_file

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
    replace_file(path, text)


def save_rows(
    console: Console,
    path: Path | None,
    rows: Sequence[Mapping[str, Any]],
    place: Mapping[str, Any] | None = None,
    *,
    results_of: str,
) -> None:
    """Calls `write_json` if --json names a file, and says so."""
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


def environment() -> dict[str, Any]:
    """Versions and machine, for the `environment` of every JSON file."""
    return {
        "gradferry": GRADFERRY_VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": _native.active_isa(),
        "os": os_name(),
    }


def occasion() -> dict[str, Any]:
    """When this is, and the command line that this process was started with."""
    name = Path(sys.argv[0]).name
    command = ["gradferry" if name == "__main__.py" else name, *sys.argv[1:]]
    now = datetime.now(timezone.utc).isoformat(timespec="minutes")
    return {"date": now, "command": shlex.join(command)}


def cpu_model() -> str:
    """The processor's name as Linux reports it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def os_name() -> str:
    """Distribution and kernel."""
    try:
        distribution = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        distribution = platform.system()
    return f"{distribution}, {platform.system()} {platform.release()}"
