"""Results of trainings, one file each, and trainings that are under way, in a folder each."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradferry_lab.converge.suite import Training
from gradferry_lab.flags import make_folder
from gradferry_lab.output.table import Row, replace_file
from gradferry_lab.workloads.training import Progress


class Results:
    """A folder of results. Ignores those of other settings, versions, or data of a task.

    Raises ConfigError when the folder cannot be made.
    """

    def __init__(
        self, folder: Path, versions: Mapping[str, Any], sources: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._versions = dict(versions)
        self._sources = sources
        make_folder(folder)

    def find(self, training: Training) -> Row | None:
        """The row of a training that was finished before, or None."""
        try:
            document = json.loads(self._path(training).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        row: Row | None = document.get("row")
        return row if document == self._document(training, row) else None

    def add(self, training: Training, row: Row) -> None:
        """Writes a row to a file, atomically, and removes what was saved on the way to it."""
        replace_file(self._path(training), json.dumps(self._document(training, row)))
        shutil.rmtree(self._path(training).with_suffix(".saved"), ignore_errors=True)

    def progress(self, training: Training, deadline: float) -> Progress:
        """Where a training is saved on the way to its row."""
        settings = json.dumps(self._document(training, None))
        return Progress(self._path(training).with_suffix(".saved"), settings, deadline)

    def _document(self, training: Training, row: Row | None) -> dict[str, Any]:
        settings = json.loads(json.dumps(asdict(training)))
        source = self._sources[training.task]
        return {"versions": self._versions, "training": settings, "source": source, "row": row}

    def _path(self, training: Training) -> Path:
        return self._folder / f"{re.sub(r'[^a-zA-Z0-9.]+', '-', training.title)}.json"
