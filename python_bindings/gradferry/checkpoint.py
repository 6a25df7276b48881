"""Atomic checkpoints, and states for another number of ranks.

`save` and `load` keep the latest checkpoint of a training in a folder on a shared file system: a
file per rank, and a manifest that names them, written last. A kill at any point leaves the old
checkpoint or the new one. `ResizedState` is for torch.distributed.checkpoint.

Several saves may be under way in one folder: of threads, of two jobs, of a process that was thought
dead. Each has a token, which is in the names of its files:

    manifest-<token>.tmp     its draft: there before its other files, and renamed to ...
    manifest.json            ... when these are complete; the only name that saves share
    rank-<rank>-<token>.pt   a rank's content; while it is written it ends in .tmp

A save whose draft was removed cannot complete. So a file can be removed once the draft of its save
is gone, if the manifest read after that does not name it.

torch.distributed.checkpoint is not beneath this, since it keeps none of these promises: it writes
over the files of the old checkpoint, and removes its metadata before it renames the new one; of
what ranks save under one name it keeps one value; it unpickles metadata and objects that may run
code, and compares no digests. A folder of its own for each save, a pointer to the complete one, and
all that is below would still be needed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradferry import _native
from gradferry.averaging.handle import Averaging
from gradferry.averaging.saved_state import merge
from gradferry.averaging.start import usable_group
from gradferry.core.agreement import Record, on_all_ranks, rendezvous_place
from gradferry.core.content_file import durable_file, read_content, write_content
from gradferry.core.rendezvous import world_ranks
from gradferry.core.values import as_whole, short
from gradferry.core.warn import warn_or_log
from gradferry.errors import ConfigError, ProtocolError, StateError

__all__ = ["ResizedState", "exists", "load", "load_all", "merge", "save"]

_MANIFEST = "manifest.json"
_FORMAT = 1
_DRAFT = "manifest-{}.tmp"
_TOKEN = re.compile(r"[0-9a-f]+")
_OF_A_SAVE = re.compile(r"(?:rank-\d+|manifest)-([0-9a-f]+)\.(?:pt|tmp)")
# How long a client of NFS may not see another one's new file, as a rule.
_SHARE_SECONDS = 5.0


def save(
    folder: str | Path, content: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Replaces the folder's checkpoint. Collective.

    Each rank writes its own file and flushes it to disk. When rank 0 sees all of them, it replaces
    the manifest and removes what other saves have left.

    If several saves write into one folder at the same time, the first to complete wins, and the
    others raise.

    Args:
        folder: on a file system that all ranks share. Created if it does not exist.
        content: of this rank: tensors, numbers, strings and containers of them, such as
            ``{"model": model.state_dict(), "hook": state.state_dict()}``. ``torch.load`` with
            ``weights_only=True`` must be able to load it.
        group: of the ranks that take part; the default group if None.

    Raises:
        ConfigError: a rank's folder is no path, or its content no mapping.
        StateError: a rank's content holds what `load` would refuse; the ranks do not share the
            folder; or another save into it was completed meanwhile. There is no process group.
        PeerError: a rank could not write.

    Whatever it raises, on all ranks, a complete checkpoint is still there: with these errors that
    of before, or of the other save. Files of this save are removed.
    """
    group = usable_group(group)
    rank = group.rank()
    place = rendezvous_place(group, torch.device(group._device_types[0].type))
    token = uuid.uuid4().hex[:16]

    path: Path | None = None

    def begin() -> Record:
        nonlocal path
        path = _checked(folder)
        path.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            (path / _DRAFT.format(token)).touch(exist_ok=False)
        return {"token": token}

    try:
        # All ranks write under the token of rank 0.
        token = _checked_token(on_all_ranks(begin, group, place)[0])
        assert path is not None
        where = path
        written = on_all_ranks(lambda: _write_own(where, token, rank, content), group, place)
        on_all_ranks(
            lambda: _publish(where, token, group, written) if rank == 0 else None, group, place
        )
    except BaseException:
        # If rank 0 has replaced the manifest, and this rank has not heard of it, all files stay.
        if path is not None:
            _remove_unnamed(path, [_file_name(rank, token)])
        raise


def _checked(folder: str | Path) -> Path:
    try:
        if b"\0" not in os.fsencode(folder):
            return Path(folder)
    except (TypeError, UnicodeEncodeError):
        pass
    raise ConfigError(f"folder={folder!r} is no path")


def exists(folder: str | Path) -> bool:
    """Whether the folder holds a checkpoint."""
    return (Path(folder) / _MANIFEST).exists()


def load(folder: str | Path, rank: int | None = None) -> dict[str, Any]:
    """What a rank saved.

    Args:
        folder: as for `save`.
        rank: the rank that saved, in the group that saved. None: what was saved by this rank of the
            default group, whatever its rank in the group that saved.

    Returns:
        Its content, tensors on the CPU.

    Raises:
        StateError: there is no checkpoint, it has no such rank, or it was damaged.
    """
    files, ranks = _read_manifest(Path(folder))
    if rank is None:
        if not dist.is_initialized():
            raise StateError("no process group says which rank this is; pass rank= to load()")
        mine = dist.get_rank()
        number, named = ranks.index(mine) if mine in ranks else None, f"{mine} of the default group"
    else:
        number, named = as_whole(rank), str(rank)
    if number is None or not 0 <= number < len(files):
        raise StateError(
            f"the checkpoint in {folder} is of {len(files)} ranks, {_native.name_ranks(ranks)} of "
            f"the default group, and has nothing of rank {named}; pass rank= to load(), counted "
            "among the ranks that saved, or take what all saved from load_all()"
        )
    return _read(Path(folder), files[number])


def load_all(folder: str | Path) -> list[dict[str, Any]]:
    """What every rank saved, in rank order, for resuming with another number of ranks.

    >>> contents = gradferry.checkpoint.load_all(folder)
    >>> saved = gradferry.checkpoint.merge(content["hook"] for content in contents)
    >>> state.load_state_dict(saved, on_resize="mean")

    Raises:
        StateError: as `load`.
    """
    return [_read(Path(folder), entry) for entry in _read_manifest(Path(folder))[0]]


class ResizedState:
    """Loads residuals with torch.distributed.checkpoint at another world size or on other
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

        entries = FileSystemReader(self._checkpoint).read_metadata().state_dict_metadata
        mine = self._wanted(path.split(".") for path in entries)
        room: dict[str, Any] = {}
        for path, entry in entries.items():
            prefix, *parts = path.split(".")
            name = parts.pop() if parts else ""  # else a value beside the states
            if prefix != self._key or not name or (mine and not set(parts[:1]) & set(mine)):
                continue
            inner = room
            for part in parts:  # slots, and shards with slots of their own
                inner = inner.setdefault(part, {})
            value = None
            if isinstance(entry, TensorStorageMetadata):
                value = torch.zeros(entry.size, dtype=entry.properties.dtype, device="cpu")
            inner[name] = value
        if not room:
            where = f"{self._key}.{mine[0]}" if mine else self._key
            raise StateError(f"the checkpoint {self._checkpoint} has nothing under {where!r}")
        return room

    def _wanted(self, paths: Iterable[Sequence[str]]) -> Sequence[str]:
        """The parts of a sharded model that are loaded: this rank's, since others' may be as large
        as the model; where it was divided otherwise, all of that kind.
        """
        held = {path[1] for path in paths if path[0] == self._key and len(path) > 2}
        wanted: list[str] = []
        for part in self._state.parts:
            kind = part.partition("_")[0]
            others = sorted(each for each in held if each.startswith(f"{kind}_"))
            wanted += [part] if part in held or not others else others
        return wanted

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Does what `HookState.load_state_dict` does, with the `on_resize` of this state."""
        self._state.load_state_dict(state_dict, on_resize=self._on_resize)


# --- how a save goes on ---


def _checked_token(record: Record) -> str:
    token = str(record.get("token"))
    if not _TOKEN.fullmatch(token):
        raise ProtocolError(f"rank 0 sent {token[:40]!r} for a token; call save() on every rank")
    return token


def _file_name(rank: int, token: str) -> str:
    return f"rank-{rank}-{token}.pt"


def _write_own(folder: Path, token: str, rank: int, content: Mapping[str, Any]) -> Record:
    """Writes this rank's file. Returns what the manifest has to say of it, and where it is."""
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"content={short(content)} is a {type(content).__name__}; save a dict, such as "
            "{'model': model.state_dict(), 'hook': state.state_dict()}"
        )
    path = folder / _file_name(rank, token)
    try:
        record = write_content(path, dict(content))
    except FileNotFoundError as error:
        if not (folder / _DRAFT.format(token)).exists():
            raise _overtaken(folder) from error
        raise
    return {**record, "where": f"{socket.gethostname()}:{path.absolute()}"}


def _publish(folder: Path, token: str, group: dist.ProcessGroup, written: Sequence[Record]) -> None:
    """Replaces the manifest, and removes files that it does not name. For rank 0."""
    _expect_all_seen(folder, token, written)
    files = [
        {"name": _file_name(rank, token), "bytes": each["bytes"], "blake2b": each["blake2b"]}
        for rank, each in enumerate(written)
    ]
    ranks = world_ranks(group)
    manifest = {"format": _FORMAT, "ranks": ranks, "files": files}
    try:
        with durable_file(folder / _MANIFEST, folder / _DRAFT.format(token)) as file:
            file.write(json.dumps(manifest, indent=1).encode())
    except FileNotFoundError as error:
        raise _overtaken(folder) from error
    _remove_unnamed(folder, [path.name for path in folder.iterdir()])


def _expect_all_seen(folder: Path, token: str, written: Sequence[Record]) -> None:
    """Raises StateError unless all ranks have written to this folder."""
    deadline, pause = time.monotonic() + _SHARE_SECONDS, 0.001
    for rank, each in enumerate(written):
        path = folder / _file_name(rank, token)
        while (found := _size(path)) != each["bytes"]:
            if not (folder / _DRAFT.format(token)).exists():
                raise _overtaken(folder)
            if time.monotonic() > deadline:
                raise StateError(
                    f"the ranks do not share the folder: rank {rank} has written {each['bytes']} "
                    f"bytes to {each['where']}, and rank 0 finds "
                    f"{'nothing' if found is None else f'{found} bytes'} at "
                    f"{socket.gethostname()}:{path.absolute()}; save to a file system that all of "
                    "them see, under one absolute path"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            next(folder.iterdir(), None)  # has NFS ask its server again


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _overtaken(folder: Path) -> StateError:
    return StateError(
        f"the draft of this save was removed from {folder}: another save was completed there "
        "meanwhile, or another rank gave up (see its error); let one thread of one job at a time "
        "save into a folder"
    )


def _remove_unnamed(folder: Path, names: Iterable[str]) -> None:
    """Removes those of the files that belong to saves, but not to the checkpoint. Such saves were
    killed or have failed; those under way fail now.
    """
    tokens = {name: match[1] for name in names if (match := _OF_A_SAVE.fullmatch(name))}
    ended = {token for token in set(tokens.values()) if _remove(folder / _DRAFT.format(token))}
    try:
        named = (folder / _MANIFEST).read_bytes()  # only now, when none of them can replace it
    except (FileNotFoundError, NotADirectoryError):
        named = b""
    except OSError as error:
        warn_or_log(
            f"files of earlier checkpoints stay in {folder}, since its manifest is lost: {error}"
        )
        return
    for name, token in tokens.items():
        if token in ended and name.encode() not in named:
            _remove(folder / name)


def _remove(path: Path) -> bool:
    """Whether the file is gone. If not only warns: a complete checkpoint is there."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        warn_or_log(f"no longer needed, but still there: {error}")
        return False
    return True


def _read_manifest(folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The files of the ranks that saved: name, bytes and digest; and these in the default group."""
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != _FORMAT:
            raise StateError(
                f"the checkpoint in {folder} has format {manifest['format']!r}, and this gradferry "
                f"reads format {_FORMAT}; load it with the version that saved it, or a newer one"
            )
        files, ranks = list(manifest["files"]), list(manifest["ranks"])
        if not all(_OF_A_SAVE.fullmatch(file["name"]) for file in files):
            raise ValueError("it names foreign files")
        if [*map(type, ranks)] != [int] * len(files):
            raise ValueError(f"its ranks are {ranks!r:.60}")
    except FileNotFoundError:
        raise StateError(f"there is no checkpoint in {folder}: {_MANIFEST} is missing") from None
    except OSError as error:
        raise StateError(f"the checkpoint in {folder} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is no manifest of a checkpoint: {error}") from error
    return files, ranks


def _read(folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
    expected = dict(entry)
    path = folder / expected.pop("name")
    try:
        return read_content(path, expected)
    except OSError as error:
        raise StateError(f"the checkpoint in {folder} lacks {path.name}: {error}") from error
