"""A rank that speaks the protocol by hand, and gets one thing wrong.

It agrees at attach like everybody else, then follows the reference's layout and headers. What it
sends as payload is zero tiles, which every codec accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from outcomes import Outcome, attempt
from reference import HEADER, Header, Layout, message_checksum, word_sum
from reference.message import (
    COMMIT,
    COMMIT_RECORD,
    GATHER,
    PARAMETERS,
    SCATTER,
    WIRE_VERSION,
    tiles_hash,
)
from scenario import ChosenGradients, Run, Scenario, Weight
from torch.nn.parallel import DistributedDataParallel
from world import World

# Every rank owns a full q4 tile.
WEIGHTS = (Weight("first", (200, 100)), Weight("bias", (50,)), Weight("second", (120, 60)))
WORLD_SIZE = 3
FORGER = 1
COMMIT_FIELDS = (
    *("magic", "wire_version", "phase", "status", "source_rank", "step", "bucket"),
    *("failed_chunk", "failed_phase", "failed_rank", "expected", "received", "checksum"),
)


def tiles_of_buckets(ddp: DistributedDataParallel, layout: Layout) -> list[list[int]]:
    """Numbers of the tiles of every bucket, in its order."""
    order = {id(p): i for i, p in enumerate(ddp.module.parameters())}
    return [
        [tile for p in bucket.parameters() for tile in layout.tiles_of[order[id(p)]]]
        for bucket in ddp.reducer._get_zeros_like_grad_buckets()
    ]


class Forger:
    """A step through the lanes, with `change` applied to what this rank sends in `phase` of the
    first bucket. A bucket has one chunk.
    """

    rank = FORGER

    def __init__(self, scenario: Scenario, phase: str, change: dict[str, int]) -> None:
        model = ChosenGradients(scenario)
        ddp = DistributedDataParallel(model)
        self.join(ddp, scenario, [[rank] for rank in range(WORLD_SIZE)])
        layout = Layout([w.describe() for w in scenario.weights], scenario.codec, WORLD_SIZE)
        self.tiles = tiles_of_buckets(ddp, layout)
        self.sizes = []  # of payloads, by bucket and owner
        for tiles in self.tiles:
            self.sizes.append(
                [
                    [layout.tiles[t].worker_bytes for t in tiles if layout.owners[t] == rank]
                    for rank in range(WORLD_SIZE)
                ]
            )
        self.phase, self.change = phase, change
        self.unfinished: list[Any] = []
        self.step = self.bucket = 0

    def join(
        self, ddp: DistributedDataParallel, scenario: Scenario, nodes: Sequence[Sequence[int]]
    ) -> None:
        """Agrees with the other ranks as attach does, and connects lanes in place of an engine."""
        from gradferry.core import engine
        from gradferry.ddp import binding

        self.ranks = engine.lanes_of_host(nodes, self.rank, checks=False)  # of every lane

        def start(running: Any, model: Any, nonce: str, *_: Any, native: bool) -> Any:
            # Ranks wait for each other here, so it is done where they do it.
            with mock.patch.object(engine._native, "HostEngine") as instead:
                running.start(model.group, nonce)
            given = instead.call_args.kwargs
            self.lanes, self.memory = given["lanes"], given["memory"]
            return mock.Mock(running=running)

        with (
            mock.patch.object(binding, "_build", side_effect=start) as started,
            mock.patch.object(binding, "register"),
        ):
            binding.bind(ddp, scenario.codec, scenario.options, native=False)
        running = started.call_args.args[0]
        self.layout_hash, self.config_hash = running.layout_hash, running.config_hash

    @property
    def number(self) -> int:
        """Of the bucket, and of its chunk, since the first step."""
        return self.step * len(self.sizes) + self.bucket

    def message(self, phase: int, name: str, sizes: list[int]) -> np.ndarray:
        change = self.change if self.phase == name and self.bucket == 0 else {}
        payloads = [np.zeros(size, np.uint8) for size in sizes]
        if "corrupt" in change:
            # A full tile of q4: its first exponent byte.
            next(p for p in payloads if len(p) == 2192)[2176] = change["corrupt"]
        of_tiles = 0 if phase == PARAMETERS else tiles_hash(self.tiles[self.bucket])
        header = Header(
            phase=phase,
            source_rank=self.rank,
            config_hash=self.config_hash,
            layout_hash=self.layout_hash ^ of_tiles,
            step=self.step,
            chunk=self.number,
            payload_bytes=sum(sizes),
            checksum=message_checksum(payloads),
        )
        for key, value in change.items():
            if key != "corrupt":
                setattr(header, key, value)
        return np.concatenate([np.frombuffer(header.pack(), np.uint8), *payloads])

    def run(self) -> None:
        """A step. After the commit of the bucket that is wrong honest ranks send no more, but wait
        for what they had been promised.
        """
        buckets = range(len(self.sizes))
        for self.bucket in buckets:
            self.scatter()
        for self.bucket in buckets:
            self.gather()
            self.commit()

    def scatter(self) -> None:
        sizes_by_owner = self.sizes[self.bucket]
        messages = [self.message(SCATTER, "scatter", sizes) for sizes in sizes_by_owner]
        self._all_to_all("scatter", messages)

    def parameters(self, num_parameters: int) -> None:
        """A check of parameters whose hashes are all 0."""
        self._all_gather("scatter", self.message(PARAMETERS, "parameters", [8 * num_parameters]))

    def gather(self) -> None:
        sizes_by_owner = self.sizes[self.bucket]
        message = self.message(GATHER, "gather", sizes_by_owner[FORGER])
        padded = np.zeros(HEADER.size + max(map(sum, sizes_by_owner)), np.uint8)
        padded[: len(message)] = message
        self._all_gather("gather", padded)

    def commit(self) -> None:
        fields: dict[str, int] = dict.fromkeys(COMMIT_FIELDS, 0)
        fields.update(
            magic=Header.magic, wire_version=WIRE_VERSION, phase=COMMIT, source_rank=self.rank
        )
        fields.update(step=self.step, bucket=self.number)
        wrong = self.bucket == 0
        change = self.change if self.phase == "commit" and wrong else {}
        if self.change.get("status") and wrong:
            change = {"status": self.change["status"], **change}
        fields.update(change)
        body = COMMIT_RECORD.pack(*fields.values())
        if "checksum" not in change:
            fields["checksum"] = word_sum(np.frombuffer(body[:56], np.uint8))
            body = COMMIT_RECORD.pack(*fields.values())
        self._all_gather("commit", np.frombuffer(bytearray(body), np.uint8))

    def _all_to_all(self, lane: str, messages: list[np.ndarray]) -> None:
        mine = len(messages[self.ranks[lane].index(self.rank)])
        receive = torch.zeros(mine * len(messages), dtype=torch.uint8)
        send = torch.from_numpy(np.concatenate(messages))
        lengths = [len(message) for message in messages]
        self.lanes[lane].all_to_all(receive, [mine] * len(messages), send, lengths).wait()

    def _all_gather(self, lane: str, message: np.ndarray) -> np.ndarray:
        """What came; this rank's place may be empty."""
        send = torch.from_numpy(message)
        receive = torch.zeros(len(send) * len(self.ranks[lane]), dtype=torch.uint8)
        work = self.lanes[lane].all_gather(receive, send)
        if self.bucket == 0:
            work.wait()
        else:
            self.unfinished.append((work, receive))
        return receive.numpy()


def case_forged(
    phase: str, change: dict[str, int], scaled: bool = False
) -> tuple[Outcome, Outcome] | None:
    """What an honest rank sees: the error of the step and of its state.

    scaled: with a GradScaler whose scale is 1024.
    """
    options = {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)} if scaled else {}
    scenario = Scenario(WEIGHTS, WORLD_SIZE, options=options)
    if dist.get_rank() == FORGER:
        Forger(scenario, phase, change).run()
        return None
    run = Run(scenario)
    outcomes = attempt(lambda: run.step(0)), attempt(run.state.state_dict)
    assert all(outcome.is_ours or outcome.error is None for outcome in outcomes)
    assert run.state.stats()["in_flight"] == 0
    return outcomes


def check(
    world: World, phase: str, change: dict[str, int], *, scaled: bool = False
) -> tuple[str | None, str]:
    """The one error that all honest ranks raise."""
    answers = world.run(case_forged, phase=phase, change=change, scaled=scaled)
    honest = [answer for answer in answers if answer is not None]
    assert len(honest) == WORLD_SIZE - 1
    errors = {(outcome.error, outcome.headline) for answer in honest for outcome in answer}
    assert len(errors) == 1, errors
    return errors.pop()
