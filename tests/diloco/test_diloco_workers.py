"""`gradferry.DiLoCo` of workers that have several ranks: FSDP2 and DistributedDataParallel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from on_ranks import of_all, on_ranks
from outcomes import attempt
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_alone import Plain, are_equal, bits_of, by_its_mean, common, flat, movements

RATE = 2.0**-3
SYNC_EVERY = 2
STEPS = 6


class Chosen(Plain):
    """Its loss is the sum of its parameters times targets, which are thus its gradients."""

    def forward(self, targets: list[torch.Tensor]) -> torch.Tensor:
        terms = [(p * t).sum() for p, t in zip(self.parameters(), targets, strict=True)]
        return torch.stack(terms).sum()


def sharded(mesh: DeviceMesh) -> tuple[Any, dict[str, Any]]:
    """A model over the ranks of a worker, and the ranks that average."""
    model = Chosen()
    fully_shard(model, mesh=mesh["shard"])
    return model, {"group": mesh.get_group("worker")}


def replicated(mesh: DeviceMesh) -> tuple[Any, dict[str, Any]]:
    model = DistributedDataParallel(Chosen(), process_group=mesh.get_group("shard"))
    return model, {"nodes": 2}


Workers = Callable[[DeviceMesh], tuple[Any, dict[str, Any]]]


def train(workers: Workers, **options: Any) -> tuple[Any, gradferry.DiLoCo, DeviceMesh]:
    """Two workers of two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    model, averaging = workers(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    diloco = gradferry.DiLoCo(model, optimizer, SYNC_EVERY, **averaging, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(movements(Chosen(), dist.get_rank(), step)).backward()
        optimizer.step()
    return model, diloco, mesh


def parts_of(tensors: list[torch.Tensor], workers: Workers) -> list[torch.Tensor]:
    """This rank's."""
    if workers is replicated:
        return tensors
    return [each.chunk(2)[dist.get_rank() % 2] for each in tensors]


# Gradients are whole numbers of 2^-8, at most 2^-2, and the rate and numbers of ranks are powers of
# two: what is added up has the same bits in every order, and the tolerance is 0.
@pytest.mark.parametrize("workers", [sharded, replicated])
@on_ranks(4)
def test_global_parameters_are_those_of_a_training_by_hand(workers: Workers) -> None:
    model, diloco, mesh = train(workers, codec="exact", outer=by_its_mean)
    expected = [torch.zeros_like(parameter) for parameter in Chosen().parameters()]
    for step in range(STEPS):
        for rank in range(4):  # two workers of two ranks, the means of which are averaged
            for value, gradient in zip(expected, movements(Chosen(), rank, step), strict=True):
                value -= RATE * gradient / 4
    assert torch.equal(common(diloco), flat(parts_of(expected, workers)))
    assert diloco.stats()["outer_steps"] == STEPS // SYNC_EVERY
    assert_equal_where_they_must(workers, model, mesh)


@pytest.mark.parametrize("workers", [sharded, replicated])
@on_ranks(4)
def test_what_one_shard_has_come_to_keeps_all_shards_where_they_are(workers: Workers) -> None:
    model, diloco, _ = train(workers, codec="q4")
    before = common(diloco)
    optimizer = diloco._optimizers[0]
    optimizer.zero_grad()
    optimizer.step()
    if dist.get_rank() == 3:
        with torch.no_grad():
            local_parts(model)[0][0] = math.nan
    outcome = attempt(optimizer.step)
    assert outcome.error == "StateError"
    assert "rank 3: 'weight' has come to NaN or infinity" in outcome.text.replace("module.", "")
    assert diloco.stats()["outer_steps"] == STEPS // SYNC_EVERY
    assert torch.equal(common(diloco), before)


@on_ranks(4)
def test_shards_of_a_worker_are_not_averaged_with_each_other() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
    model, _ = sharded(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    outcome = attempt(lambda: gradferry.DiLoCo(model, optimizer))
    assert outcome.error == "RankMismatchError"
    assert "group= is of ranks with the same" in outcome.text


@on_ranks(4)
def test_evaluation_with_the_global_parameters_leaves_no_trace() -> None:
    model, diloco, _ = train(sharded, codec="exact")
    targets = movements(Chosen(), dist.get_rank(), STEPS)
    model(targets).backward()
    diloco._optimizers[0].step()  # away from the global parameters
    losses = [model(targets).detach()]
    with diloco.global_parameters():
        within = model(targets).detach()  # FSDP2 leaves the outermost module whole after it
    losses.append(model(targets).detach())
    assert torch.equal(*losses)
    assert not torch.equal(within, losses[0])


def local_parts(model: Any) -> list[torch.Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]


def assert_equal_where_they_must(workers: Workers, model: Any, mesh: DeviceMesh) -> None:
    """Under FSDP2 ranks with one shard, else all."""
    group = mesh.get_group("worker") if workers is sharded else None
    assert are_equal(of_all(bits_of(model), group))
