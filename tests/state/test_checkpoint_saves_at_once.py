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
from gradferry.core import agreement, content_file
from interleaving import Beside, run_with
from outcomes import Outcome, attempt
from world import World

OVERTAKEN = "another save was completed there meanwhile"


def traced() -> set[str]:
    return {module.__file__ for module in (checkpoint, content_file)}


def saving(folder: Path, version: int) -> Callable[[], None]:
    return lambda: checkpoint.save(folder, {"version": version, "values": torch.zeros(version)})


def no_fsync(_: int) -> None:
    """For cases in which the order of calls counts. Disks are slow."""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name.rsplit("-", 1)[0] for path in folder.iterdir())


@mock.patch("os.fsync", no_fsync)
def case_killed(folder: str) -> list[Any]:
    """At every line of a save: what a process that comes after a kill there finds and leaves."""
    place = Path(folder, "saves")
    saving(place, 1)()
    found = []

    def look(line: int) -> None:
        left = shutil.copytree(place, Path(folder, str(line)))
        version = checkpoint.load(left)["version"]
        saving(left, 3)()
        found.append((version, checkpoint.load(left)["version"], names_in(left)))

    run_with(traced(), look, saving(place, 2))
    return found


def test_kill_at_any_line_leaves_the_old_or_the_new_one_and_the_next_save_cleans_up(
    worlds: Callable[[int], World], tmp_path: Path
) -> None:
    (found,) = worlds(1).run(case_killed, folder=str(tmp_path))
    versions = [version for version, _, _ in found]
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}
    assert {(after, *names) for _, after, names in found} == {(3, "manifest.json", "rank-0")}


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
            others.append(Beside(traced(), rest, lambda: save(3)))

    run_with(traced(), start, lambda: save(2))
    for other in others:
        other.finish()
    return outcomes[2], outcomes[3], checkpoint.load(place)["version"]


NEVER = -1


@mock.patch("os.fsync", no_fsync)
def case_interleaved(folder: str, drawn: int) -> list[Any]:
    """Begins a save at every line of another, and some pairs that overlap. See `save_beside`."""
    place = Path(folder)
    lines: list[int] = []
    saving(place, 1)()
    run_with(traced(), lines.append, saving(place, 1))
    rng = random.Random(0)
    pairs = [(begin, NEVER) for begin in lines]
    pairs += [(rng.choice(lines), rng.choice(lines)) for _ in range(drawn)]
    results = []
    for pair in pairs:
        first, second, loaded = save_beside(place, *pair)
        saving(place, 4)()
        results.append((pair, first, second, loaded, names_in(place)))
    return results


def test_of_two_saves_at_once_one_is_complete_and_the_other_one_too_or_raises(
    worlds: Callable[[int], World], tmp_path: Path
) -> None:
    (results,) = worlds(1).run(case_interleaved, folder=str(tmp_path), drawn=80)
    ends = set()
    for pair, first, second, loaded, names in results:
        done = [version for version, o in ((2, first), (3, second)) if o.error is None]
        assert loaded in done, (pair, first, second)
        for outcome in (first, second):
            assert outcome.error in (None, "StateError"), (pair, outcome)
            assert outcome.error is None or OVERTAKEN in outcome.text
        assert names == ["manifest.json", "rank-0"], pair
        ends.add((len(done), loaded))
    assert ends == {(1, 2), (1, 3), (2, 2), (2, 3)}


def case_save_within(folder: str, place: int) -> tuple[Outcome, int, list[str]]:
    """Another save of all ranks comes before one of the records that a save gathers."""
    rank, gather = dist.get_rank(), agreement.gather_records
    calls = 0

    def gather_after_save(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == place:
            with mock.patch.object(agreement, "gather_records", gather):
                checkpoint.save(folder, {"version": 3, "rank": rank})
        return gather(*arguments)

    with mock.patch.object(agreement, "gather_records", gather_after_save):
        outcome = attempt(lambda: checkpoint.save(folder, {"version": 2, "rank": rank}))
    dist.barrier()
    content = checkpoint.load(folder)
    assert content["rank"] == rank
    return outcome, content["version"], names_in(Path(folder))


@pytest.mark.parametrize("place", [1, 2, 3])
def test_save_that_another_one_overtakes_raises_on_all_ranks(
    world_of_2: World, tmp_path: Path, place: int
) -> None:
    answers = world_of_2.run(case_save_within, folder=str(tmp_path), place=place)
    assert len({outcome.text for outcome, _, _ in answers}) == 1
    for outcome, version, names in answers:
        assert version == 3
        assert names == ["manifest.json", "rank-0", "rank-1"]
        if place < 3:
            assert outcome.error == "StateError"
            assert OVERTAKEN in outcome.text
        else:  # it was complete before the other one began
            assert outcome.error is None
