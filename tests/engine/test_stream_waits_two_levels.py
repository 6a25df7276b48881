"""Every wait of a step between nodes of several ranks is needed, or another one covers it.

Which ones those are says a model of the schedule in docs/design/streams.md, with what every
operation reads and writes. It shares nothing with the fake device, which must find what the model
says. Collectives proceed one at a time there, and any two must be ordered.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixed import NODES
from scenario import Scenario, Weight
from test_collective_order import PATIENCE, one_at_a_time
from test_stream_waits import case_omit_waits
from world import World

Worlds = Callable[[int], World]

SLOTS = 5
# By bucket: one of fewer than slots, and one whose last chunk gets the slot of its first.
CHUNKS = (1, 6)
COLLECTIVES = ("commit", "local scatter", "scatter", "gather", "forward")


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


class Step:
    """What the engine of a rank enqueues in a step, and what comes after what.

    A rank alone on its node sends itself a header, which it does not read.
    """

    def __init__(
        self, *, staged: bool, siblings: bool, peers: bool, residual: bool, omitted: int = -1
    ) -> None:
        self.staged, self.siblings, self.peers = staged, siblings, peers
        self.residual, self.omitted = residual, omitted
        self.names: list[str] = []  # of waits
        self.known = dict.fromkeys(
            ("host", "current", "E", "F", "C", "L", "P", "N"), 0
        )  # bit masks
        self.operations: list[tuple[int, set[Any], set[Any]]] = []
        self.free: dict[int, int] = {}  # by slot: what F had done when it was freed
        self.chunks = 0

    def add(self, stream: str, reads: set[Any], writes: set[Any]) -> None:
        after = self.known[stream] | self.known["host"]
        self.known[stream] = after | 1 << len(self.operations)
        self.operations.append((after, reads, writes))

    def wait(self, name: str, stream: str, known: int) -> None:
        if len(self.names) != self.omitted:
            self.known[stream] |= known
        self.names.append(name)

    def post(
        self, name: str, lane: str, stream: str, send: Any, receive: Any
    ) -> tuple[str, Any, int]:
        if self.staged:
            self.add(stream, {send}, {("host", send)})
            self.wait(f"{name} copied", "host", self.known[stream])
            self.add(lane, {("host", send)}, {("host", receive)})
        else:
            self.wait(f"{name} enqueued", "C", self.known[stream])
            self.known[lane] |= self.known["C"]
            self.add(lane, {send}, {receive, "the communicators"})
            self.wait(f"behind {name}", "C", self.known[lane])
        return name, receive, self.known[lane]

    def finish(self, transfer: tuple[str, Any, int], stream: str) -> None:
        name, receive, known = transfer
        self.wait(name, "host" if self.staged else stream, known)
        if self.staged:
            self.add(stream, {("host", receive)}, {receive})

    def bucket(self, number: int, chunks: int) -> None:
        self.add("current", set(), {("bucket", number)})
        self.wait("ready", "E", self.known["current"])
        if number == 0:
            self.wait("last pass", "E", self.known["F"])
            self.add("F", set(), {"commit sent"})
            self.finish(self.post("commit", "N", "F", "commit sent", "commits"), "F")
            self.add("F", {"commits"}, {"result"})
        posted: dict[str, dict[int, Any]] = {"local": {}, "scatter": {}, "gather": {}, "fwd": {}}
        first = self.chunks
        for i in range(chunks + SLOTS - 1):
            if i < chunks:
                self.pack(number, first + i, posted)
            if 0 <= i - 1 < chunks and self.peers:
                self.encode(number, first + i - 1, posted)
            if 0 <= i - 2 < chunks:
                self.reduce(first + i - 2, posted)
            if 0 <= i - 3 < chunks:
                self.forward(first + i - 3, posted)
            if 0 <= i - 4 < chunks:
                self.decode(number, first + i - 4, posted)
        self.chunks += chunks

    def pack(self, bucket: int, c: int, posted: dict[str, dict[int, Any]]) -> None:
        s = c % SLOTS
        self.wait("slot", "E", self.free.get(s, 0))
        self.add("E", {("bucket", bucket), ("gradient", c)}, {("dense sent", s)})
        posted["local"][c] = self.post(
            "local scatter", "L", "E", ("dense sent", s), ("dense received", s)
        )

    def encode(self, bucket: int, c: int, posted: dict[str, dict[int, Any]]) -> None:
        s = c % SLOTS
        self.finish(posted["local"][c], "E")
        self.add("E", {*self.dense(s), ("gradient", c), ("bucket", bucket)}, {("sum", s)})
        self.add("E", {("sum", s)}, {("sent", s), *([("residual", c)] * self.residual)})
        posted["scatter"][c] = self.post("scatter", "P", "E", ("sent", s), ("received", s))

    def dense(self, s: int) -> set[Any]:
        return {("dense received", s)} if self.siblings else set()

    def reduce(self, c: int, posted: dict[str, dict[int, Any]]) -> None:
        s = c % SLOTS
        self.finish(posted["scatter" if self.peers else "local"][c], "F")
        own, forwarded = ("own message", s), ("gathered", s)
        self.add("F", {("received", s), *self.dense(s)}, {own, forwarded})
        if not self.residual:
            self.free[s] = self.known["F"]
        if self.peers:
            posted["gather"][c] = self.post("gather", "P", "F", own, forwarded)

    def forward(self, c: int, posted: dict[str, dict[int, Any]]) -> None:
        s = c % SLOTS
        if self.peers:
            self.finish(posted["gather"][c], "F")
        posted["fwd"][c] = self.post("forward", "L", "F", ("gathered", s), ("all gathered", s))

    def decode(self, bucket: int, c: int, posted: dict[str, dict[int, Any]]) -> None:
        s = c % SLOTS
        self.finish(posted["fwd"][c], "F")
        undone = {("sent", s), ("sum", s)} if self.residual else set()
        changed = {("residual", c)} if self.residual else set()
        self.add("F", {("all gathered", s), *undone}, {("gradient", c), *changed})
        if self.residual:
            self.free[s] = self.known["F"]

    def has_race(self) -> bool:
        pairs = itertools.combinations(enumerate(self.operations), 2)
        return any(
            not after >> number & 1 and (writes & (theirs | them) or reads & them)
            for (number, (_, reads, writes)), (_, (after, theirs, them)) in pairs
        )


def modelled(chunks: tuple[int, ...], **kind: Any) -> Step:
    step = Step(**kind)
    for number, count in enumerate(chunks):
        step.bucket(number, count)
    return step


@functools.cache
def waits(chunks: tuple[int, ...], **kind: bool) -> list[tuple[str, bool]]:
    """Of a step, in order: the name of each, and whether it is needed."""
    names = modelled(chunks, **kind).names
    needed = [modelled(chunks, **kind, omitted=i).has_race() for i in range(len(names))]
    return list(zip(names, needed, strict=True))


PLAIN: dict[str, Any] = {"codec": "exact", "rules": (), "error_feedback": "auto"}
KINDS = {
    "plain": PLAIN,
    "momentum": {**PLAIN, "options": {"momentum": 0.9}},  # every chunk has a worker residual
    "staged": {**PLAIN, "device": "staged"},
}
# Together they have every kind of rank and of wait: 2 + 1 has ranks without siblings or peers.
QUICK = {("2x2", "plain"), ("2+1", "staged"), ("2+1", "momentum")}


def weights_of(owners: int) -> tuple[Weight, ...]:
    """Two buckets. A tile of fp64 fills a message, and owners take turns, so that every chunk has a
    tile of each.
    """
    shapes = [(chunks * owners, 4096) for chunks in CHUNKS]
    return tuple(Weight(f"of_{shape[0]}", shape, torch.float64) for shape in shapes)


def case_one_at_a_time(scenario: Scenario, steps_before: int) -> dict[str, Any]:
    with one_at_a_time(PATIENCE):
        return case_omit_waits(scenario, steps_before)


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in itertools.product(("2x2", "2+1", "3x2"), KINDS)
    ],
)
def test_every_wait_is_needed(worlds: Worlds, nodes: str, kind: str) -> None:
    members = NODES[nodes]
    rails = min(map(len, members))
    leaders = {ranks[i] for ranks in members for i in range(rails)}
    scenario = dataclasses.replace(
        Scenario(
            weights_of(len(leaders)),
            sum(map(len, members)),
            nodes=members,
            device="streamed",
            ddp={"bucket_cap_mb": 0.01},
        ),
        **KINDS[kind],
    )
    arguments = {"scenario": scenario, "steps_before": 2}
    answers = worlds(scenario.world_size).run(case_one_at_a_time, **arguments, seconds=300)
    for rank, answer in enumerate(answers):
        place = {
            "staged": scenario.device == "staged",
            "siblings": any(len(ranks) > 1 for ranks in members if rank in ranks),
            "peers": rank in leaders,
            "residual": kind == "momentum" and rank in leaders,
        }
        assert sorted(answer["chunks"]) == [*CHUNKS]
        nothing_omitted, *races = answer["races"]
        assert nothing_omitted == []
        expected = waits(tuple(answer["chunks"]), **place)
        assert answer["counted"] == len(expected)
        # Collectives of one lane are in order. The chain alone puts a forward behind its gather,
        # and often behind the reduce that wrote its header.
        spare = {"last pass", "slot", *(f"behind {each}" for each in COLLECTIVES)}
        if not place["staged"]:
            spare |= {"gather", "forward enqueued"}
        # A rank without peers may have waited for an all-gather that was posted later; one without
        # siblings reads nothing of theirs.
        if not (place["peers"] and place["siblings"]):
            spare.add("local scatter")
        assert all(needed for name, needed in expected if name not in spare)
        assert [(name, bool(found)) for (name, _), found in zip(expected, races, strict=True)] == (
            expected
        )
