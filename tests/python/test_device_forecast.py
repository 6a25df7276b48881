"""doctor and codec="auto" on a device: the fake one, whose clock follows prices that a test names."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


@dataclasses.dataclass(frozen=True)
class Prices:
    """Seconds, as the fake device's set_prices() has them."""

    launch: float = 4e-6
    byte: float = 0.5e-12  # 2 TB/s
    collective: float = 20e-6
    byte_sent: float = 1e-9  # 8 Gb/s


@contextlib.contextmanager
def priced(prices: Prices) -> Iterator[Any]:
    from fake_device import machine

    machine.set_prices(**dataclasses.asdict(prices))
    try:
        yield machine
    finally:
        machine.set_prices(launch=0, byte=0, collective=0, byte_sent=0)


class Layer(torch.autograd.Function):
    """Does nothing, but takes its time on the device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        from fake_device import machine

        machine.compute(seconds / 2)
        ctx.seconds = seconds
        ctx.gradient = weight.detach()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        from fake_device import machine

        machine.compute(ctx.seconds)
        return gradient, ctx.gradient.clone(), None


LAYERS = 4
WIDTH = 256


class Model(nn.Module):
    """Layers that take so many seconds each, backwards; half of it forwards."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = Layer.apply(x, weight, self.seconds)
        return x.sum()


def case_doctor(prices: Prices, layer_s: float, hooks: list[str]) -> Any:
    import fake_device

    with priced(prices):
        model = Model(layer_s).to(fake_device.DEVICE)
        ddp = DistributedDataParallel(
            model, process_group=fake_device.group("streamed"), bucket_cap_mb=0.25
        )
        x = torch.ones(1, device=fake_device.DEVICE, requires_grad=True)
        found = gradferry.doctor(ddp, lambda: (x,), hooks=hooks, show=dist.get_rank() == 0)
    assert fake_device.machine.races() == []
    return found


def test_it(worlds: Worlds) -> None:
    for answer in worlds(2).run(
        case_doctor, prices=Prices(), layer_s=100e-6, hooks=["torch:fp32", "torch:bf16", "q8", "q4"]
    ):
        print(answer.profile)
        print(answer.costs.link)
        print(answer.costs.codecs, answer.costs.launches)
        for p in answer.predictions:
            print(p)
        print(answer.verdict)
    assert 0
