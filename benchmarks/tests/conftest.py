"""A command as a user runs it, in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gradferry_lab.cli import main

DOCUMENTS = Path(__file__).parents[2] / "docs"
DEFINED = {  # by the first word of a command: the page that defines keys of its rows
    "bench": DOCUMENTS / "results/performance.md",
    "doctor": DOCUMENTS / "guide/numbers.md",
    "plan": DOCUMENTS / "guide/numbers.md",
}


def undefined(page: Path, row: dict[str, Any]) -> list[str]:
    """Keys of a row that a page does not define: "`key`", or "`key` (`_low`)" for "key_low"."""
    names = set(re.findall(r"`(\w+)`", page.read_text()))
    return [
        key
        for key in row
        if key not in names and not {key.rpartition("_")[0], f"_{key.rpartition('_')[2]}"} <= names
    ]


@pytest.fixture
def rows_of(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """rows_of("doctor", "--smoke") runs a command, which must succeed; the rows of its JSON file,
    whose keys must be documented.
    """

    def run(*words: str) -> list[dict[str, Any]]:
        file = tmp_path / "rows.json"
        assert main([*words, "--json", str(file)]) == 0
        rows = json.loads(file.read_text())["rows"]
        if page := DEFINED.get(words[0]):
            assert [undefined(page, row) for row in rows] == [[]] * len(rows)
        return rows

    return run


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is started fails the test."""
    monkeypatch.setattr(
        "multiprocessing.process.BaseProcess.start", lambda _: pytest.fail("started a process")
    )
