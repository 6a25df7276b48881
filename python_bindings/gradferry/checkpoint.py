"""Atomic checkpoints, and states for another number of ranks.

`save` and `load` keep the latest checkpoint of a training in a folder on a shared file system: a
file per rank, and a manifest that names them, written last. A kill at any point leaves the old
checkpoint or the new one. `ResizedState` is for torch.distributed.checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from gradferry.core.agreement import error_record, gather_records, meeting_place, raise_first_error
from gradferry.core.durable import durable_file
from gradferry.core.warn import warn
from gradferry.errors import StateError
from gradferry.reduction.averaging import Averaging
from gradferry.reduction.saved_state import merge

__all__ = ["ResizedState", "exists", "load", "load_all", "merge", "save"]

_MANIFEST = "manifest.json"
_FORMAT = 1
_FILE = re.compile(r"rank-(\d+)-[0-9a-f]+\.(pt|tmp)")
_READ_BYTES = 1 << 20


def save(
    folder: str | Path, content: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Replaces the folder's checkpoint. Collective.

    Each rank writes its own file and flushes it to disk. When all have, rank 0 replaces the
    manifest. Then each rank removes its old files.

    Args:
        folder: on a file system that all ranks share. Created if it does not exist.
        content: of this rank: tensors, numbers, strings and containers of them, such as
            ``{"model": model.state_dict(), "hook": state.state_dict()}``. ``torch.load`` with
            ``weights_only=True`` must be able to load it.
        group: of the ranks that take part; the default group if None.

    Raises:
        StateError: a rank's content holds what `load` would refuse; it is named on all ranks. The
            old checkpoint is still there.
        PeerError: a rank could not write. The old checkpoint is still there.
    """
    folder = Path(folder)
    group = group or dist.group.WORLD
    assert group is not None
    rank = dist.get_rank(group)
    place = meeting_place(group, torch.device(group._device_types[0].type))
    # Names never come twice, so that no file of the old checkpoint is touched.
    name = f"rank-{rank}-{uuid.uuid4().hex[:16]}.pt"
    stale: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stale = _files_of(folder, rank, dist.get_world_size(group))
        with durable_file(folder / name) as file:
            _write(file, dict(content))
        record = {"name": name, **_fingerprint(folder / name)}
    except Exception as error:
        record = error_record(error)
    files = gather_records(record, group, place)
    if any("error" in entry for entry in files):
        _remove([folder / name])  # no manifest will name it
    raise_first_error(files)
    outcome: dict[str, Any] = {}
    if rank == 0:
        try:
            with durable_file(folder / _MANIFEST) as file:
                file.write(json.dumps({"format": _FORMAT, "files": files}, indent=1).encode())
        except Exception as error:
            outcome = error_record(error)
    raise_first_error(gather_records(outcome, group, place))
    # From here on another rank may be in its next save, so a rank removes only its own files.
    _remove(stale)


def exists(folder: str | Path) -> bool:
    """Whether the folder holds a checkpoint."""
    return (Path(folder) / _MANIFEST).exists()


def load(folder: str | Path, rank: int | None = None) -> dict[str, Any]:
    """What a rank saved.

    Args:
        folder: as for `save`.
        rank: the rank that saved; this rank of the default group if None.

    Returns:
        Its content, tensors on the CPU.

    Raises:
        StateError: there is no checkpoint, it has no such rank, or it was damaged.
    """
    files = _read_manifest(Path(folder))
    rank = dist.get_rank() if rank is None else rank
    if not 0 <= rank < len(files):
        raise StateError(
            f"the checkpoint in {folder} is of {len(files)} ranks and has nothing of rank {rank}; "
            "load_all() gives what they saved"
        )
    return _read(Path(folder), files[rank])


def load_all(folder: str | Path) -> list[dict[str, Any]]:
    """What every rank saved, in rank order, for resuming with another number of ranks.

    >>> contents = gradferry.checkpoint.load_all(folder)
    >>> saved = gradferry.checkpoint.merge(content["hook"] for content in contents)
    >>> state.load_state_dict(saved, on_resize="mean")

    Raises:
        StateError: as `load`.
    """
    return [_read(Path(folder), entry) for entry in _read_manifest(Path(folder))]


class ResizedState:
    """Loads what was withheld with torch.distributed.checkpoint at another world size or on other
    nodes.

    It requests all slots of the checkpoint, where a HookState requests only its own. For loading
    only; where nothing differs it loads the same as they do.

    >>> resized = ResizedState(state, path, on_resize="mean")
    >>> dcp.load({"hook": resized}, checkpoint_id=path)

    Args:
        state: a HookState that is bound, a Reducer, or what gradferry.fsdp.attach returned.
        checkpoint: the folder that is loaded.
        key: under which the state was saved.
        on_resize: as for `HookState.load_state_dict`.
    """

    def __init__(
        self,
        state: Averaging,
        checkpoint: str | Path,
        *,
        key: str = "hook",
        on_resize: str = "mean",
    ) -> None:
        self._state = state
        self._on_resize = on_resize
        self._key = key
        self._checkpoint = checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Empty tensors for everything that the checkpoint holds under the key.

        Raises:
            StateError: it holds nothing there.
        """
        # Imported here, because it takes as long to import as the rest of the package.
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        mine = self._state.part  # others' may be as large as the model
        entries = FileSystemReader(self._checkpoint).read_metadata().state_dict_metadata
        room: dict[str, Any] = {}
        for path, entry in entries.items():
            prefix, *parts = path.split(".")
            name = parts.pop() if parts else ""  # else a value beside the states
            if prefix != self._key or not name or not (mine is None or parts[:1] == [mine]):
                continue
            inner = room
            for part in parts:  # slots, and shards with slots of their own
                inner = inner.setdefault(part, {})
            value = None
            if isinstance(entry, TensorStorageMetadata):
                value = torch.zeros(entry.size, dtype=entry.properties.dtype, device="cpu")
            inner[name] = value
        if not room:
            where = self._key if mine is None else f"{self._key}.{mine}"
            raise StateError(
                f"the checkpoint {self._checkpoint} has nothing under {where!r}"
                + (
                    ""
                    if mine is None
                    else "; what is withheld of a shard stays with it: load it "
                    "with as many shards as saved it, or go on without what was withheld"
                )
            )
        return room

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `HookState.load_state_dict`."""
        self._state.load_state_dict(state_dict, on_resize=self._on_resize)


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
        return {"bytes": file.tell(), "blake2b": digest.hexdigest()}


def _files_of(folder: Path, rank: int, num_ranks: int) -> list[Path]:
    """A rank's files in the folder. Rank 0 also has the files of ranks that no longer exist."""
    found = []
    for path in folder.iterdir():
        match = _FILE.fullmatch(path.name)
        if match and (int(match[1]) == rank or (rank == 0 and int(match[1]) >= num_ranks)):
            found.append(path)
    return found


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # only a warning: the new checkpoint is complete
            warn(f"no longer needed, but still there: {error}")


def _write(file: BinaryIO, content: dict[str, Any]) -> None:
    """Writes the content. Raises StateError if `load` would refuse it."""
    try:
        torch.save(content, file)
        file.flush()
        # Reads only names and shapes.
        torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        path, value = next(_refused(content, "content"), ("", None))
        if not path:
            raise
        raise StateError(
            f"{path} is a {_type_name(value)}, which a checkpoint cannot hold: save tensors, "
            "numbers, strings and containers of them (.item() and .tolist() make them of NumPy's), "
            "or name the type to torch.serialization.add_safe_globals() wherever it is saved and "
            "loaded"
        ) from error


def _refused(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the parts of the value that cannot be loaded again, innermost first, with paths."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        for key in value:
            yield from _refused(key, f"the key {key!r} of {path}")
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield from _refused(item, f"{path}[{key!r}]")
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return
    try:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:
        yield path, value


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _read_manifest(folder: Path) -> list[dict[str, Any]]:
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_text())
        known = manifest["format"] == _FORMAT
        files = list(manifest["files"]) if known else []
    except FileNotFoundError:
        raise StateError(f"there is no checkpoint in {folder}: {_MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"{path} is no manifest of a checkpoint: {error}") from error
    if not all(isinstance(f, dict) and _FILE.fullmatch(str(f.get("name"))) for f in files):
        raise StateError(f"{path} is no manifest of a checkpoint: it names foreign files")
    if not known:
        raise StateError(
            f"the checkpoint in {folder} has format {manifest['format']!r}, and this gradferry "
            f"reads format {_FORMAT}; load it with the version that saved it, or a newer one"
        )
    return files


def _read(folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
    path = folder / str(entry["name"])
    try:
        found = {"name": entry["name"], **_fingerprint(path)}
    except OSError as error:
        raise StateError(f"the checkpoint in {folder} lacks {path.name}: {error}") from error
    if found != entry:
        raise StateError(
            f"{path} is not what was saved: it has {found['bytes']} bytes with digest "
            f"{found['blake2b']}, the manifest says {entry.get('bytes')} with "
            f"{entry.get('blake2b')}"
        )
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise StateError(
            f"{path} holds what this process does not load, since it could run code: {error}"
        ) from error
    return content
