"""Every fault of one rank, in every phase of a training, with lossy codecs, on one level and two.

Those that survive it raise one error that says who, at which step, in which bucket and phase; or go
on. Either way they have the parameters, and the checkpoint, of a step that all ranks took.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_cells import (
    AT_A_LINK,
    CODECS,
    FAULTS,
    FAULTY_STEP,
    PHASES,
    SAVED_STEPS,
    TOPOLOGIES,
    UNEVEN_TOPOLOGIES,
    Cell,
    Seen,
    case_cell,
    hashes_of,
)
from scenario import Scenario
from world import CASE_SECONDS, World, WorldError

Worlds = Callable[[int], World]

LATE = 4.0  # the timeout of a fault that only the timeout shows
SOON = 600.0  # of others: who waits for it hangs


@dataclasses.dataclass(frozen=True)
class Expected:
    """`error`: of survivors; None: all ranks go on."""

    timeout: float = SOON
    error: str | None = "PeerError"
    text: str = r".*lost contact with rank {victim}\b.*: its connection was closed"


GOES_ON = Expected(error=None)
SILENT = Expected(
    LATE, text=r".*lost contact with rank {victim}\b.*: nothing came within the timeout"
)
# All ranks are there, and wait: nobody can say which of them is the cause.
MUTE = Expected(LATE, text=r".*lost contact with .*: nothing came within the timeout")
EXPECTED = {
    "kill": Expected(),
    "exit": Expected(),
    "raise": MUTE,
    "stop": SILENT,
    "slow": GOES_ON,
    "fork": GOES_ON,
    "corrupt byte": Expected(
        error="ProtocolError", text=r".*refused a message from rank {victim}\b.*: checksum is"
    ),
    # Either end of the connection may be the first to see that it ended.
    "truncated": Expected(text=r".*lost contact with rank \d.*: its connection was closed"),
    "link down": MUTE,
    "link down 3 s": GOES_ON,
}
# In attach and save ranks hear at once of an exception.
TOLD = Expected(text=r"rank {victim}: UsersError: of the user's own code")
# A rank waits half of the timeout for others at attach.
ABSENT = Expected(LATE, text=r"rank {victim} did not connect within 2 s")
EXPECTED_IN = {
    ("raise", "attach"): TOLD,
    ("raise", "save"): TOLD,
    ("kill", "attach"): ABSENT,
    ("exit", "attach"): ABSENT,
    ("stop", "attach"): ABSENT,
    # The first rank whose timeout is over closes its connections, also to those that still wait.
    ("stop", "save"): Expected(
        LATE,
        text=r".*lost contact with rank {victim}\b.*: "
        "(nothing came within the timeout|its connection was closed)",
    ),
}
ENDS = {"kill": "process ended with code -9", "exit": "process ended with code 3"}


def expected_of(fault: str, phase: str) -> Expected:
    return EXPECTED_IN.get((fault, phase), EXPECTED[fault])


def makes_sense(fault: str, phase: str) -> bool:
    """A link is that of the engine's own connections, which exist from attach on."""
    if fault in ("corrupt byte", "truncated"):
        return phase == "backward"
    return fault not in AT_A_LINK or phase in ("backward", "between steps")


def cells() -> list[Cell]:
    codecs = list(CODECS)
    uneven = [
        Cell(
            fault,
            codecs[(i + j) % len(codecs)],
            topology,
            "backward",
            expected_of(fault, "backward").timeout,
        )
        for i, fault in enumerate(("kill", "stop", "link down"))
        for j, topology in enumerate(UNEVEN_TOPOLOGIES)
    ]
    return uneven + [
        Cell(fault, codec, topology, phase, expected_of(fault, phase).timeout)
        for fault in FAULTS
        for phase in PHASES
        if makes_sense(fault, phase)
        for codec in CODECS
        for topology in TOPOLOGIES
    ]


def quick_cells() -> set[Cell]:
    """Every fault once, and one that ends a rank in every phase; codecs and topologies rotate."""
    pairs = [(fault, "backward") for fault in FAULTS]
    pairs += [("kill", "save"), ("exit", "attach"), ("raise", "save"), ("slow", "between steps")]
    pairs += [("raise", "attach")]
    codecs, topologies = list(CODECS), list(TOPOLOGIES)
    return {
        Cell(
            fault,
            codecs[i % len(codecs)],
            topologies[(i // 2 + i) % len(topologies)],
            phase,
            expected_of(fault, phase).timeout,
        )
        for i, (fault, phase) in enumerate(pairs)
    }


QUICK = quick_cells()


@functools.lru_cache
def _hashes(codec: str, topology: str) -> list[str]:
    return hashes_of(Cell("", codec, topology, "", 0).scenario, FAULTY_STEP + 1)


def run_cell(worlds: Worlds, cell: Cell, folder: Path) -> None:
    """On every rank; those that end by the fault end as they must."""
    world = worlds(cell.scenario.world_size)
    if cell.fault not in ENDS and cell.fault != "stop":
        world.run(case_cell, cell=cell, folder=str(folder))
        return
    with pytest.raises(WorldError) as caught:
        world.run(case_cell, grace=CASE_SECONDS, cell=cell, folder=str(folder))
    failed = re.findall(r"^rank (\d): (.*)", str(caught.value), re.MULTILINE)
    assert failed == [(str(cell.victim), ENDS.get(cell.fault, ENDS["kill"]))], caught.value


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=() if cell in QUICK else pytest.mark.slow)
        for cell in cells()
    ],
)
def test_fault_of_one_rank(worlds: Worlds, tmp_path: Path, cell: Cell) -> None:
    run_cell(worlds, cell, tmp_path)
    scenario, expected = cell.scenario, expected_of(cell.fault, cell.phase)
    gone = cell.fault in ENDS or cell.fault == "stop"
    ranks = [rank for rank in range(scenario.world_size) if not (gone and rank == cell.victim)]
    all_seen = {rank: Seen.read(tmp_path, rank) for rank in ranks}
    if expected.error is None:
        assert {seen.outcome.error for seen in all_seen.values()} == {None}, all_seen
    else:
        check_errors(cell, expected, all_seen)
    check_steps(cell, expected, all_seen, scenario)


def check_errors(cell: Cell, expected: Expected, all_seen: dict[int, Seen]) -> None:
    place = ""
    if cell.phase in ("backward", "between steps"):
        place = rf"(?=.*\(step {FAULTY_STEP}, (chunk|bucket) \d+, \w+)"
    pattern = re.compile(place + expected.text.format(victim=cell.victim))
    for rank, seen in all_seen.items():
        if rank == cell.victim and cell.fault in ("raise", "link down"):
            continue  # it has its own
        assert seen.outcome.error == expected.error, (rank, seen)
        assert pattern.match(seen.outcome.headline), (rank, seen)
        if place:  # the engine is dead
            assert seen.later.headline == seen.outcome.headline
    survivors = [seen for rank, seen in all_seen.items() if rank != cell.victim]
    assert len({seen.outcome.headline for seen in survivors}) == 1, all_seen


def check_steps(
    cell: Cell, expected: Expected, all_seen: dict[int, Seen], scenario: Scenario
) -> None:
    hashes = _hashes(cell.codec, cell.topology)
    good = expected.error is None
    taken = FAULTY_STEP + (good and cell.phase in ("backward", "between steps"))
    saved = FAULTY_STEP if good and cell.phase == "save" else SAVED_STEPS
    for rank, seen in all_seen.items():
        assert seen.parameters == hashes[taken], (rank, seen)
        assert seen.checkpoint == (saved, hashes[saved]), (rank, seen)
