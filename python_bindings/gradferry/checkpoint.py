"""Atomic checkpoints, and states for another number of ranks.

`save` and `load` keep the latest checkpoint of a training in a folder on a shared file system. Each
save writes into a folder of its own there, and a pointer names the one that is complete, so that a
kill at any point leaves the old checkpoint or the new one:

    save-<token>.json          the draft of a save's pointer: there before its folder is, and ...
    latest.json                ... renamed to this when the folder is complete
    save-<token>/rank-<n>.pt   what rank n of the group has saved

Several saves may be under way: of threads, of two jobs, of a process that was thought dead. A save
whose draft was removed cannot complete. So a folder can be removed once its draft is gone, if the
pointer read after that does not name it.

`ResizedState` is for torch.distributed.checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from gradferry import _native
from gradferry.averaging.handle import Averaging
from gradferry.averaging.saved_state import merge
from gradferry.averaging.start import usable_group
from gradferry.core.agreement import Record, on_all_ranks
from gradferry.core.rendezvous import world_ranks
from gradferry.core.values import as_whole
from gradferry.core.warn import warn_or_log
from gradferry.errors import ConfigError, ProtocolError, StateError

__all__ = ["ResizedState", "exists", "load", "load_all", "merge", "save"]

_POINTER = "latest.json"
_FORMAT = 1
_SAVE = "save-" + 16 * "[0-9a-f]"  # a pattern of folders


def save(
    folder: str | Path, content: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Replaces the folder's checkpoint. Collective.

    Each rank writes its own file and flushes it to disk. When all have, rank 0 replaces the pointer
    and removes what other saves have left.

    If several saves write into one folder at the same time, the first to complete wins, and the
    others raise.

    Args:
        folder: on a file system that all ranks share. Created if it does not exist.
        content: of this rank: tensors, numbers, strings and containers of them, such as
            ``{"model": model.state_dict(), "hook": state.state_dict()}``. ``torch.load`` with
            ``weights_only=True`` must be able to load it.
        group: of the ranks that take part; the default group if None.

    Raises:
        ConfigError: a rank's folder is no path.
        StateError: a rank's content holds what `load` would refuse; the ranks do not share the
            folder; or another save into it was completed meanwhile. There is no process group.
        PeerError: a rank could not write.

    Whatever it raises, on all ranks, a complete checkpoint is still there: with these errors that
    of before, or of the other save. Files of this save are removed.
    """
    group = usable_group(group)
    rank = group.rank()
    device = torch.device(group._device_types[0].type)

    def begin() -> Record:
        if not isinstance(folder, str | os.PathLike):
            raise ConfigError(f"folder={folder!r} is no path")
        Path(folder).mkdir(parents=True, exist_ok=True)
        return {"save": f"save-{secrets.token_hex(8)}"}

    # All ranks write where rank 0 says.
    name = on_all_ranks(begin, group, device)[0].get("save")
    if name is None:
        raise ProtocolError("rank 0 does not save a checkpoint here; call save() on every rank")
    here = Path(folder) / name
    try:
        on_all_ranks(lambda: _make(here) if rank == 0 else None, group, device)
        written = on_all_ranks(lambda: _write(_file(here, rank), content), group, device)
        pointer = {"format": _FORMAT, "save": name, "ranks": world_ranks(group), "files": written}
        on_all_ranks(lambda: _complete(here, pointer) if rank == 0 else None, group, device)
    except BaseException:
        # If rank 0 has replaced the pointer, and this rank has not heard of it, all stays.
        _remove_unless_named(here)
        raise


def exists(folder: str | Path) -> bool:
    """Whether the folder holds a checkpoint."""
    return (Path(folder) / _POINTER).exists()


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
    here, files, ranks = _latest(Path(folder))
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
    return _read(_file(here, number), files[number])


def load_all(folder: str | Path) -> list[dict[str, Any]]:
    """What every rank saved, in rank order, for resuming with another number of ranks.

    >>> contents = gradferry.checkpoint.load_all(folder)
    >>> saved = gradferry.checkpoint.merge(content["hook"] for content in contents)
    >>> state.load_state_dict(saved, on_resize="mean")

    Raises:
        StateError: as `load`.
    """
    here, files, _ = _latest(Path(folder))
    return [_read(_file(here, number), written) for number, written in enumerate(files)]


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
        everything = f"{self._key}."
        # Parts of a sharded model: others may be as large as the model.
        wanted = tuple(f"{everything}{part}." for part in self._state.parts)
        if not all(any(path.startswith(part) for path in entries) for part in wanted):
            wanted = ()  # it was divided otherwise
        room: dict[str, Any] = {}
        for path, entry in entries.items():
            if not path.startswith(wanted or everything):
                continue
            *parts, name = path.removeprefix(everything).split(".")
            inner = room
            for part in parts:  # slots, and shards with slots of their own
                inner = inner.setdefault(part, {})
            value = None
            if isinstance(entry, TensorStorageMetadata):
                value = torch.zeros(entry.size, dtype=entry.properties.dtype, device="cpu")
            inner[name] = value
        if not room:
            raise StateError(f"the checkpoint {self._checkpoint} has nothing under {self._key!r}")
        return room

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Does what `HookState.load_state_dict` does, with the `on_resize` of this state."""
        self._state.load_state_dict(state_dict, on_resize=self._on_resize)


# --- how a save goes on ---


def _draft(save: Path) -> Path:
    return save.with_suffix(".json")


def _file(save: Path, rank: int) -> Path:
    return save / f"rank-{rank}.pt"


def _make(save: Path) -> None:
    """Makes the folder of a save, and before it the draft, without which it may be removed."""
    _draft(save).touch(exist_ok=False)
    save.mkdir()


def _write(path: Path, content: Mapping[str, Any]) -> Record:
    """Writes this rank's file. Returns what the pointer has to say of it."""
    try:
        with _flushed(path, "wb") as file:
            torch.save(content, file)
        # Reads only names and shapes.
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return _written(path)
    except FileNotFoundError as error:
        raise _gone(path.parent) from error
    except OSError:
        raise
    except Exception as error:
        raise StateError(
            "content holds what a checkpoint cannot hold: save tensors, numbers, strings and "
            "containers of them (.item() and .tolist() make them of NumPy's), or name the type to "
            "torch.serialization.add_safe_globals() wherever it is saved and loaded; "
            f"{type(error).__name__}: {error}"
        ) from error


def _written(path: Path) -> Record:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return {"blake2b": digest.hexdigest()}


def _complete(save: Path, pointer: Record) -> None:
    """Makes this save the checkpoint, and removes all others."""
    folder = save.parent
    try:
        with _flushed(_draft(save), "r+b") as file:  # not anew, where it was removed
            file.write(json.dumps(pointer).encode())
        _draft(save).replace(folder / _POINTER)
    except FileNotFoundError as error:
        raise _gone(save) from error
    _flush_folder(folder)
    for path in (*folder.glob(_SAVE), *folder.glob(f"{_SAVE}.json")):
        _remove_unless_named(path.with_suffix(""))


def _remove_unless_named(save: Path) -> None:
    """Removes a save, unless it is the checkpoint. One that is under way fails now.

    What cannot be removed is only a warning: a complete checkpoint is there.
    """
    try:
        _draft(save).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # there is no checkpoint yet
            # Read only now, when the save cannot complete any more.
            if save.name.encode() in (save.parent / _POINTER).read_bytes():
                return
        shutil.rmtree(save)
    except FileNotFoundError:
        pass  # another rank removes it, too
    except OSError as error:
        warn_or_log(f"no longer needed, but still there: {error}")


def _gone(save: Path) -> StateError:
    return StateError(
        f"{socket.gethostname()}:{save.absolute()} is not there, which rank 0 has made: the ranks "
        "do not share this folder (save to a file system that all of them see, under one absolute "
        "path), another save was completed there meanwhile (let one thread of one job at a time "
        "save into a folder), or another rank gave up (see its error)"
    )


@contextlib.contextmanager
def _flushed(path: Path, mode: str) -> Iterator[IO[bytes]]:
    """A file that is on the disk in the end, as is its name. An OSError names it."""
    try:
        with path.open(mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _flush_folder(path.parent)
    except (OSError, RuntimeError) as error:
        # A full disk is met by write() and fsync(), which do not know the name, and torch.save
        # replaces what write() has raised.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- and how it is read ---


def _latest(folder: Path) -> tuple[Path, list[Record], list[int]]:
    """The folder of the checkpoint, what its files are, and who saved them: ranks of the default
    group.
    """
    try:
        pointer = json.loads((folder / _POINTER).read_text())
        if pointer["format"] != _FORMAT:
            raise ValueError(f"another gradferry saved it, in format {pointer['format']!r:.60}")
        name, files, ranks = pointer["save"], list(pointer["files"]), list(pointer["ranks"])
        if not re.fullmatch(_SAVE, name) or [*map(type, ranks)] != [int] * len(files):
            raise ValueError(f"it names ranks {ranks!r:.60} in {name!r:.60}")
    except FileNotFoundError:
        raise StateError(f"there is no checkpoint in {folder}: {_POINTER} is missing") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise StateError(f"{folder / _POINTER} does not point to a checkpoint: {error}") from error
    return folder / name, files, ranks


def _read(path: Path, written: Record) -> dict[str, Any]:
    """What a file holds. Torch alone would not notice changed bytes."""
    try:
        if (found := _written(path)) != written:
            raise ValueError(f"{found} was read, and {written!r:.60} written")
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateError(
            f"{path} is lost, damaged, or holds what this process does not load, since it could "
            f"run code: {type(error).__name__}: {error}"
        ) from error
    return content
