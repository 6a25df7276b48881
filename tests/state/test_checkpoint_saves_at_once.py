"""gradferry.checkpoint.save beside another save into its folder, or killed: at every line."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gradferry import checkpoint
from gradferry.core import agreement
from interleaving import Beside, run_with
from on_ranks import of_all, on_ranks
from outcomes import Outcome, attempt

OVERTAKEN = "another save was completed there meanwhile"
TRACED = {checkpoint.__file__}


def saving(folder: Path, version: int) -> Callable[[], None]:
    return lambda: checkpoint.save(folder, {"version": version, "values": torch.zeros(version)})


def no_fsync(_: int) -> None:
    """For cases in which the order of calls counts. Disks are slow."""


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@on_ranks(1)
@mock.patch("os.fsync", no_fsync)
def test_kill_at_any_line_leaves_the_old_or_the_new_one_and_the_next_save_cleans_up(
    tmp_path: Path,
) -> None:
    """At every line of a save: what a process that comes after a kill there finds and leaves."""
    place, versions = tmp_path / "saves", []
    saving(place, 1)()

    def look(line: int) -> None:
        left = shutil.copytree(place, tmp_path / str(line))
        versions.append(checkpoint.load(left)["version"])
        saving(left, 3)()
        assert checkpoint.load(left)["version"] == 3
        assert files_in(left) == ["latest.json", "rank-0.pt"]

    run_with(TRACED, look, saving(place, 2))
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}


def save_beside(place: Path, begin: int, rest: int) -> tuple[Outcome, Outcome, Any]:
    """A save of version 2 before one line of which that of version 3 begins, which rests before one
    of its own lines until the first has returned. What they raised, and what is loaded then.
    """
    outcomes: dict[int, Outcome] = {}
    others: list[Beside] = []

    def save(version: int) -> None:
        outcomes[version] = attempt(saving(place, version))

    def start(line: int) -> None:
        if line == begin:
            others.append(Beside(TRACED, rest, lambda: save(3)))

    run_with(TRACED, start, lambda: save(2))
    for other in others:
        other.finish()
    return outcomes[2], outcomes[3], checkpoint.load(place)["version"]


NEVER = -1


@on_ranks(1)
@mock.patch("os.fsync", no_fsync)
def test_of_two_saves_at_once_one_is_complete_and_the_other_one_too_or_raises(
    tmp_path: Path,
) -> None:
    """A save begins at every line of another; or before the last line at which that one can fail,
    and rests at every line; and some pairs. See `save_beside`.
    """
    lines, under_way = [], []

    def look(line: int) -> None:
        lines.append(line)
        if any(tmp_path.glob("save-*.json")):
            under_way.append(line)

    saving(tmp_path, 1)()
    run_with(TRACED, look, saving(tmp_path, 1))
    rng, ends = random.Random(0), set()
    pairs = [(begin, NEVER) for begin in lines]
    # It removes one save more, in less than 20 lines.
    pairs += [(under_way[-1], rest) for rest in range(len(lines) + 20)]
    pairs += [(rng.choice(lines), rng.choice(lines)) for _ in range(40)]
    for pair in pairs:
        first, second, loaded = save_beside(tmp_path, *pair)
        done = [version for version, o in ((2, first), (3, second)) if o.error is None]
        assert loaded in done, (pair, first, second)
        for outcome in (first, second):
            assert outcome.error in (None, "StateError"), (pair, outcome)
            assert outcome.error is None or OVERTAKEN in outcome.text
        saving(tmp_path, 4)()
        assert files_in(tmp_path) == ["latest.json", "rank-0.pt"], pair
        ends.add((len(done), loaded))
    assert ends == {(1, 2), (1, 3), (2, 2), (2, 3)}


@pytest.mark.parametrize("place", [2, 3, 4])
@on_ranks(2)
def test_save_that_another_one_overtakes_raises_on_all_ranks(tmp_path: Path, place: int) -> None:
    """Another save of all ranks comes before one of the records that a save gathers."""
    rank, gather = dist.get_rank(), agreement.gather_records
    calls = 0

    def gather_after_save(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == place:
            with mock.patch.object(agreement, "gather_records", gather):
                checkpoint.save(tmp_path, {"version": 3, "rank": rank})
        return gather(*arguments)

    with mock.patch.object(agreement, "gather_records", gather_after_save):
        outcome = attempt(lambda: checkpoint.save(tmp_path, {"version": 2, "rank": rank}))
    dist.barrier()
    assert checkpoint.load(tmp_path) == {"version": 3, "rank": rank}
    assert files_in(tmp_path) == ["latest.json", "rank-0.pt", "rank-1.pt"]
    # Before the first it had not begun. At the last it was complete before the other one began.
    assert outcome.error == ("StateError" if place < 4 else None)
    assert place == 4 or OVERTAKEN in outcome.text
    assert of_all(outcome) == [outcome] * 2
