"""The table of faults: what happens to one rank, when, in which exchange, by which way in, and
what all ranks must make of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from scenario import Scenario, Weight

# Three buckets, of which the last holds a full tile for every rank.
WEIGHTS = (
    Weight("early", (192, 64)),
    Weight("bias", (50,)),
    Weight("middle", (70, 90)),
    Weight("late", (256, 64)),
)
WAYS: dict[str, dict[str, Any]] = {
    "q4": {"codec": "q4"},
    "sign1": {"codec": "sign1", "options": {"momentum": 0.9}},
    "topk": {"codec": "topk:ratio=0.05", "native": False},  # the hook of the standard signature
}
REDUCER = "q4, Reducer"
EXCHANGES: dict[str, dict[str, Any]] = {
    "flat": {"world_size": 3},
    "two levels": {"world_size": 4, "nodes": ((0, 1), (2, 3))},
}
# Not rank 0, which serves the store: without it nobody can say who is missing.
VICTIMS = {"flat": 1, "two levels": 3}
PHASES = ("attach", "backward", "between steps")
STEPPING = ("backward", "between steps")
FAULTY_STEP = 3


@dataclasses.dataclass(frozen=True)
class Row:
    fault: str
    phase: str
    way: str
    exchange: str
    victim: int

    def __str__(self) -> str:
        usual = self.victim == VICTIMS[self.exchange]
        victim = "" if usual else f", rank {self.victim}"
        return f"{self.fault}, {self.phase}, {self.way}, {self.exchange}{victim}"

    @property
    def scenario(self) -> Scenario:
        return scenario_of(self.way, self.exchange)

    @property
    def expected(self) -> Expected:
        place = (self.fault, self.phase)
        if self.victim == 0:
            return WITHOUT_STORE
        return EXPECTED_IN.get(place, EXPECTED[self.fault])

    @property
    def ends_victim(self) -> bool:
        return self.fault in ENDS


def scenario_of(way: str, exchange: str = "flat") -> Scenario:
    return Scenario(
        WEIGHTS,
        ddp={"bucket_cap_mb": 0.03},
        **WAYS[way.removesuffix(", Reducer")],
        **EXCHANGES[exchange],
    )


# --- what ranks must make of it -------------------------------------------------------------------

LATE = 4.0  # the timeout of a fault that only the timeout shows
SOON = 600.0  # of others: who waits for it hangs


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a rank sees that is no victim.

    Attributes:
        timeout: of the process group, in seconds.
        error: None where all ranks go on.
        text: a pattern of the error's first line; `own` in it is the first line of the victim's.
        own: the victim's error, of an engine that has failed.
        alike: whether the first line is the same on all ranks but the victim.
    """

    timeout: float = SOON
    error: str | None = "PeerError"
    # Who is slow to look sees that others have ended for the same reason, and names them, too.
    text: str = r".*lost contact with ranks? [\d, and]*\b{victim}\b.*: its connection was closed"
    own: str | None = None
    alike: bool = True


GOES_ON = Expected(error=None)
SILENT = Expected(
    LATE, text=r".*lost contact with rank {victim}\b.*: nothing came within the timeout"
)
# All ranks are there, and wait: nobody can say which of them is the cause.
MUTE = Expected(LATE, text=r".*lost contact with .*: nothing came within the timeout")
FAILED = Expected(text="rank {victim} failed: {own}$", own="StateError")
# A rank may first see another one's end, which is a consequence.
WITHOUT_STORE = Expected(
    text=r"rank \d lost contact with (rank \d|another rank) .*: its connection was closed.*"
    "the store does not answer",
    alike=False,
)
EXPECTED = {
    "kill": Expected(),
    "kill beside its child": dataclasses.replace(SILENT, timeout=2.0),  # it keeps connections open
    "exit": Expected(),
    "raise": MUTE,
    "stop": SILENT,
    "slow": GOES_ON,
    "fork": GOES_ON,
    "no scale": FAILED,
}
# At attach ranks hear at once of an exception.
TOLD = Expected(text=r"rank {victim}: UsersError: of the user's own code")
# A rank waits half of the timeout for others at attach.
ABSENT = Expected(LATE, text=r"rank {victim} did not connect within 2 s")
EXPECTED_IN = {
    ("raise", "attach"): TOLD,
    ("kill", "attach"): ABSENT,
    ("exit", "attach"): ABSENT,
    ("stop", "attach"): ABSENT,
}
# Faults that the victim's process does not survive.
KILLED = "process ended with code -9"
ENDS = {
    "kill": KILLED,
    "kill beside its child": KILLED,
    "exit": "process ended with code 3",
    "stop": KILLED,  # by the last survivor
}


# --- the rows -------------------------------------------------------------------------------------

FAULTS = ("kill", "exit", "raise", "stop", "slow", "fork")


def row(fault: str, phase: str, way: str, exchange: str, victim: int | None = None) -> Row:
    return Row(fault, phase, way, exchange, VICTIMS[exchange] if victim is None else victim)


def quick_rows() -> Iterator[Row]:
    """Every fault once, by every way in, and one that ends a rank in every phase."""
    # In a phase that is not named, a fault comes in the backward pass.
    pairs = [(fault, "backward") for fault in FAULTS]
    pairs += [("exit", "attach"), ("raise", "attach"), ("slow", "between steps")]
    ways, exchanges = list(WAYS), list(EXCHANGES)
    for i, (fault, phase) in enumerate(pairs):
        yield row(fault, phase, ways[i % len(ways)], exchanges[(i // 2 + i) % len(exchanges)])
    yield row("kill", "backward", "q4", "flat", victim=0)
    yield row("kill", "between steps", REDUCER, "flat")
    yield row("kill beside its child", "backward", "q4", "flat")
    yield row("no scale", "between steps", "topk", "flat")


def slow_rows() -> Iterator[Row]:
    yield row("kill", "backward", "q4", "two levels", victim=0)
    yield row("stop", "between steps", REDUCER, "two levels")
    yield from (
        row(fault, phase, way, exchange)
        for fault in FAULTS
        for phase in PHASES
        for way in WAYS
        for exchange in EXCHANGES
    )
