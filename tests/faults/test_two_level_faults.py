"""Ranks that share nodes, one of which sends a wrong message, dies or stops at any stage of the
exchange. It speaks the protocol by hand; what it sends as payload is zero tiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from outcomes import attempt
from reference import HEADER, Layout
from reference.message import FORWARD, GATHER, LOCAL_SCATTER, SCATTER
from scenario import ChosenGradients, Run, Scenario, Weight
from test_protocol import Forger, tiles_of_buckets
from torch.nn.parallel import DistributedDataParallel
from world import World, WorldError

Worlds = Callable[[int], World]
Members = tuple[tuple[int, ...], ...]

WEIGHTS = (Weight("first", (200, 100)), Weight("bias", (50,)), Weight("second", (120, 60)))
# The timeout of the process group. A death closes connections, and does not take it.
SECONDS = {signal.SIGKILL: 600, signal.SIGSTOP: 4}
NODES = {"2x2": ((0, 1), (2, 3)), "2+1": ((0, 1), (2,))}


class Share:
    """Bytes of the messages of a chunk with a whole model, by docs/reference/wire_format.md."""

    def __init__(self, layout: Layout, nodes: Members) -> None:
        self.nodes = nodes
        self.num_columns = min(map(len, nodes))
        load = {rank: 0 for members in nodes for rank in members[: self.num_columns]}
        self.owned: dict[int, list] = {rank: [] for rank in load}
        for tile in layout.tiles:
            owner = min(sorted(load), key=lambda rank: load[rank])
            load[owner] += tile.worker_bytes + tile.owner_bytes
            self.owned[owner].append(tile)

    def peers(self, column: int) -> list[int]:
        return [members[column] for members in self.nodes]

    def worker_bytes(self, owner: int) -> int:
        return sum(tile.worker_bytes for tile in self.owned[owner])

    def owner_bytes(self, owner: int) -> int:
        return sum(tile.owner_bytes for tile in self.owned[owner])

    def gather_bytes(self, column: int) -> int:
        return HEADER.size + max(map(self.owner_bytes, self.peers(column)))

    def forward_bytes(self) -> int:
        """Without its own header."""
        return len(self.nodes) * max(map(self.gather_bytes, range(self.num_columns)))

    def dense_bytes(self, local_index: int) -> int:
        if local_index >= self.num_columns:
            return 0
        tiles = [tile for peer in self.peers(local_index) for tile in self.owned[peer]]
        return sum((tile.num_elements + 15) // 16 * 16 * 4 for tile in tiles)


class NodeForger(Forger):
    """A rank's part of a step that has one bucket and one chunk. `change` is applied to what it
    sends in `phase`; before it would post `end`, it sends itself a signal.
    """

    def __init__(
        self,
        scenario: Scenario,
        phase: str = "",
        change: dict[str, int] | None = None,
        end: tuple[str, signal.Signals] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        from gradferry.core.nodes import Nodes
        from gradferry.reduction import start

        assert scenario.nodes is not None
        self.rank = dist.get_rank()
        self.nodes = scenario.nodes
        self.siblings = next(members for members in self.nodes if self.rank in members)
        self.local_index = self.siblings.index(self.rank)
        with mock.patch.object(start, "resolve", return_value=Nodes(self.nodes)):
            options = {**scenario.options, "nodes": 1}
            ddp = DistributedDataParallel(ChosenGradients(scenario), process_group=group)
            self.join(ddp, dataclasses.replace(scenario, options=options), self.nodes)
        parameters = [weight.describe() for weight in scenario.weights]
        layout = Layout(parameters, scenario.codec, scenario.world_size)
        self.share = Share(layout, self.nodes)
        self.tiles = tiles_of_buckets(ddp, layout)
        self.phase, self.change, self.end = phase, change or {}, end
        self.sizes = [[]]  # one bucket
        self.step = self.bucket = self.wrong = 0

    def run(self) -> None:
        stages: dict[str, Callable[[], None]] = {"local scatter": self.local_scatter}
        if self.local_index < self.share.num_columns:
            stages |= {"scatter": self.scatter, "gather": self.gather}
        stages |= {"forward": self.forward, "commit": self.commit}
        self.gathered = np.zeros(0, np.uint8)
        for stage, post in stages.items():
            if self.end is not None and self.end[0] == stage:
                os.kill(os.getpid(), self.end[1])
            post()

    def local_scatter(self) -> None:
        dense = [self.share.dense_bytes(i) for i in range(len(self.siblings))]
        messages = [self.message(LOCAL_SCATTER, "local scatter", [size]) for size in dense]
        if self.memory is not None:  # which is zero, as the gradients are
            messages = [message[: HEADER.size] for message in messages]
        self._all_to_all("local_scatter", messages)

    def scatter(self) -> None:
        sizes = [self.share.worker_bytes(peer) for peer in self.ranks["scatter"]]
        self._all_to_all("scatter", [self.message(SCATTER, "scatter", [n]) for n in sizes])

    def gather(self) -> None:
        message = self.message(GATHER, "gather", [self.share.owner_bytes(self.rank)])
        padded = np.zeros(self.share.gather_bytes(self.local_index), np.uint8)
        padded[: len(message)] = message
        arrived = self._all_gather("gather", padded)
        arrived.reshape(len(self.nodes), -1)[self.ranks["gather"].index(self.rank)] = padded
        self.gathered = arrived

    def forward(self) -> None:
        message = self.message(FORWARD, "forward", [self.share.forward_bytes()])
        message[HEADER.size :][: len(self.gathered)] = self.gathered
        if self.phase == "forwarded":
            message[HEADER.size + self.change["place"]] = self.change["byte"]
        if self.memory is not None:
            place = self.local_index * len(message) + HEADER.size  # of the first chunk
            payload = message[HEADER.size :][: len(self.gathered)]
            self.memory.part(place, len(payload)).copy_(torch.from_numpy(payload))
            message = message[: HEADER.size].copy()
        self._all_gather("forward", message)


def scenario_on(nodes: str) -> Scenario:
    members = NODES[nodes]
    return Scenario(WEIGHTS, world_size=sum(map(len, members)), nodes=members)


@contextlib.contextmanager
def siblings_meet_in(way: str) -> Iterator[None]:
    """Memory, unless this rank is refused it: then all ranks of its node use sockets."""
    from gradferry.core import node_memory

    refused = node_memory._RefusedError("by the test")
    with contextlib.ExitStack() as patches:
        for name in ("_make", "_open_door") if way == "sockets" else ():
            patches.enter_context(mock.patch.object(node_memory, name, side_effect=refused))
        yield


def case_forged(
    nodes: str, forger: int, phase: str, change: dict[str, int], way: str
) -> list[tuple[str | None, str]]:
    """Errors of the step, and of the state after it."""
    scenario = scenario_on(nodes)
    if dist.get_rank() == forger:
        with siblings_meet_in(way):
            NodeForger(scenario, phase, change).run()
        dist.barrier()  # what it has sent is not lost
        return []
    run = Run(scenario)
    outcomes = [attempt(lambda: run.step(0)), attempt(run.state.state_dict)]
    dist.barrier()
    return [(outcome.error, outcome.headline) for outcome in outcomes]


def the_one_error(answers: list[list[tuple[str | None, str]]]) -> tuple[str | None, str]:
    """Of all honest ranks."""
    errors = {error for answer in answers for error in answer}
    assert len(errors) == 1, errors
    return errors.pop()


@pytest.mark.parametrize("way", ["memory", "sockets"])
@pytest.mark.parametrize(("nodes", "forger"), [("2x2", 1), ("2x2", 2), ("2+1", 0), ("2+1", 1)])
def test_two_level_forger_that_does_nothing_wrong_is_believed(
    worlds: Worlds, nodes: str, forger: int, way: str
) -> None:
    world = worlds(sum(map(len, NODES[nodes])))
    answers = world.run(case_forged, nodes=nodes, forger=forger, phase="", change={}, way=way)
    assert the_one_error(answers) == (None, "")


FIELDS = {
    "magic": (7, "magic is 7, expected 1498564167"),
    "phase": (3, "phase is 3, expected"),
    "source_rank": (2, "source rank is 2, expected 1"),
    "config_hash": (11, "configuration hash is 11, expected"),
    "chunk": (3, "chunk is 3, expected 0"),
    "payload_bytes": (16, "payload bytes is 16, expected"),
    "checksum": (99, "checksum is 0, expected 99"),
}


@pytest.mark.parametrize("phase", ["local scatter", "forward"])
@pytest.mark.parametrize(
    ("nodes", "field", "way"),
    [
        *(("2x2", field, "memory") for field in FIELDS),
        ("2+1", "chunk", "memory"),
        ("2x2", "payload_bytes", "sockets"),
        ("2+1", "chunk", "sockets"),
    ],
)
def test_two_level_message_with_a_wrong_field_from_a_sibling_is_refused_by_all_ranks(
    worlds: Worlds, nodes: str, field: str, way: str, phase: str
) -> None:
    value, named = FIELDS[field]
    world = worlds(sum(map(len, NODES[nodes])))
    change = {field: value}
    answers = world.run(case_forged, nodes=nodes, forger=1, phase=phase, change=change, way=way)
    kind, text = the_one_error(answers)
    assert kind == "ProtocolError"
    assert f"rank 0 refused a message from rank 1 (step 0, chunk 0, {phase}): {named}" in text


@pytest.mark.parametrize("way", ["memory", "sockets"])
def test_two_level_message_damaged_by_the_sibling_that_forwards_it_is_refused(
    worlds: Worlds, way: str
) -> None:
    change = {"place": HEADER.size + 100, "byte": 1}  # in the payload of rank 1 itself
    answers = worlds(4).run(
        case_forged, nodes="2x2", forger=1, phase="forwarded", change=change, way=way
    )
    kind, text = the_one_error(answers)
    assert kind == "ProtocolError"
    assert "rank 0 refused a message from rank 1 (step 0, chunk 0, gather): checksum is" in text


def case_ended(nodes: str, forger: int, stage: str, end: signal.Signals, folder: str) -> None:
    scenario = scenario_on(nodes)
    group = dist.new_group(timeout=datetime.timedelta(seconds=SECONDS[end]))
    if dist.get_rank() == forger:
        Path(folder, "pid").write_text(str(os.getpid()))
        NodeForger(scenario, end=(stage, end), group=group).run()
        return
    run = Run(scenario, group)
    before = num_descriptors()
    outcome = attempt(lambda: run.step(0))
    after = attempt(run.state.state_dict)
    assert num_descriptors() <= before
    seen = (outcome.error, outcome.headline, after.headline)
    Path(folder, str(run.rank)).write_text(json.dumps(seen))
    if end == signal.SIGSTOP and len(list(Path(folder).iterdir())) == scenario.world_size:
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGKILL)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


ROLES = {"lowest": ("2x2", 0), "leader": ("2x2", 3), "extra": ("2+1", 1)}
STAGES = ("local scatter", "scatter", "gather", "forward", "commit")
QUICK = {("lowest", "forward"), ("extra", "local scatter")}
ENDS = [
    pytest.param(role, stage, marks=() if (role, stage) in QUICK else pytest.mark.slow)
    for role in ROLES
    for stage in STAGES
    if role != "extra" or stage not in ("scatter", "gather")
]


@pytest.mark.parametrize(("role", "stage"), ENDS)
def test_two_level_rank_that_is_killed_is_named_at_once(
    worlds: Worlds, tmp_path: Path, role: str, stage: str
) -> None:
    check_end(worlds, tmp_path, role, stage, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("role", "stage"), ENDS)
def test_two_level_rank_that_is_stopped_is_named_after_the_timeout(
    worlds: Worlds, tmp_path: Path, role: str, stage: str
) -> None:
    check_end(worlds, tmp_path, role, stage, signal.SIGSTOP)


def check_end(worlds: Worlds, folder: Path, role: str, stage: str, end: signal.Signals) -> None:
    nodes, forger = ROLES[role]
    size = sum(map(len, NODES[nodes]))
    with pytest.raises(WorldError) as caught:
        worlds(size).run(
            case_ended,
            nodes=nodes,
            forger=forger,
            stage=stage,
            end=end,
            folder=str(folder),
        )
    failed = re.findall(r"^rank (\d): ", str(caught.value), re.MULTILINE)
    assert failed == [str(forger)], caught.value
    # Rank 0 serves the store, without which nobody can say who is missing: a rank may first see
    # another one's end, which is a consequence.
    missing = f"rank {forger}" if forger else r"(rank \d|another rank)"
    headlines = []
    for rank in set(range(size)) - {forger}:
        error, headline, after = json.loads((folder / str(rank)).read_text())
        assert error == "PeerError"
        assert re.match(rf"rank \d lost contact with {missing} \(step 0, ", headline), headline
        assert after == headline
        headlines.append(headline)
    assert any(
        f"lost contact with {name} " in "".join(headlines)
        for name in (f"rank {forger}", "another rank")
    )
