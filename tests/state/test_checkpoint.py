"""gradferry.checkpoint: old or new, never half."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import resource
import shutil
import signal
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradferry import StateError, checkpoint
from on_ranks import of_all, on_ranks
from outcomes import Outcome, attempt
from saved import same
from world import Worlds


def content(rank: int, version: int) -> dict[str, Any]:
    return {"version": version, "values": torch.full((5,), 10.0 * version + rank)}


def names_in(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


# What saves leave that were killed, and ranks that are gone.
LEFT_BEHIND = (
    *("rank-0-00.tmp", "rank-1-01.pt", "rank-2-02.pt", "rank-10-03.tmp"),
    *("manifest-02.tmp", "manifest-04.tmp"),
)


@on_ranks(2)
def test_checkpoint_replaces_the_one_before_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    rank, folder = dist.get_rank(), tmp_path / "new" / "folder"
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*LEFT_BEHIND, "notes.txt"):
        (folder / name).touch()
    dist.barrier()
    assert not checkpoint.exists(folder)
    files: set[str] = set()
    for version in (1, 2):
        checkpoint.save(folder, content(rank, version))
        dist.barrier()
        assert same(checkpoint.load(folder), content(rank, version))
        manifest, notes, *own = names_in(folder)
        assert (manifest, notes) == ("manifest.json", "notes.txt")
        assert [name.split("-")[1] for name in own] == ["0", "1"]
        assert files.isdisjoint(own)
        assert not set(own) & set(LEFT_BEHIND)
        files.update(own)
        dist.barrier()
    assert checkpoint.exists(folder)
    assert same(checkpoint.load_all(folder), [content(each, 2) for each in range(2)])


@on_ranks(2)
def test_warnings_that_are_errors_neither_undo_a_save_nor_hide_its_error(tmp_path: Path) -> None:
    """A save that completes and one that is refused, where nothing can be removed."""
    rank = dist.get_rank()
    checkpoint.save(tmp_path, content(rank, 1))
    busy = mock.patch.object(Path, "unlink", side_effect=OSError("busy"))
    with busy, warnings.catch_warnings():
        warnings.simplefilter("error", gradferry.GradferryWarning)
        checkpoint.save(tmp_path, content(rank, 2))
        dist.barrier()
        assert checkpoint.load(tmp_path)["version"] == 2
        unfit = gradferry.StateError("cannot be loaded")
        with mock.patch.object(checkpoint, "write_content", side_effect=unfit):
            assert (
                attempt(lambda: checkpoint.save(tmp_path, content(rank, 3))).error == "StateError"
            )


@dataclasses.dataclass
class NotATensor:
    value: int = 0


def disk_full(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def full_of_files(*_: Any) -> Any:
    raise OSError(122, "Disk quota exceeded", "manifest.json")


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """The kernel refuses what torch.save writes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


LARGE = {"large": torch.zeros(100_000)}
NOTHING = contextlib.nullcontext
# What load would refuse, where, and what it is called.
UNFIT: dict[str, tuple[dict[Any, Any], str]] = {
    "number": ({"best": np.float64(0.5)}, r"content\['best'\] .*numpy\.float64"),
    "array": (
        {"nested": [{"deep": (torch.zeros(2), np.zeros(2))}]},
        r"content\['nested'\]\[0\]\['deep'\]\[1\] .*numpy\.ndarray",
    ),
    "function": ({"of": {"lambda": lambda step: step}}, r"content\['of'\]\['lambda'\] .*function"),
    "own": ({"own": NotATensor()}, r"content\['own'\] .*NotATensor"),
    "key": ({NotATensor: 1}, "the key .*NotATensor.* of content"),
}
# Where a rank cannot save: what is so there, what it saves, and what its error says.
FAILURES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "fsync": (lambda: mock.patch("os.fsync", disk_full), LARGE, "No space left.*rank-{}-"),
    "rename": (lambda: mock.patch("os.replace", disk_full), LARGE, "No space left.*rank-{}-"),
    "write": (small_files, LARGE, "File too large.*rank-{}-"),
    "manifest": (
        lambda: mock.patch("gradferry.checkpoint.durable_file", full_of_files),
        LARGE,
        "Disk quota exceeded.*manifest.json",
    ),
    "list": (NOTHING, [1, 2], r"content=\[1, 2\] is a list; save a dict"),
    "folder": (NOTHING, {}, "folder=None is no path"),
    **{
        name: (NOTHING, what, f"{where}.*which a checkpoint cannot hold")
        for name, (what, where) in UNFIT.items()
    },
}


@pytest.mark.parametrize(
    ("failure", "failing_rank"),
    [(name, rank) for name in FAILURES for rank in (0, 1) if rank == 0 or name != "manifest"],
)
@on_ranks(2)
def test_rank_that_cannot_save_is_one_error_on_all_and_leaves_the_old_one_alone(
    tmp_path: Path, failure: str, failing_rank: int
) -> None:
    rank, (fails, extra, said) = dist.get_rank(), FAILURES[failure]
    checkpoint.save(tmp_path, content(rank, 1))
    names = names_in(tmp_path)
    dist.barrier()
    to, new = tmp_path, content(rank, 2)
    if rank == failing_rank:
        to = None if failure == "folder" else tmp_path
        new = {**new, **extra} if isinstance(extra, dict) else extra
    with fails() if rank == failing_rank else NOTHING():
        outcome = attempt(lambda: checkpoint.save(to, new))
    dist.barrier()
    expect_on_all(outcome)
    kind = "ConfigError" if failure in ("list", "folder") else "StateError"
    assert outcome.error == (kind if fails is NOTHING else "PeerError")
    assert outcome.text.startswith(f"rank {failing_rank}: ")
    assert re.search(said.format(failing_rank), outcome.text), outcome.text
    assert checkpoint.load(tmp_path)["version"] == 1
    assert names_in(tmp_path) == names


def expect_on_all(outcome: Outcome) -> None:
    assert of_all(outcome) == [outcome] * 2


@on_ranks(2)
def test_folder_that_ranks_do_not_share_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    """Rank 1 writes to a folder that rank 0 does not see."""
    rank, shared = dist.get_rank(), tmp_path / "host0"
    checkpoint.save(shared, content(rank, 1))
    names = names_in(shared)
    dist.barrier()
    with mock.patch.object(checkpoint, "_SHARE_SECONDS", 0.0):
        outcome = attempt(lambda: checkpoint.save(tmp_path / f"host{rank}", content(rank, 2)))
    dist.barrier()
    expect_on_all(outcome)
    assert outcome.error == "StateError"
    host = re.escape(socket.gethostname())
    assert re.match(
        r"rank 0: the ranks do not share the folder: rank 1 has written \d+ bytes to "
        rf"{host}:{tmp_path}/host1/rank-1-\w+\.pt, and rank 0 finds nothing at "
        rf"{host}:{tmp_path}/host0/rank-1-\w+\.pt; ",
        outcome.text,
    ), outcome.text
    assert checkpoint.load(shared)["version"] == 1
    assert names_in(shared) == names
    assert names_in(tmp_path / "host1") == []


@on_ranks(2)
def test_files_that_rank_0_sees_late_are_waited_for(tmp_path: Path) -> None:
    """A client of NFS sees another one's new file late, and first with another size."""
    seen, size = [None, 7], checkpoint._size
    with mock.patch.object(checkpoint, "_size", lambda path: seen.pop(0) if seen else size(path)):
        checkpoint.save(tmp_path, content(dist.get_rank(), 1))
    assert len(seen) == (0 if dist.get_rank() == 0 else 2)  # rank 0 alone looks
    assert checkpoint.load(tmp_path)["version"] == 1


@on_ranks(3)
def test_each_rank_of_a_group_loads_what_it_saved(tmp_path: Path) -> None:
    """Ranks 1 and 2 save."""
    rank, group = dist.get_rank(), dist.new_group([1, 2])
    if rank != 0:
        checkpoint.save(tmp_path, content(rank, 1), group)
    dist.barrier()
    own = attempt(lambda: checkpoint.load(tmp_path))
    if rank == 0:
        assert "ranks 1 and 2 of the default group, and has nothing of rank 0" in own.text
    else:
        assert same(checkpoint.load(tmp_path), content(rank, 1))
    for number in (0, 1):  # as they are in the group
        assert same(checkpoint.load(tmp_path, number), content(1 + number, 1))
    other = attempt(lambda: checkpoint.load(tmp_path, 2))
    assert "is of 2 ranks" in other.text
    assert "has nothing of rank 2" in other.text


def case_save_once(folder: str) -> None:
    checkpoint.save(folder, content(dist.get_rank(), 1))


def of_file(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    """Damage to what rank 0 saved."""

    def damage(folder: Path) -> None:
        (file,) = folder.glob("rank-0-*.pt")
        file.write_bytes(change(file.read_bytes()))

    return damage


def of_manifest(**fields: Any) -> Callable[[Path], Any]:
    """None: a field of each file is lost."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, value in fields.items():
            if value is None:
                del manifest["files"][0][name]
            else:
                manifest[name] = value
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return damage


def no_file(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()


MANIFEST = "manifest.json"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped bit": (of_file(lambda d: d[:99] + bytes([d[99] ^ 1]) + d[100:]), "is not what was"),
    "cut": (of_file(lambda data: data[:-1]), "is not what was saved"),
    "gone": (lambda folder: next(folder.glob("rank-0-*.pt")).unlink(), "lacks rank-0-"),
    "newer": (of_manifest(format=2), "has format 2"),
    "foreign": (of_manifest(files=[{"name": "../secret"}]), "names foreign files"),
    "ranks": (of_manifest(ranks=[0, "1"]), "its ranks are [0, '1']"),
    "no bytes": (of_manifest(bytes=None), "is not what was saved"),
    "no blake2b": (of_manifest(blake2b=None), "is not what was saved"),
    "folder": (no_file, "cannot be read: "),
    "without": (lambda folder: (folder / MANIFEST).unlink(), "there is no checkpoint in"),
}


@pytest.fixture(scope="module")
def of_two(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks have saved."""
    folder = tmp_path_factory.mktemp("saved")
    worlds(2).run(case_save_once, folder=str(folder))
    return folder


@pytest.mark.parametrize(("damage", "text"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoint_is_refused_by_name(
    of_two: Path, tmp_path: Path, damage: Callable[[Path], Any], text: str
) -> None:
    damaged = shutil.copytree(of_two, tmp_path / "damaged")
    damage(damaged)
    with pytest.raises(gradferry.StateError, match=re.escape(text)):
        gradferry.checkpoint.load(damaged, 0)


def test_ranks_are_needed_without_a_process_group(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"call init_process_group\(\) first"):
        checkpoint.save(tmp_path, {})
    manifest = {"format": 1, "ranks": [0], "files": [{"name": "rank-0-00.pt"}]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StateError, match=r"pass rank= to load\(\)"):
        checkpoint.load(tmp_path)
    for rank in (-1, 1, "0", 0.0):
        with pytest.raises(StateError, match=f"has nothing of rank {rank}"):
            checkpoint.load(tmp_path, rank)
