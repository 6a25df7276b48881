"""gradferry.checkpoint: old or new, never half."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from outcomes import Outcome, attempt
from world import World


def content(rank: int, version: int) -> dict[str, Any]:
    return {"version": version, "values": torch.full((5,), 10.0 * version + rank)}


def case_save_twice(folder: str) -> list[Any]:
    from gradferry import checkpoint

    rank = dist.get_rank()
    before = checkpoint.exists(folder)
    seen = []
    for version in (1, 2):
        checkpoint.save(folder, content(rank, version))
        dist.barrier()
        seen.append((checkpoint.load(folder), sorted(path.name for path in Path(folder).iterdir())))
        dist.barrier()
    return [before, checkpoint.exists(folder), seen, checkpoint.load_all(folder)]


def test_checkpoint_replaces_the_one_before_and_leaves_nothing_of_it(
    world_of_2: World, tmp_path: Path
) -> None:
    answers = world_of_2.run(case_save_twice, folder=str(tmp_path / "new" / "folder"))
    for rank, (before, after, seen, everything) in enumerate(answers):
        assert (before, after) == (False, True)
        for version, (loaded, names) in enumerate(seen, start=1):
            assert loaded["version"] == version
            assert torch.equal(loaded["values"], content(rank, version)["values"])
            assert len(names) == 3
            assert names[0] == "manifest.json"
            assert [name.split("-")[1] for name in names[1:]] == ["0", "1"]
        assert not set(seen[0][1][1:]) & set(seen[1][1][1:])
        assert [float(c["values"][0]) for c in everything] == [20.0, 21.0]


def case_save_while_a_rank_lags(folder: str, lagging: int) -> Any:
    """After every save one rank goes on only when the other has written its next file."""
    from gradferry import checkpoint

    rank = dist.get_rank()
    saves = 4
    gather, named = checkpoint.gather_records, set[str]()
    calls = 0

    def lag(*arguments: Any) -> Any:
        nonlocal calls
        gathered = gather(*arguments)
        calls += 1
        # The second of a save is the last: now the other rank is free to go on to its next save.
        if calls % 2 == 0 and calls < 2 * saves:
            manifest = json.loads((Path(folder) / "manifest.json").read_text())
            named.update(file["name"] for file in manifest["files"])
            deadline = time.monotonic() + 60
            while not {p.name for p in Path(folder).glob(f"rank-{1 - rank}-*.pt")} - named:
                assert time.monotonic() < deadline
        return gathered

    versions = []
    with mock.patch.object(checkpoint, "gather_records", lag if rank == lagging else gather):
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


LEFT_BEHIND = ("rank-0-00.tmp", "rank-1-01.pt", "rank-2-02.pt", "rank-10-03.tmp")


def test_files_of_saves_that_were_killed_and_of_ranks_that_are_gone_are_removed(
    world_of_2: World, tmp_path: Path
) -> None:
    for name in (*LEFT_BEHIND, "rank-0-notes.txt"):
        (tmp_path / name).touch()
    world_of_2.run(case_save_once, folder=str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert not set(names) & set(LEFT_BEHIND)
    assert "rank-0-notes.txt" in names
    assert len(names) == 4


@dataclasses.dataclass
class NotATensor:
    value: int = 0


def case_save_refused(folder: str, refusing_rank: int) -> list[Any]:
    """What each unloadable content is called, and what is in the folder then."""
    from gradferry import checkpoint

    rank = dist.get_rank()
    checkpoint.save(folder, content(rank, 1))
    names = sorted(path.name for path in Path(folder).iterdir())
    dist.barrier()
    answers = []
    for wrong in (
        {"best": np.float64(0.5)},
        {"nested": [{"deep": (torch.zeros(2), np.zeros(2))}]},
        {"schedule": {"lambda": lambda step: step}},
        {"own": NotATensor()},
        {NotATensor: 1},
    ):
        value = {**content(rank, 2), **(wrong if rank == refusing_rank else {})}
        outcome = attempt(functools.partial(checkpoint.save, folder, value))
        dist.barrier()
        left = sorted(path.name for path in Path(folder).iterdir())
        answers.append((outcome, checkpoint.load(folder)["version"], left == names))
        dist.barrier()
    return answers


@pytest.mark.parametrize("refusing_rank", [0, 1])
def test_content_that_load_would_refuse_is_named_on_all_ranks_and_the_old_one_stays(
    world_of_2: World, tmp_path: Path, refusing_rank: int
) -> None:
    answers = world_of_2.run(case_save_refused, folder=str(tmp_path), refusing_rank=refusing_rank)
    texts = [
        "content['best'] is a numpy.float64",
        "content['nested'][0]['deep'][1] is a numpy.ndarray",
        "content['schedule']['lambda'] is a function",
        "content['own'] is a test_checkpoint.NotATensor",
        "of content is a type",
    ]
    for outcomes in answers:
        for (outcome, version, unchanged), text in zip(outcomes, texts, strict=True):
            assert outcome.error == "StateError"
            assert outcome.text.startswith(f"rank {refusing_rank}: ")
            assert f"{text}, which a checkpoint cannot hold" in outcome.text
            assert (version, unchanged) == (1, True)
    assert answers[0][0][0].text == answers[1][0][0].text


def case_save_fails(folder: str, call: str, failing_rank: int) -> Any:
    from gradferry import checkpoint

    rank = dist.get_rank()
    checkpoint.save(folder, content(rank, 1))
    broken = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with mock.patch(call, broken) if rank == failing_rank else contextlib.nullcontext():
        outcome = attempt(lambda: checkpoint.save(folder, content(rank, 2)))
    return outcome, checkpoint.load(folder)["version"]


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace"])
def test_rank_that_cannot_write_is_one_error_on_all_and_the_old_one_stays(
    world_of_2: World, tmp_path: Path, call: str, failing_rank: int
) -> None:
    answers = world_of_2.run(
        case_save_fails, folder=str(tmp_path), call=call, failing_rank=failing_rank
    )
    assert len({outcome.text for outcome, _ in answers}) == 1
    for outcome, version in answers:
        assert outcome.error == "PeerError"
        assert f"rank {failing_rank}: " in outcome.text
        assert "No space left on device" in outcome.text
        assert version == 1


def case_save_once(folder: str) -> None:
    from gradferry import checkpoint

    checkpoint.save(folder, content(dist.get_rank(), 1))


def case_load(folder: str) -> Outcome:
    from gradferry import checkpoint

    return attempt(lambda: checkpoint.load(folder, 0))


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
    elif how == "newer":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 2}))
    elif how == "foreign":
        manifest.write_text(json.dumps({"format": 1, "files": [{"name": "../secret"}]}))
    elif how == "no manifest":
        manifest.unlink()
    elif how == "half a manifest":
        manifest.write_text(manifest.read_text()[:20])


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("flipped bit", "is not what was saved"),
        ("cut", "is not what was saved"),
        ("gone", "lacks rank-0-"),
        ("newer", "has format 2"),
        ("foreign", "names foreign files"),
        ("no manifest", "there is no checkpoint in"),
        ("half a manifest", "is no manifest of a checkpoint"),
    ],
)
def test_damaged_checkpoint_is_refused_by_name(
    world_of_2: World, tmp_path: Path, how: str, text: str
) -> None:
    world_of_2.run(case_save_once, folder=str(tmp_path))
    damage(tmp_path, how)
    outcome = world_of_2.run(case_load, folder=str(tmp_path))[0]
    assert outcome.error == "StateError"
    assert text in outcome.text


def case_no_such_rank(folder: str) -> Outcome:
    from gradferry import checkpoint

    return attempt(lambda: checkpoint.load(folder, 2))


def test_rank_that_did_not_save_is_refused(world_of_2: World, tmp_path: Path) -> None:
    world_of_2.run(case_save_once, folder=str(tmp_path))
    outcome = world_of_2.run(case_no_such_rank, folder=str(tmp_path))[0]
    assert outcome.error == "StateError"
    assert "is of 2 ranks and has nothing of rank 2" in outcome.text
