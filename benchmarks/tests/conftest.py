"""A command as a user runs it, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gradferry_lab.cli import main


@pytest.fixture
def rows_of(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """rows_of("plan", "--smoke") runs a command, which must succeed; the rows of its JSON file."""

    def run(*words: str) -> list[dict[str, Any]]:
        file = tmp_path / "rows.json"
        assert main([*words, "--json", str(file)]) == 0
        return json.loads(file.read_text())["rows"]

    return run


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is started fails the test."""
    monkeypatch.setattr(
        "multiprocessing.process.BaseProcess.start", lambda _: pytest.fail("started a process")
    )
