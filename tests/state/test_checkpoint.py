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


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


SAVE = "save-0123456789abcd"
# What saves leave that were killed, and ranks that are gone; and what is not of saves.
LEFT_BEHIND = (f"{SAVE}01/rank-7.pt", f"{SAVE}02.json", f"{SAVE}03.json", f"{SAVE}03/rank-0.pt")
OTHERS = ("notes.txt", "save-notes.json", f"{SAVE}01-copy/rank-0.pt")


@on_ranks(2)
def test_checkpoint_replaces_the_one_before_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    rank, folder = dist.get_rank(), tmp_path / "new" / "folder"
    for name in (*LEFT_BEHIND, *OTHERS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    dist.barrier()
    assert not checkpoint.exists(folder)
    files: set[str] = set()
    for version in (1, 2):
        checkpoint.save(folder, content(rank, version))
        dist.barrier()
        assert same(checkpoint.load(folder), content(rank, version))
        own = set(names_in(folder)) - {*OTHERS}
        assert {Path(name).name for name in own} == {"latest.json", "rank-0.pt", "rank-1.pt"}
        assert files & own <= {"latest.json"}
        files |= own
        dist.barrier()
    assert {*OTHERS} <= {*names_in(folder)}
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
        assert attempt(lambda: checkpoint.save(tmp_path, {"of": print})).error == "StateError"


@dataclasses.dataclass
class NotATensor:
    value: int = 0


def disk_full(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


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
# What load would refuse, and what the error says of it.
UNFIT: dict[str, tuple[dict[Any, Any], str]] = {
    "number": ({"best": np.float64(0.5)}, "numpy.*scalar"),
    "array": ({"nested": [{"deep": (torch.zeros(2), np.zeros(2))}]}, "numpy"),
    "function": ({"of": {"lambda": lambda step: step}}, "lambda"),
    "own": ({"own": NotATensor()}, "NotATensor"),
    "key": ({NotATensor: 1}, "NotATensor"),
}
# Where a rank cannot save: what is so there, what it saves, and what its error says.
FAILURES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "fsync": (lambda: mock.patch("os.fsync", disk_full), LARGE, "No space left.*/save-"),
    "rename": (lambda: mock.patch("os.replace", disk_full), LARGE, "No space left"),
    "write": (small_files, LARGE, "File too large.*/save-.*/rank-{}.pt"),
    "folder": (NOTHING, {}, "folder=None is no path"),
    **{
        name: (NOTHING, what, f"content holds what a checkpoint cannot hold(.|\n)*{said}")
        for name, (what, said) in UNFIT.items()
    },
}


@pytest.mark.parametrize(
    ("failure", "failing_rank"),
    [(name, rank) for name in FAILURES for rank in (0, 1) if rank == 0 or name != "rename"],
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
        new |= extra
    with fails() if rank == failing_rank else NOTHING():
        outcome = attempt(lambda: checkpoint.save(to, new))
    dist.barrier()
    expect_on_all(outcome)
    kind = "ConfigError" if failure == "folder" else "StateError"
    assert outcome.error == (kind if fails is NOTHING else "PeerError")
    assert outcome.text.startswith(f"rank {failing_rank}: ")
    assert re.search(said.format(failing_rank), outcome.text), outcome.text
    assert checkpoint.load(tmp_path)["version"] == 1
    assert names_in(tmp_path) == names


def expect_on_all(outcome: Outcome) -> None:
    assert of_all(outcome) == [outcome] * 2


@on_ranks(2)
def test_error_of_content_is_told_where_the_caller_handles_another_one(tmp_path: Path) -> None:
    """As where a training saves since its disk is full."""
    try:
        disk_full()
    except OSError:
        outcome = attempt(lambda: checkpoint.save(tmp_path, {"of": lambda: 1}))
    assert outcome.error == "StateError"


@on_ranks(2)
def test_folder_that_ranks_do_not_share_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    """Rank 1 does not see the folder in which rank 0 saves."""
    rank, shared = dist.get_rank(), tmp_path / "host0"
    checkpoint.save(shared, content(rank, 1))
    names = names_in(shared)
    dist.barrier()
    outcome = attempt(lambda: checkpoint.save(tmp_path / f"host{rank}", content(rank, 2)))
    dist.barrier()
    expect_on_all(outcome)
    assert outcome.error == "StateError"
    assert re.match(
        rf"rank 1: {re.escape(socket.gethostname())}:{tmp_path}/host1/save-\w+ is not there, which "
        "rank 0 has made: the ranks do not share this folder",
        outcome.text,
    ), outcome.text
    assert checkpoint.load(shared)["version"] == 1
    assert names_in(shared) == names
    assert names_in(tmp_path / "host1") == []


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
        (file,) = folder.glob("*/rank-0.pt")
        file.write_bytes(change(file.read_bytes()))

    return damage


def changed_bit(data: bytes) -> bytes:
    """Of a value. Torch loads it, silently, with another value."""
    place = data.index(torch.tensor(10.0).numpy().tobytes())
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def of_pointer(**fields: Any) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        pointer = json.loads((folder / POINTER).read_text())
        (folder / POINTER).write_text(json.dumps({**pointer, **fields}))

    return damage


def no_file(folder: Path) -> None:
    (folder / POINTER).unlink()
    (folder / POINTER).mkdir()


POINTER = "latest.json"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "changed bit": (of_file(changed_bit), "damaged"),
    "cut": (of_file(lambda data: data[:-1]), "rank-0.pt is lost, damaged, or"),
    "gone": (lambda folder: next(folder.glob("*/rank-0.pt")).unlink(), "rank-0.pt is lost"),
    "newer": (of_pointer(format=2), "another gradferry saved it, in format 2"),
    "foreign": (of_pointer(save="../secret"), "in '../secret'"),
    "ranks": (of_pointer(ranks=[0, "1"]), "it names ranks [0, '1']"),
    "folder": (no_file, "does not point to a checkpoint: "),
    "without": (lambda folder: (folder / POINTER).unlink(), "there is no checkpoint in"),
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
    pointer = {"format": 1, "ranks": [0], "files": [{}], "save": f"{SAVE}01"}
    (tmp_path / POINTER).write_text(json.dumps(pointer))
    with pytest.raises(StateError, match=r"pass rank= to load\(\)"):
        checkpoint.load(tmp_path)
    for rank in (-1, 1, "0", 0.0):
        with pytest.raises(StateError, match=f"has nothing of rank {rank}"):
            checkpoint.load(tmp_path, rank)
