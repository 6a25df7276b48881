"""Kinds of models under FSDP2: behind `exact` they have the gradients of its own hybrid sharding.

Gradients are small whole numbers, so that sums and their quarter are exact in fp32 in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from outcomes import attempt
from sharding import Sharding, same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from world import World

Worlds = Callable[[int], World]
WIDTH = 24


class Layer(nn.Module):
    """Two matrices, each times a number of the batch: these numbers are their gradients."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(37, WIDTH))
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = (self.weight * x).sum() + 3 * (self.bias * x).sum()
        return mine if self.inner is None else mine + self.inner(2 * x)


def plain(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model = Layer(Layer())
    for module in (model.inner, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def offloaded(mesh: DeviceMesh) -> nn.Module:
    return plain(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def nested(mesh: DeviceMesh) -> nn.Module:
    """Sharded modules in a sharded module, and one between them that is not."""
    model = Layer(Layer(Layer(Layer())))
    for module in (model.inner.inner.inner, model.inner, model):
        fully_shard(module, mesh=mesh)
    return model


def tied(mesh: DeviceMesh) -> nn.Module:
    model = Layer(Layer(Layer()))
    model.inner.weight = model.weight
    fully_shard(model.inner.inner, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compiled(mesh: DeviceMesh) -> nn.Module:
    model = plain(mesh)
    model.compile(backend="eager")
    return model


def compiled_parts(mesh: DeviceMesh) -> nn.Module:
    model = Layer(Layer())
    model.inner.compile(backend="eager")
    for module in (model.inner, model):
        fully_shard(module, mesh=mesh)
    return model


KINDS = (plain, offloaded, nested, tied, compiled, compiled_parts)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of two passes, the second one on top of changed parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = {}
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((WIDTH,), 1.0 + step + dist.get_rank())).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            found[f"{name} {step}"] = parameter.grad.to_local().clone()
    return found


def case_kinds() -> dict[str, str]:
    """What is wrong, by kind."""
    torch._dynamo.reset()
    mesh = Sharding().mesh()
    wrong = {}
    for kind in KINDS:
        expected = gradients(kind(mesh))
        model = kind(mesh["shard"])
        state = gradferry.fsdp.attach(model, "exact", mesh["replica"])
        found: dict[str, torch.Tensor] = {}
        outcome = attempt(lambda m=model, f=found: f.update(gradients(m)))
        counts = state.stats()["steps"], state.stats()["fallbacks"]
        if outcome.error or not same(found, expected) or counts != (2, 0):
            wrong[kind.__name__] = f"{outcome} {counts} {found}"
    return wrong


@pytest.mark.torch_core
def test_kinds_of_models_have_the_gradients_of_fsdp2(worlds: Worlds) -> None:
    assert worlds(4).run(case_kinds) == [{}] * 4
