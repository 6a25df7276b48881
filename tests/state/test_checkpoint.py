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
import time
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
from gradferry.core import agreement
from outcomes import attempt
from world import World


def content(rank: int, version: int) -> dict[str, Any]:
    return {"version": version, "values": torch.full((5,), 10.0 * version + rank)}


def names_in(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


# What saves leave that were killed, and ranks that are gone.
LEFT_BEHIND = (
    *("rank-0-00.tmp", "rank-1-01.pt", "rank-2-02.pt", "rank-10-03.tmp"),
    *("manifest-02.tmp", "manifest-04.tmp"),
)


def case_save_twice(folder: str) -> list[Any]:
    rank = dist.get_rank()
    before = checkpoint.exists(folder)
    seen = []
    for version in (1, 2):
        checkpoint.save(folder, content(rank, version))
        dist.barrier()
        seen.append((checkpoint.load(folder), names_in(folder)))
        dist.barrier()
    return [before, checkpoint.exists(folder), seen, checkpoint.load_all(folder)]


def test_checkpoint_replaces_the_one_before_and_leaves_nothing_of_it(
    world_of_2: World, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "folder"
    folder.mkdir(parents=True)
    for name in (*LEFT_BEHIND, "notes.txt"):
        (folder / name).touch()
    answers = world_of_2.run(case_save_twice, folder=str(folder))
    for rank, (before, after, seen, everything) in enumerate(answers):
        assert (before, after) == (False, True)
        for version, (loaded, names) in enumerate(seen, start=1):
            assert loaded["version"] == version
            assert torch.equal(loaded["values"], content(rank, version)["values"])
            assert len(names) == 4
            assert [names[0], names[1]] == ["manifest.json", "notes.txt"]
            assert [name.split("-")[1] for name in names[2:]] == ["0", "1"]
            assert not set(names) & set(LEFT_BEHIND)
        assert not set(seen[0][1][2:]) & set(seen[1][1][2:])
        assert [float(c["values"][0]) for c in everything] == [20.0, 21.0]


def case_save_while_a_rank_lags(folder: str, lagging: int) -> Any:
    """After every save one rank goes on only when the other has written its next file."""
    rank = dist.get_rank()
    saves = 4
    gather, named = agreement.gather_records, set[str]()
    calls = 0

    def lag(*arguments: Any) -> Any:
        nonlocal calls
        gathered = gather(*arguments)
        calls += 1
        # The third of a save is the last, and the first of the next one tells rank 0's token: now
        # the other rank is free to write its next file.
        if calls % 3 == 1 and 1 < calls:
            manifest = json.loads((Path(folder) / "manifest.json").read_text())
            named.update(file["name"] for file in manifest["files"])
            deadline = time.monotonic() + 60
            while not {p.name for p in Path(folder).glob(f"rank-{1 - rank}-*.pt")} - named:
                assert time.monotonic() < deadline
        return gathered

    versions = []
    with mock.patch.object(agreement, "gather_records", lag if rank == lagging else gather):
        for version in range(saves):
            checkpoint.save(folder, content(rank, version))
            versions.append(checkpoint.load(folder)["version"])
    dist.barrier()
    return versions, sorted(path.name.rsplit("-", 1)[0] for path in Path(folder).iterdir())


@pytest.mark.parametrize("lagging", [0, 1])
def test_rank_that_lags_leaves_the_next_checkpoint_of_the_others_alone(
    world_of_2: World, tmp_path: Path, lagging: int
) -> None:
    answers = world_of_2.run(case_save_while_a_rank_lags, folder=str(tmp_path), lagging=lagging)
    for versions, names in answers:
        assert versions == [0, 1, 2, 3]
        assert names == ["manifest.json", "rank-0", "rank-1"]


def case_save_where_nothing_can_be_removed(folder: str) -> list[Any]:
    """A save that completes and one that is refused, where every warning is an error."""
    rank = dist.get_rank()
    checkpoint.save(folder, content(rank, 1))
    busy = mock.patch.object(Path, "unlink", side_effect=OSError("busy"))
    with busy, warnings.catch_warnings():
        warnings.simplefilter("error", gradferry.GradferryWarning)
        saved = attempt(lambda: checkpoint.save(folder, content(rank, 2)))
        dist.barrier()
        version = checkpoint.load(folder)["version"]
        unfit = gradferry.StateError("cannot be loaded")
        with mock.patch.object(checkpoint, "write_content", side_effect=unfit):
            refused = attempt(lambda: checkpoint.save(folder, content(rank, 3)))
    return [saved.text, version, refused.error]


def test_warnings_that_are_errors_neither_undo_a_save_nor_hide_its_error(
    world_of_2: World, tmp_path: Path
) -> None:
    answers = world_of_2.run(case_save_where_nothing_can_be_removed, folder=str(tmp_path))
    assert answers == [["", 2, "StateError"]] * 2


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
UNFIT = ".*which a checkpoint cannot hold"
# Where a rank cannot save: what is so there, what it saves, and what its error says.
FAILURES: dict[str, tuple[Callable[[], Any], dict[Any, Any], str]] = {
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
    # What load would refuse.
    "number": (
        NOTHING,
        {"best": np.float64(0.5)},
        rf"content\['best'\] .*numpy\.float64{UNFIT}",
    ),
    "array": (
        NOTHING,
        {"nested": [{"deep": (torch.zeros(2), np.zeros(2))}]},
        rf"content\['nested'\]\[0\]\['deep'\]\[1\] .*numpy\.ndarray{UNFIT}",
    ),
    "function": (
        NOTHING,
        {"schedule": {"lambda": lambda step: step}},
        rf"content\['schedule'\]\['lambda'\] .*function{UNFIT}",
    ),
    "own": (
        NOTHING,
        {"own": NotATensor()},
        rf"content\['own'\] .*NotATensor{UNFIT}",
    ),
    "key": (NOTHING, {NotATensor: 1}, f"the key .*NotATensor.* of content{UNFIT}"),
}


def case_save_fails(folder: str, failure: str, failing_rank: int) -> Any:
    rank = dist.get_rank()
    checkpoint.save(folder, content(rank, 1))
    names = names_in(folder)
    dist.barrier()
    context, extra, _ = FAILURES[failure] if rank == failing_rank else (NOTHING, {}, "")
    with context():
        new = {**content(rank, 2), **extra} if isinstance(extra, dict) else extra
        to = None if failure == "folder" and rank == failing_rank else folder
        outcome = attempt(lambda: checkpoint.save(to, new))
    dist.barrier()
    return outcome, checkpoint.load(folder)["version"], names_in(folder) == names


@pytest.mark.parametrize(
    ("failure", "failing_rank"),
    [(name, rank) for name in FAILURES for rank in (0, 1) if rank == 0 or name != "manifest"],
)
def test_rank_that_cannot_save_is_one_error_on_all_and_leaves_the_old_one_alone(
    world_of_2: World, tmp_path: Path, failure: str, failing_rank: int
) -> None:
    answers = world_of_2.run(
        case_save_fails, folder=str(tmp_path), failure=failure, failing_rank=failing_rank
    )
    assert len({outcome.text for outcome, _, _ in answers}) == 1
    context, _, said = FAILURES[failure]
    for outcome, version, unchanged in answers:
        kind = "ConfigError" if failure in ("list", "folder") else "StateError"
        assert outcome.error == (kind if context is NOTHING else "PeerError")
        assert outcome.text.startswith(f"rank {failing_rank}: ")
        assert re.search(said.format(failing_rank), outcome.text), outcome.text
        assert (version, unchanged) == (1, True)


def case_unshared(folder: str) -> Any:
    """Rank 1 writes to a folder that rank 0 does not see."""
    rank = dist.get_rank()
    mine = Path(folder, "host0")
    checkpoint.save(mine, content(rank, 1))
    names = names_in(mine)
    dist.barrier()
    own = Path(folder, f"host{rank}")
    with mock.patch.object(checkpoint, "_SHARE_SECONDS", 0.0):
        outcome = attempt(lambda: checkpoint.save(own, content(rank, 2)))
    dist.barrier()
    unchanged = names == names_in(mine)
    left = list(Path(folder, "host1").iterdir())
    return outcome, checkpoint.load(mine)["version"], unchanged, left


def test_folder_that_ranks_do_not_share_is_refused_and_the_old_one_stays(
    world_of_2: World, tmp_path: Path
) -> None:
    answers = world_of_2.run(case_unshared, folder=str(tmp_path))
    assert len({outcome.text for outcome, *_ in answers}) == 1
    host = re.escape(socket.gethostname())
    for outcome, version, unchanged, left in answers:
        assert outcome.error == "StateError"
        assert re.match(
            r"rank 0: the ranks do not share the folder: rank 1 has written \d+ bytes to "
            rf"{host}:{tmp_path}/host1/rank-1-\w+\.pt, and rank 0 finds nothing at "
            rf"{host}:{tmp_path}/host0/rank-1-\w+\.pt; ",
            outcome.text,
        ), outcome.text
        assert (version, unchanged, left) == (1, True, [])


def case_seen_late(folder: str) -> tuple[int, int]:
    """A client of NFS sees another one's new file late, and first with another size."""
    seen = [None, 7]
    size = checkpoint._size
    with mock.patch.object(checkpoint, "_size", lambda path: seen.pop(0) if seen else size(path)):
        checkpoint.save(folder, content(dist.get_rank(), 1))
    return len(seen), checkpoint.load(folder)["version"]


def test_files_that_rank_0_sees_late_are_waited_for(world_of_2: World, tmp_path: Path) -> None:
    # Rank 0 alone looks.
    assert world_of_2.run(case_seen_late, folder=str(tmp_path)) == [(0, 1), (2, 1)]


def case_save_in_group(folder: str) -> list[Any]:
    """Ranks 1 and 2 save. What each rank loads, by itself and by number."""
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    if rank != 0:
        checkpoint.save(folder, content(rank, 1), group)
    dist.barrier()
    loaded: list[Any] = []
    for arguments in ((), (0,), (1,), (2,)):
        try:
            loaded.append(float(checkpoint.load(folder, *arguments)["values"][0]))
        except checkpoint.StateError as error:
            loaded.append(str(error))
    return loaded


def test_each_rank_of_a_group_loads_what_it_saved(world_of_3: World, tmp_path: Path) -> None:
    answers = world_of_3.run(case_save_in_group, folder=str(tmp_path))
    assert [answer[0] for answer in answers[1:]] == [11.0, 12.0]
    assert "ranks 1 and 2 of the default group, and has nothing of rank 0" in answers[0][0]
    for answer in answers:  # as they are in the group
        assert answer[1:3] == [11.0, 12.0]
        assert "is of 2 ranks" in answer[3]
        assert "has nothing of rank 2" in answer[3]


def case_save_once(folder: str) -> None:
    checkpoint.save(folder, content(dist.get_rank(), 1))


def damage(folder: Path, how: str) -> None:
    file = next(folder.glob("rank-0-*.pt"))
    manifest = folder / "manifest.json"
    if how == "flipped bit":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "gone":
        file.unlink()
    elif how in MANIFESTS:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **MANIFESTS[how]}))
    elif how.startswith("no "):
        changed = json.loads(manifest.read_text())
        del changed["files"][0][how.removeprefix("no ")]
        manifest.write_text(json.dumps(changed))
    elif how == "folder":
        manifest.unlink()
        manifest.mkdir()
    elif how == "without":
        manifest.unlink()
    elif how == "half a manifest":
        manifest.write_text(manifest.read_text()[:20])


MANIFESTS: dict[str, dict[str, Any]] = {
    "newer": {"format": 2},
    "foreign": {"files": [{"name": "../secret"}]},
    "ranks": {"ranks": [0, "1"]},
}


@pytest.fixture(scope="module")
def of_two(worlds: Callable[[int], World], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks have saved."""
    folder = tmp_path_factory.mktemp("saved")
    worlds(2).run(case_save_once, folder=str(folder))
    return folder


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("flipped bit", "is not what was saved"),
        ("cut", "is not what was saved"),
        ("gone", "lacks rank-0-"),
        ("newer", "has format 2"),
        ("foreign", "names foreign files"),
        ("ranks", "its ranks are [0, '1']"),
        ("no bytes", "is not what was saved"),
        ("no blake2b", "is not what was saved"),
        ("folder", "cannot be read: "),
        ("without", "there is no checkpoint in"),
        ("half a manifest", "is no manifest of a checkpoint"),
    ],
)
def test_damaged_checkpoint_is_refused_by_name(
    of_two: Path, tmp_path: Path, how: str, text: str
) -> None:
    damaged = shutil.copytree(of_two, tmp_path / "damaged")
    damage(damaged, how)
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
