"""What a step on a device with streams waits for, allocates and launches.

Every wait is needed, or another one covers it. Which ones those are says a model of the schedule in
docs/design/streams.md, with what every operation reads and writes. It shares nothing with the fake
device, which must find what the model says. After warm-up nothing is allocated and the host never
waits; a chunk is three launches, or five between nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mixed import NODES, scenario_on
from scenario import Run, Scenario, Weight
from streaming import PATIENCE, SCENARIO, one_at_a_time, small_chunks
from watching import expect_no_race
from world import World

Worlds = Callable[[int], World]


class Watch:
    """What the calls of a hook add to the fake device's counters. DDP keeps the hook for as long as
    it lives, so the hook must not keep DDP: this knows nothing of the run.
    """

    def __init__(self) -> None:
        from fake_device import machine

        self.fake = machine
        self.omitted: int | None = None  # which wait of the next step's calls
        self.calls: list[dict[str, int]] = []  # of the last step: what each added

    def over(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(state, bucket):  # DDP looks at annotations
            if self.omitted is not None:
                self.fake.omit_wait(self.omitted - sum(call["waits"] for call in self.calls))
            before = {**self.fake.counters(), "chunks": state.stats()["chunks"]}
            future = hook(state, bucket)
            # A thread makes a staged exchange. Asking for its end orders nothing on the device.
            while not future.done():
                time.sleep(1e-4)
            after = {**self.fake.counters(), "chunks": state.stats()["chunks"]}
            self.calls.append({key: after[key] - before[key] for key in after})
            self.fake.omit_wait(-1)
            return future

        return watched


class WatchedRun(Run):
    """A run that looks at the fake device's counters before and after every call of the hook."""

    def __init__(self, scenario: Scenario) -> None:
        import gradferry

        self.watch = Watch()
        self.fake = self.watch.fake
        with mock.patch.object(gradferry, "hook", self.watch.over(gradferry.hook)):
            super().__init__(dataclasses.replace(scenario, native=False))

    @property
    def calls(self) -> list[dict[str, int]]:
        return self.watch.calls

    def step(self, step: int) -> Any:
        self.watch.calls = []
        return super().step(step)


# --- the model ------------------------------------------------------------------------------------


class Step:
    """What the engine of a rank enqueues in a step, and what comes after what. Flat, or between
    nodes, whose collectives are one chain; there a rank alone on its node sends itself a header,
    which it does not read.
    """

    def __init__(
        self,
        *,
        flat: bool,
        staged: bool,
        siblings: bool,
        peers: bool,
        residual: bool,
        checks: bool,
        omitted: int = -1,
    ) -> None:
        self.flat, self.staged, self.siblings, self.peers = flat, staged, siblings, peers
        self.residual, self.checks, self.omitted = residual, checks, omitted
        stages = (self.send, self.reduce, self.decode)
        self.stages = stages if flat else (self.pack, self.send, self.reduce, self.forward,
                                           self.decode)  # fmt: skip
        self.names: list[str] = []  # of waits
        streams = ("host", "current", "E", "F", "C", "L", "P", "N")
        self.known = dict.fromkeys(streams, 0)  # bit masks
        self.operations: list[tuple[int, set[Any], set[Any]]] = []
        self.free: dict[int, int] = {}  # by slot: what F had done when it was freed
        self.posted: dict[tuple[str, int], Any] = {}
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
        lane = "N" if self.flat else lane
        if self.staged:
            self.add(stream, {send}, {("host", send)})
            self.wait(f"{name} copied", "host", self.known[stream])
            self.add(lane, {("host", send)}, {("host", receive)})
        elif self.flat:
            self.known[lane] |= self.known[stream]
            self.add(lane, {send}, {receive})
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

    def all_say(self, what: str) -> None:
        self.add("F", set(), {f"{what} sent"})
        self.finish(self.post(what, "N", "F", f"{what} sent", f"{what} received"), "F")
        self.add("F", {f"{what} received"}, {"result"})

    def bucket(self, number: int, chunks: int) -> None:
        self.add("current", set(), {("bucket", number)})
        self.wait("ready", "E", self.known["current"])
        if number == 0:
            self.wait("last pass", "E", self.known["F"])
            self.all_say("commit")
            if self.checks:
                self.all_say("hashes")
        for i in range(chunks + len(self.stages) - 1):
            for behind, stage in enumerate(self.stages):
                if 0 <= i - behind < chunks:
                    stage(number, self.chunks + i - behind)
        self.chunks += chunks

    def take_slot(self, c: int) -> int:
        s = c % len(self.stages)
        self.wait("slot", "E", self.free.get(s, 0))
        return s

    def pack(self, bucket: int, c: int) -> None:
        s = self.take_slot(c)
        self.add("E", {("bucket", bucket), ("gradient", c)}, {("dense sent", s)})
        self.posted["local", c] = self.post(
            "local scatter", "L", "E", ("dense sent", s), ("dense received", s)
        )

    def send(self, bucket: int, c: int) -> None:
        """To peers; between nodes the sum of a node."""
        if not self.peers:
            return
        if self.flat:
            s = self.take_slot(c)
            source = {("gradient", c), ("bucket", bucket)}
        else:
            s = c % len(self.stages)
            self.finish(self.posted["local", c], "E")
            self.add("E", {*self.dense(s), ("gradient", c), ("bucket", bucket)}, {("sum", s)})
            source = {("sum", s)}
        self.add("E", source, {("sent", s), *([("residual", c)] * self.residual)})
        self.posted["scatter", c] = self.post("scatter", "P", "E", ("sent", s), ("received", s))

    def dense(self, s: int) -> set[Any]:
        return {("dense received", s)} if self.siblings else set()

    def reduce(self, _: int, c: int) -> None:
        s = c % len(self.stages)
        self.finish(self.posted["scatter" if self.peers else "local", c], "F")
        own, forwarded = ("own message", s), ("gathered", s)
        self.add("F", {("received", s), *self.dense(s)}, {own, forwarded})
        if not self.residual:
            self.free[s] = self.known["F"]
        if self.peers:
            self.posted["gather", c] = self.post("gather", "P", "F", own, forwarded)

    def forward(self, _: int, c: int) -> None:
        s = c % len(self.stages)
        if self.peers:
            self.finish(self.posted["gather", c], "F")
        self.posted["forward", c] = self.post(
            "forward", "L", "F", ("gathered", s), ("all gathered", s)
        )

    def decode(self, _: int, c: int) -> None:
        s = c % len(self.stages)
        self.finish(self.posted["gather" if self.flat else "forward", c], "F")
        undone = {("sent", s), ("sum", s)} if self.residual else set()
        changed = {("residual", c)} if self.residual else set()
        came = ("gathered" if self.flat else "all gathered", s)
        self.add("F", {came, *undone}, {("gradient", c), *changed})
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


# --- waits ----------------------------------------------------------------------------------------


def races_of(run: WatchedRun, step: int) -> list[str]:
    run.step(step)
    run.fake.synchronize()  # what nobody has waited for has run as well
    return run.fake.races()


def case_omit_waits(scenario: Scenario, steps_before: int) -> dict[str, Any]:
    """After `steps_before`, a step with all waits, and then one without each of them in turn: what
    a wait that is omitted would have ordered is reported, and happens in order all the same.
    Collectives proceed one at a time between nodes, where any two must be ordered.
    """
    from gradferry.ddp import model

    def accept(*_arguments: Any) -> None:
        """Keeps no DDP, as a Mock would."""

    # With every parameter used find_unused_parameters is right without bucket views, too.
    accepting = mock.patch.object(model, "_check_options", new=accept)
    ordered = one_at_a_time(PATIENCE) if scenario.nodes else contextlib.nullcontext()
    with ordered, small_chunks(), accepting:
        run = WatchedRun(scenario)
        for step in range(steps_before):
            run.step(step)
        races = [races_of(run, steps_before)]
        calls = run.calls
        counted = sum(call["waits"] for call in calls)
        # Ranks without peers wait less often, and step with the others.
        most = torch.tensor(counted)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        for number in range(int(most)):
            run.watch.omitted = number
            races.append(races_of(run, steps_before + 1 + number))
            assert [call["waits"] for call in run.calls] == [call["waits"] for call in calls]
    assert not any(races[1 + counted :])  # nothing was omitted there
    chunks = tuple(call["chunks"] for call in calls)
    return {"counted": counted, "chunks": chunks, "races": races[: 1 + counted]}


# Two buckets, of two or three chunks each: more than slots, so that some are used again.
LEAST = dataclasses.replace(
    SCENARIO,
    weights=(Weight("first", (18, 4096)), Weight("bias", (77,)), Weight("second", (11, 4096))),
    codec="bf16",
    rules=(),
    ddp={"bucket_cap_mb": 0.05},
)
# Until buckets are what they will be. In momentum mode decode looks at what was sent, so that slots
# are free later.
PLAIN: dict[str, Any] = {"ddp": {"find_unused_parameters": True, **LEAST.ddp}}
CHECKED = {"check_every": 1}
MOMENTUM: dict[str, Any] = {"options": {"momentum": 0.9, **CHECKED}, "error_feedback": "auto"}
STAGED = {**PLAIN, "device": "staged"}
# Between nodes: a bucket of fewer chunks than slots, and one whose last chunk gets the slot of its
# first. A tile of fp64 fills a message, and owners take turns, so that every chunk has one of each.
CHUNKS = (1, 6)
EXACT: dict[str, Any] = {"codec": "exact", "error_feedback": "auto"}
KINDS = {
    "plain": EXACT,
    "momentum": {**EXACT, "options": {"momentum": 0.9}},  # every chunk has a worker residual
    "staged": {**EXACT, "device": "staged"},
}
# Together they have every kind of rank and of wait: 2 + 1 has ranks without siblings or peers.
QUICK = {("2x2", "plain"), ("2+1", "staged"), ("2+1", "momentum")}


def leaders_of(nodes: str) -> set[int]:
    rails = min(map(len, NODES[nodes]))
    return {rank for ranks in NODES[nodes] for rank in ranks[:rails]}


def between(nodes: str, kind: str) -> Any:
    owners = len(leaders_of(nodes))
    weights = [Weight(f"of_{n}", (n * owners, 4096), torch.float64) for n in CHUNKS]
    plain = Scenario(tuple(weights), device="streamed", ddp={"bucket_cap_mb": 0.01})
    marks = () if (nodes, kind) in QUICK else pytest.mark.slow
    scenario = scenario_on(nodes, plain, **KINDS[kind])
    return pytest.param(scenario, nodes, 2, id=f"{nodes}, {kind}", marks=marks)


def flat(name: str, steps_before: int, changes: dict[str, Any], marks: Any = ()) -> Any:
    return pytest.param(
        dataclasses.replace(LEAST, **changes), None, steps_before, id=name, marks=marks
    )


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("scenario", "nodes", "steps_before"),
    [
        flat("plain", 1, PLAIN),
        flat("momentum and check_every", 2, MOMENTUM),
        flat("staged, no residuals", 1, {**STAGED, "error_feedback": "none"}),
        flat("staged, momentum and check_every", 2, {**STAGED, **MOMENTUM}),
        flat("staged", 1, STAGED, pytest.mark.slow),
        flat("check_every", 1, {**PLAIN, "options": CHECKED}, pytest.mark.slow),
        *(between(*case) for case in itertools.product(("2x2", "2+1", "3x2"), KINDS)),
    ],
)
def test_every_wait_is_needed(
    device_worlds: Worlds, scenario: Scenario, nodes: str | None, steps_before: int
) -> None:
    arguments = {"scenario": scenario, "steps_before": steps_before}
    answers = device_worlds(scenario.world_size).run(case_omit_waits, **arguments, seconds=300)
    for rank, answer in enumerate(answers):
        peers = rank in leaders_of(nodes) if nodes else True
        residual = scenario.error_feedback == "both" or "momentum" in scenario.options
        place = {
            "flat": nodes is None,
            "staged": scenario.device == "staged",
            "siblings": any(len(m) > 1 for m in scenario.nodes or () if rank in m),
            "peers": peers,
            "residual": residual and peers,
            "checks": "check_every" in scenario.options,
        }
        if nodes:
            assert sorted(answer["chunks"]) == [*CHUNKS]
        else:
            assert len(answer["chunks"]) >= 2
            assert sum(answer["chunks"]) > 4
        nothing_omitted, *races = answer["races"]
        assert nothing_omitted == []
        expected = waits(answer["chunks"], **place)
        assert answer["counted"] == len(expected)
        spare = {"last pass", "slot"}
        if nodes:
            # Collectives of one lane are in order. The chain alone puts a forward behind its
            # gather, and often behind the reduce that wrote its header.
            names = ("commit", "local scatter", "scatter", "gather", "forward")
            spare |= {f"behind {each}" for each in names}
            if not place["staged"]:
                spare |= {"gather", "forward enqueued"}
            # A rank without peers may have waited for an all-gather that was posted later; one
            # without siblings reads nothing of theirs.
            if not (peers and place["siblings"]):
                spare.add("local scatter")
        assert all(needed for name, needed in expected if name not in spare)
        assert [(name, bool(found)) for (name, _), found in zip(expected, races, strict=True)] == (
            expected
        )


# --- allocations and launches ---------------------------------------------------------------------


def case_count(scenario: Scenario, steps: int) -> tuple[int, list[dict[str, int]]]:
    """Launches of the steps after two, and what every call of the hook adds in these. The host
    reads the gradients of each step, so that everything launched has run.
    """
    calls = []
    with small_chunks():
        run = WatchedRun(scenario)
        for step in range(2 + steps):
            if step == 2:
                before = run.fake.counters()["launches"]
            run.step(step)
            calls += run.calls if step >= 2 else []
    expect_no_race()
    assert run.state.stats()["host_waits"] == 0
    return run.fake.counters()["launches"] - before, calls


@pytest.mark.torch_core
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(dataclasses.replace(SCENARIO, codec="q4"), id="four codecs"),
        pytest.param(scenario_on("2+1", SCENARIO, codec="q4", rules=()), id="nodes"),
        pytest.param(
            dataclasses.replace(
                SCENARIO, codec="sign1", error_feedback="auto", options={"momentum": 0.9}
            ),
            id="momentum",
        ),
    ],
)
def test_a_step_allocates_nothing_never_waits_and_takes_three_launches_per_chunk(
    device_worlds: Worlds, scenario: Scenario
) -> None:
    steps = 2
    answers = device_worlds(scenario.world_size).run(case_count, scenario=scenario, steps=steps)
    for rank, (launches, calls) in enumerate(answers):
        assert len(calls) >= 2 * steps
        for call in calls:
            assert call["chunks"] > 0
            assert (call["allocations"], call["host_waits"]) == (0, 0)
        num_chunks = sum(call["chunks"] for call in calls)
        assert num_chunks > 3
        # Between nodes it takes five. Rank 1 has no peers, beside a node of one: it sums nothing.
        each = 5 if scenario.nodes and rank != 1 else 3
        assert launches == each * num_chunks + steps * 2  # the gain, and the last commit
