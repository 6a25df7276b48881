"""Every fault of one rank, in every phase of a training, with lossy codecs, in every exchange.

Those that survive it raise one error that says who, at which step, in which bucket and phase; or go
on. Either way they have the parameters of a step that all ranks took, and have given back files and
shared memory. Simulated worlds play uneven nodes, and what befalls messages and connections.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from fault_play import Seen, case_row, hashes_of
from fault_rows import ENDS, FAULTY_STEP, STEPPING, Row, quick_rows, scenario_of
from fault_rows import slow_rows as all_rows
from world import CASE_SECONDS, WorldError, Worlds


@functools.lru_cache
def _hashes(way: str, exchange: str) -> list[str]:
    return hashes_of(scenario_of(way, exchange), FAULTY_STEP + 1)


def run_row(worlds: Worlds, row: Row, folder: Path) -> None:
    """Plays it on every rank; a victim that ends by the fault ends as it must."""
    world = worlds(row.scenario.world_size)
    if not row.ends_victim:
        world.run(case_row, row=row, folder=str(folder))
        return
    with pytest.raises(WorldError) as caught:
        world.run(case_row, grace=CASE_SECONDS, row=row, folder=str(folder))
    failed = re.findall(r"^rank (\d): (.*)", str(caught.value), re.MULTILINE)
    assert failed == [(str(row.victim), ENDS[row.fault])], caught.value


def parameters() -> list[object]:
    quick = dict.fromkeys(quick_rows())
    core = {row for row in quick if row.fault == "no scale"}
    return [
        pytest.param(
            row,
            id=str(row),
            marks=pytest.mark.slow
            if row not in quick
            else (pytest.mark.torch_core if row in core else ()),
        )
        for row in dict.fromkeys((*quick, *all_rows()))
    ]


@pytest.mark.parametrize("row", parameters())
def test_fault_of_one_rank(worlds: Worlds, tmp_path: Path, row: Row) -> None:
    run_row(worlds, row, tmp_path)
    ranks = set(range(row.scenario.world_size)) - ({row.victim} if row.ends_victim else set())
    all_seen = {rank: Seen.read(tmp_path, rank) for rank in ranks}
    if row.expected.error is None:
        assert {seen.outcome.error for seen in all_seen.values()} == {None}, all_seen
    else:
        check_errors(row, all_seen)
    check_steps(row, all_seen)


def check_errors(row: Row, all_seen: dict[int, Seen]) -> None:
    expected, survivors, own = row.expected, dict(all_seen), ""
    victim = survivors.pop(row.victim, None)
    if expected.own:
        assert victim.outcome.error == expected.own, victim
        own = re.escape(victim.outcome.headline)
    # Only where nobody tells the reason, the place says where it was missed.
    placed = row.phase in STEPPING and not own
    place = rf"(?=.*\(step {FAULTY_STEP}, (chunk|bucket) \d+, \w+)" if placed else ""
    pattern = re.compile(place + expected.text.format(victim=row.victim, own=own))
    if expected.alike:
        assert len({seen.outcome.headline for seen in survivors.values()}) == 1, all_seen
    for rank, seen in survivors.items():
        assert seen.outcome.error == expected.error, (rank, seen)
        assert pattern.match(seen.outcome.headline), (rank, seen)
    for rank, seen in (all_seen if own else survivors).items():
        if row.phase in STEPPING:  # the engine is dead
            assert seen.later.headline == seen.outcome.headline, (rank, seen)


def check_steps(row: Row, all_seen: dict[int, Seen]) -> None:
    hashes = _hashes(row.way, row.exchange)
    taken = FAULTY_STEP + (row.expected.error is None and row.phase in STEPPING)
    for rank, seen in all_seen.items():
        assert seen.parameters == hashes[taken], (rank, seen)
        assert seen.files == 0, (rank, seen)
