"""FSDP2's gathers of parameters on a device with streams: the fake device under FSDP2.

All ranks compute with what messages say, the machine finds nothing unordered, and the host waits
for nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gathering import Watch, differing, gathered_bytes
from gradferry.fsdp.gathers import GatherHook
from outcomes import attempt
from sharding import SHAPES, Model, Sharding
from watching import WatchedCalls, in_two_orders
from world import World

Worlds = Callable[[int], World]


class Gathering:
    """A model whose parameters are gathered."""

    def __init__(self, device: str, codec: str, **options: Any) -> None:
        from fake_device import machine

        self.machine = machine
        self.sharding = Sharding(replicas=1, shards=2, device=device)
        self.model = self.sharding.model(self.sharding.mesh()["shard"])
        self.codec = codec
        options = {"reduce_scatter": "off", "all_gather": codec, **options}
        self.state = gradferry.fsdp.attach(self.model, **options)
        self.watch = Watch(self.model)
        torch.manual_seed(5)
        self.wholes = dict(Model().named_parameters())  # as they were before they were sharded

    def step(self) -> list[str]:
        """What the machine finds."""
        targets = {
            module: {
                name: torch.ones(shape, device=self.sharding.place).requires_grad_()
                for name, shape in shapes.items()
            }
            for module, shapes in SHAPES.items()
        }
        self.model(targets).backward()
        self.used = {
            f"{module}.{name}".lstrip("."): target.grad.cpu().numpy()
            for module, each in targets.items()
            for name, target in each.items()
        }
        self.model.zero_grad()
        self.machine.synchronize()
        return self.machine.races()

    def wrong(self) -> list[str]:
        """Parameters with which a pass has not computed as messages say."""
        return [
            name
            for found in (self.watch.seen, self.used)
            for name in differing(found, self.wholes, self.codec, torch.float32, {})
        ]


class WatchedGathers(Gathering, WatchedCalls):
    """The same on the fake device, where what gathers do is counted."""

    def __init__(self, codec: str, **options: Any) -> None:
        Gathering.__init__(self, "streamed", codec, **options)
        WatchedCalls.__init__(self)

    def watched_step(self, omitted: int = -1) -> list[str]:
        """What the machine finds. `omitted`: a wait of the hook's calls."""
        with self.counted(GatherHook, omitted):
            return self.step()


def case_gathered(device: str, codec: str, **options: Any) -> list[dict[str, Any]]:
    def gathered() -> dict[str, Any]:
        run = Gathering(device, codec, **options)
        found, wrong = [], []
        for _ in range(3):
            found += run.step()
            wrong += run.wrong()
        return {"found": found, "wrong": wrong, "stats": run.state.stats()}

    return in_two_orders(gathered)


FORWARD, BACKWARD = list(SHAPES), list(SHAPES)[1:]  # the root stays gathered


def sent_bytes(modules: list[str], codec: str, steps: int) -> int:
    """Without commits, of which a device sends one for a pass, in the next one."""
    return steps * (gathered_bytes(SHAPES, modules, codec, 2) - len(modules) * 64)


@pytest.mark.torch_core
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
@pytest.mark.parametrize(
    ("device", "codec"),
    [("streamed", "exact"), ("streamed", "q8"), ("streamed", "q4"), ("staged", "q8")],
)
def test_ranks_compute_with_what_messages_say(
    device_worlds: Worlds, device: str, codec: str, keep: bool
) -> None:
    options = {"device": device, "codec": codec, "keep_gathered": keep}
    for answers in device_worlds(2).run(case_gathered, **options):
        for answer in answers:
            assert answer["found"] == []
            assert answer["wrong"] == []
            stats = answer["stats"]
            assert stats["buckets"] == 3 * (len(FORWARD) + (0 if keep else len(BACKWARD)))
            if device == "staged":
                continue
            sent = sent_bytes(FORWARD, codec, 3) + (0 if keep else sent_bytes(BACKWARD, codec, 3))
            assert stats["wire_bytes"] == sent + (2 if keep else 5) * 64


@pytest.mark.torch_core
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_modules_of_several_chunks(device_worlds: Worlds, keep: bool) -> None:
    options = {"device": "streamed", "codec": "q8", "workspace_cap_mb": 0.15, "keep_gathered": keep}
    for answers in device_worlds(2).run(case_gathered, **options):
        for answer in answers:
            assert answer["found"] == []
            assert answer["wrong"] == []
            assert answer["stats"]["chunks"] > answer["stats"]["buckets"]


def case_counted(keep: bool) -> dict[str, Any]:
    run = WatchedGathers("q4", keep_gathered=keep)
    found = [run.watched_step() for _ in range(3)]
    return {"found": found, "calls": run.calls, "host_waits": run.state.stats()["host_waits"]}


@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_a_gather_neither_waits_on_the_host_nor_allocates(
    device_worlds: Worlds, keep: bool
) -> None:
    for answer in device_worlds(2).run(case_counted, keep=keep):
        assert answer["found"] == [[]] * 3
        assert answer["host_waits"] == 0
        calls = answer["calls"]
        assert len(calls) == len(FORWARD) + len(BACKWARD)
        assert [(call["host_waits"], call["allocations"]) for call in calls] == [(0, 0)] * 5
        if keep:  # F waits for the memory to fill, and FSDP2's stream for F
            assert [call["waits"] for call in calls[len(FORWARD) :]] == [2] * len(BACKWARD)


def case_damaged_gather(keep: bool) -> dict[str, Any]:
    """What rank 1 gets of the root's parameters is damaged, in the second step."""
    import fake_device

    run: Gathering | None = Gathering("streamed", "q4", keep_gathered=keep)
    run.step()
    if dist.get_rank() == 1:
        # Where forward passes alone gather, the root begins a pass, and the commit comes first.
        fake_device.backends["streamed"].damage(1 if keep else 0, 64 + 5, 0xEE)
    outcomes = [attempt(run.step)]
    num_nan = {name: int(np.isnan(values).sum()) for name, values in run.watch.seen.items()}
    outcomes += [attempt(run.step) for _ in range(3)]
    machine, run = run.machine, None
    # FSDP2 frees at once what it still copies to in a pass that an error has ended.
    gc.collect()
    machine.synchronize()
    machine.races()
    return {"num_nan": num_nan, "outcomes": outcomes}


@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_a_damaged_gather_is_nan_at_once_and_an_error_later(
    device_worlds: Worlds, keep: bool
) -> None:
    answers = device_worlds(2).run(case_damaged_gather, keep=keep)
    for rank, answer in enumerate(answers):
        assert {name for name, count in answer["num_nan"].items() if count} == (
            {"table", "scale"} if rank == 1 else set()
        )
        # Two passes of the engine after that of the fault: with kept messages each is a step; else
        # the root's gather is part of the backward pass before it, which does not gather it.
        steps = 2 if keep else 0
        error = answer["outcomes"][steps]
        assert [outcome.error for outcome in answer["outcomes"][:steps]] == [None] * steps
        assert error.error == "ProtocolError"
        chunk = 3 if keep else 5
        assert f"rank 1 refused a message from rank 0 (step 1, chunk {chunk}, gather)" in error.text
        later = answer["outcomes"][steps + 1 :]
        assert {outcome.headline for outcome in later} == {error.headline}
    assert len({answer["outcomes"][-1].headline for answer in answers}) == 1


GATHER_WAITS = {
    False: ("ready", "slot", "gather", "end"),
    True: ("ready", "end"),
}


def case_omit_gather_waits(keep: bool) -> dict[str, Any]:
    """Steps whose last gather omits each of its waits in turn."""
    run = WatchedGathers("q4", keep_gathered=keep)
    found = [run.watched_step() for _ in range(2)]
    waits = [call["waits"] for call in run.calls]
    omitted = range(sum(waits[:-1]), sum(waits))
    return {
        "found": found,
        "waits": waits[-1],
        "omitted": [bool(run.watched_step(omitted=number)) for number in omitted],
    }


@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_every_wait_of_a_gather_is_needed(device_worlds: Worlds, keep: bool) -> None:
    for answer in device_worlds(2).run(case_omit_gather_waits, keep=keep):
        assert answer["found"] == [[], []]
        assert answer["waits"] == len(GATHER_WAITS[keep])
        # The stream that FSDP2 gathers on waits for the gather before, and E for that stream.
        assert answer["omitted"] == [name != "slot" for name in GATHER_WAITS[keep]]
