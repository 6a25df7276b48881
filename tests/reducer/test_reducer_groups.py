"""Process groups that torch.distributed does not know, with and without a default group."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from own_groups import own_group
from training_alone import Plain, are_equal, bits_of, make, move, movements
from world import World, WorldError, Worlds

LOST = 2


class Members:
    """What ranks average over one group: tensors through two codecs, and a model."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int) -> None:
        self.rank = rank
        self.model = Plain()
        named = [("a", torch.zeros(64, 256)), ("b", torch.zeros(48))]
        self.reducers = [gradferry.Reducer(named, codec, group) for codec in ("q4", "off")]
        self.optimizer, self.diloco = make(self.model, group=group)

    def average(self, step: int) -> list[bytes]:
        """The bits of all averages of a step."""
        found = []
        for reducer in self.reducers:
            found += movements(self.model, step, self.rank)
            reducer.all_reduce(found[-2:])
        move(self.model, movements(self.model, step, self.rank))
        self.optimizer.step()
        return [*(each.numpy().tobytes() for each in found), *bits_of(self.model)]


def case_alone() -> None:
    """The same averages as over a group of torch; then a rank is lost, and two go on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.group.WORLD.get_group_store()
    known = Members(None, rank)
    expected = [known.average(step) for step in range(2)]
    known.diloco.close()
    dist.destroy_process_group()

    first = own_group("first", store, rank, size)
    members = Members(first, rank)
    assert [members.average(step) for step in range(2)] == expected
    assert f"rank {rank} of 3, process group without a name" in str(members.diloco)
    if rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    for call in (members.reducers[0].all_reduce, members.optimizer.step):
        outcome = attempt(call)
        assert outcome.error == "PeerError", outcome
        assert f"rank {LOST}" in outcome.text

    second = own_group("second", store, rank, LOST)
    members.diloco.rejoin(second)
    left = Members(second, rank)
    found = [left.average(step) for step in range(2)]
    assert found[1] != expected[1]  # a part is missing
    for model in (left.model, members.model):
        of_all = [torch.zeros(64, 256) for _ in range(LOST)]
        second.allgather([of_all], [model.weight.detach()]).wait()
        assert are_equal(each.numpy().tobytes() for each in of_all)


def test_ranks_without_a_default_group_average_the_same_and_lose_one() -> None:
    world = World(LOST + 1)
    try:
        with pytest.raises(WorldError) as raised:
            world.run(case_alone)
    finally:
        world.stop()
    rows = [line for line in str(raised.value).splitlines() if line.startswith("rank ")]
    assert rows == [f"rank {LOST}: process ended with code -9"], raised.value


@on_ranks(2)
def test_a_group_needs_a_backend_and_somebody_who_keeps_it(tmp_path: Path) -> None:
    """Beside a default group; and a checkpoint."""
    store = dist.group.WORLD.get_group_store()
    group = own_group("beside", store, dist.get_rank(), dist.get_world_size())
    reducer = gradferry.Reducer([("a", torch.zeros(64, 64))], "q4", group)
    reducer.all_reduce([torch.randn(64, 64)])
    gradferry.checkpoint.save(tmp_path, {"reducer": reducer.state_dict()}, group)
    reducer.load_state_dict(gradferry.checkpoint.load(tmp_path)["reducer"])
    empty = dist.ProcessGroup(store, 0, 1)
    del group
    for call, error, text in (
        (lambda: gradferry.Reducer([("a", torch.zeros(3))], group=empty), "ConfigError", "backend"),
        (reducer.all_reduce, "StateError", "nobody has kept it"),
    ):
        outcome = attempt(call)
        assert outcome.error == error, outcome
        assert text in outcome.text


def case_on_streams() -> Outcome:
    import fake_device

    store, rank = dist.group.WORLD.get_group_store(), dist.get_rank()
    group: Any = own_group("own", store, rank, 2)
    streams = dist.PrefixStore("streams", store)
    backend = fake_device._make_backend("streamed", streams, rank, 2, timedelta(seconds=60))
    group._register_backend(fake_device.DEVICE, dist.ProcessGroup.BackendType.CUSTOM, backend)
    named = [("a", torch.zeros(64, 64, device=fake_device.DEVICE))]
    return attempt(lambda: gradferry.Reducer(named, "q4", group))


def test_collectives_on_streams_need_a_group_of_torch(device_worlds: Worlds) -> None:
    for outcome in device_worlds(2).run(case_on_streams):
        assert outcome.error == "ConfigError", outcome
        assert "torch.distributed does not know the process group" in outcome.text
