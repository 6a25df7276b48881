"""Files that survive a crash whole, and say what is in them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from gradferry.errors import StateError

_READ_BYTES = 1 << 20


def write_content(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Writes a file that is complete or absent, and flushes it to disk.

    Returns:
        Its size and digest, for `read_content`.

    Raises:
        OSError: it cannot be written.
        StateError: `read_content` would refuse it.
    """
    outside = sys.exc_info()[1]  # the caller may be handling an error of its own
    with durable_file(path) as file:
        try:
            torch.save(content, file)
            file.flush()
            # Reads only names and shapes.
            torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            if (cause := _os_error(error, outside)) is not None:
                raise cause from None
            raise StateError(
                f"{_refused(content)}, which a checkpoint cannot hold: save tensors, "
                "numbers, strings and containers of them (.item() and .tolist() make them of "
                "NumPy's), or name the type to torch.serialization.add_safe_globals() wherever it "
                "is saved and loaded"
            ) from error
    return _fingerprint(path)


def read_content(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """What a file holds, tensors on the CPU.

    Args:
        path: of the file.
        expected: what `write_content` returned.

    Raises:
        OSError: it cannot be read.
        StateError: it is not what was saved, or could run code.
    """
    found = _fingerprint(path)
    if found != expected:
        raise StateError(
            f"{path} is not what was saved: it has {found['bytes']} bytes with digest "
            f"{found['blake2b']}, the manifest says {expected.get('bytes')} with "
            f"{expected.get('blake2b')}"
        )
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise StateError(
            f"{path} holds what this process does not load, since it could run code: {error}"
        ) from error
    return content


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
        return {"bytes": file.tell(), "blake2b": digest.hexdigest()}


def _os_error(error: BaseException | None, outside: BaseException | None) -> OSError | None:
    """What the system said, which torch replaces by an error of its own. `outside` came before."""
    while error is not None and error is not outside:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _refused(content: dict[str, Any]) -> str:
    """Names the innermost part of it that cannot be loaded."""
    for path, value in _parts(content, "content"):
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            continue  # without a copy of it
        try:
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            torch.load(file, map_location="cpu", weights_only=True)
        except Exception:
            return f"{path} is a {type(value)}"
    return "content is what torch.load refuses"


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield f"the key {key!r} of {path}", key
        yield from _parts(item, f"{path}[{key!r}]")
    yield path, value


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
