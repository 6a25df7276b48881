"""Ranks that train alone under a DiLoCo, by movements that a test chooses."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import gradferry
import torch
import torch.distributed as dist
from gradferry.averaging.tiles import Tile, spread
from resumable import fingerprints
from scenario import placed
from torch import nn
from torch.utils._pytree import tree_map_only

UNIT = 2.0**-8  # of movements: sums of a few have the same bits in every order


class Plain(nn.Module):
    """A weight, which codecs compress, and a bias, which is sent as it is."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 256, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(48, dtype=dtype))


def by_its_mean(common: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An outer optimizer that subtracts the averaged change as it is."""
    return torch.optim.SGD(common, lr=1.0)


class Moving(torch.optim.Optimizer):
    """Subtracts each gradient once: without one it moves nothing."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad)
                    parameter.grad = None


def still(model: nn.Module) -> torch.optim.Optimizer:
    """An inner optimizer whose steps count, and do what `move` has said."""
    return Moving(model.parameters())


def make(model: nn.Module, codec: str = "q4", **changes: Any) -> tuple[Any, Any]:
    """An optimizer that does what `move` says, and a DiLoCo that steps at every step of it."""
    optimizer = still(model)
    options = {"sync_every": 1, "outer": by_its_mean, **changes}
    return optimizer, gradferry.DiLoCo(model, optimizer, codec=codec, **options)


def movements(model: nn.Module, *seed: int) -> list[torch.Tensor]:
    """By parameter, whole numbers of `UNIT`."""
    number = 0
    for each in seed:
        number = 1009 * number + each
    numbers = torch.Generator().manual_seed(number)
    return [
        UNIT * torch.randint(-64, 65, p.shape, generator=numbers).float()
        for p in model.parameters()
    ]


@torch.no_grad()
def shift(model: nn.Module, by: Iterable[torch.Tensor]) -> None:
    """Changes parameters, without a step of any optimizer."""
    for parameter, change in zip(model.parameters(), by, strict=True):
        parameter.sub_(change)


def move(model: nn.Module, by: Iterable[torch.Tensor]) -> None:
    """Training, of which the pseudo-gradient is `by` after the next step."""
    for parameter, change in zip(model.parameters(), by, strict=True):
        if parameter.requires_grad:
            parameter.grad = change.to(parameter.dtype)


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """In fp64, which sums below are exact in."""
    return torch.cat([each.detach().flatten().double() for each in tensors])


def common(diloco: gradferry.DiLoCo) -> torch.Tensor:
    """The global parameters, one after the other."""
    return flat(diloco.state_dict()["global"].values())


def bits_of(model: nn.Module) -> list[bytes]:
    """By parameter; of a sharded one this rank's part."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return [each.detach().flatten().view(torch.uint8).numpy().tobytes() for each in local]


def are_equal(values: Iterable[Any]) -> bool:
    first, *others = values
    return all(each == first for each in others)


def residuals(state: dict[str, Any], tiles: list[Tile]) -> tuple[torch.Tensor, torch.Tensor]:
    """The worker and owner residual in a Reducer's state of one rank, of all tiles, in fp64."""
    (slot,) = (value for key, value in state.items() if key.startswith("slot_"))
    worker, owner = (spread(slot[kind], tiles, kind) for kind in ("worker", "owner"))
    return worker.double().flatten(), owner.double().flatten()


def summed(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum over ranks. Collective."""
    total = value.clone()
    dist.all_reduce(total, group=group)
    return total


PERIOD = 2


def halving(tensors: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.5, momentum=0.5, nesterov=True)


class Training:
    """SGD with momentum, by gradients of each step and rank, on the host or a kind of the fake
    device. Global parameters, residuals and messages are there, too, or at the `place` "the host".
    """

    def __init__(
        self,
        device: str = "cpu",
        place: str = "the host",
        codec: str = "q4",
        dtype: torch.dtype = torch.float32,
        **changes: Any,
    ) -> None:
        self.device, group = placed(device)
        self.place = torch.device("cpu") if place == "the host" else self.device
        self.model = Plain(dtype).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        options = {"outer": halving, "residual_decay": 0.5, "device": self.place, "group": group}
        options.update(changes)
        self.diloco = gradferry.DiLoCo(self.model, self.optimizer, PERIOD, codec, **options)

    def train(self, steps: range) -> None:
        for step in steps:
            given = movements(self.model, dist.get_rank(), step)
            for parameter, gradient in zip(self.model.parameters(), given, strict=True):
                parameter.grad = gradient.to(self.device, parameter.dtype)
            self.optimizer.step()

    def saved(self) -> bytes:
        """Model, optimizer and DiLoCo, with tensors on the host."""
        parts = {"model": self.model, "optimizer": self.optimizer, "diloco": self.diloco}
        states = {name: part.state_dict() for name, part in parts.items()}
        file = io.BytesIO()
        torch.save(tree_map_only(torch.Tensor, lambda t: t.to("cpu", copy=True), states), file)
        return file.getvalue()

    def load(self, saved: bytes, on_resize: str = "strict") -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        self.diloco.load_state_dict(states["diloco"], on_resize)

    def bits(self) -> dict[str, str]:
        """By path in what is saved, a fingerprint of each tensor, and every number."""

        def without_bf16(tensor: torch.Tensor) -> torch.Tensor:  # which numpy lacks
            return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor

        states = torch.load(io.BytesIO(self.saved()), weights_only=True)
        return dict(fingerprints(tree_map_only(torch.Tensor, without_bf16, states)))
