"""A model on the fake device, whose clock follows prices that a test names."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass(frozen=True)
class Prices:
    """Seconds, as the fake device's set_prices() has them."""

    launch: float = 4e-6
    byte: float = 2e-12  # 500 GB/s
    collective: float = 20e-6
    byte_sent: float = 4e-9  # 2 Gb/s


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
WIDTH = 128
NUM_ELEMENTS = LAYERS * WIDTH * WIDTH
BUCKET_MB = 4 * WIDTH * WIDTH / 2**20  # a layer each


class Model(nn.Module):
    """Layers that take so many seconds each, backwards; half of it forwards."""

    def __init__(self, layer_s: float) -> None:
        super().__init__()
        self.layer_s = layer_s
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = Layer.apply(x, weight, self.layer_s)
        return x.sum()


def wrapped(layer_s: float, kind: str) -> tuple[DistributedDataParallel, torch.Tensor]:
    """The model in DDP, and its batch."""
    import fake_device

    model = Model(layer_s).to(fake_device.DEVICE)
    group = fake_device.group(kind)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=BUCKET_MB)
    return ddp, torch.ones(1, device=fake_device.DEVICE, requires_grad=True)


@contextlib.contextmanager
def group_without_cpu() -> Iterator[None]:
    """Groups like those of init_process_group("nccl"), while this lasts."""
    import fake_device

    known = dict(fake_device.backends)

    def group(kind: str, ranks: None = None) -> dist.ProcessGroup:
        return dist.new_group(backend=f"fake:fake_{kind}")

    with mock.patch.object(fake_device, "group", group):
        yield
    fake_device.backends.update(known)
