"""Files that are either complete or absent, however the process ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def durable_file(path: Path, draft: Path | None = None) -> Iterator[BinaryIO]:
    """Opens a temporary file for writing, and renames it to `path` when it is on the disk.

    Args:
        path: is replaced.
        draft: the temporary file, which exists already; None: a new one. Whoever removes the draft
            before it is renamed keeps `path` from being replaced.

    Raises:
        OSError: it names the file. FileNotFoundError: the draft was removed.
    """
    temporary = path.with_suffix(".tmp") if draft is None else draft
    try:
        with temporary.open("wb" if draft is None else "r+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # A full disk is met by write() and fsync(), which do not know the name.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
