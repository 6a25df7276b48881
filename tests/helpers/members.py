"""Members of a DiLoCo, whose averages and residuals are exact, and that end in the middle."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry.diloco import _OuterReducer
from torch import nn
from training_alone import residuals, still
from world import World, WorldError

SHAPE = (96, 128)  # three tiles, so that three ranks own one


class Alone:
    """A model that moves as a test says, under DiLoCo. The outer optimizer adds up averages."""

    def __init__(
        self, codec: str, group: dist.ProcessGroup | None, start: float = 0.0, nodes: Any = "auto"
    ) -> None:
        self.model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        nn.init.constant_(self.model.weight, start)
        self.number = dist.get_rank()  # which stays, whatever process groups come
        self.optimizer = still(self.model)
        self.diloco = gradferry.DiLoCo(
            self.model,
            self.optimizer,
            sync_every=1,
            codec=codec,
            outer=lambda common: torch.optim.SGD(common, lr=1.0),
            group=group,
            nodes=nodes,
        )
        self.diloco.outer.register_step_pre_hook(self._keep_average)

    def _keep_average(self, outer: torch.optim.Optimizer, *_: object) -> None:
        self._average = outer.param_groups[0]["params"][0].grad.double()

    def step(self, number: int) -> None:
        """Moves by minus `change(rank, number)`: an outer step."""
        self.model.weight.grad = change(self.number, number)
        self.optimizer.step()

    def applied(self) -> torch.Tensor:
        """The average of the last outer step."""
        return self._average

    def withheld(self) -> torch.Tensor:
        """This rank's part of what the averages of all lack: worker / W + owner."""
        saved = self.diloco.state_dict()["reducer"]
        worker, owner = residuals(saved, self.diloco._reducer._started.tiles())
        return (worker / saved["world_size"] + owner).view(SHAPE)


def change(rank: int, number: int) -> torch.Tensor:
    """Integers times 2^-8, of which fp32 holds sums and means over 2 and 4 ranks exactly."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(-500, 500, SHAPE, generator=generator) * 2.0**-8


def mean_of(ranks: list[int], number: int) -> torch.Tensor:
    return torch.stack([change(rank, number).double() for rank in ranks]).mean(0)


def die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


@contextlib.contextmanager
def dying_inside() -> Iterator[None]:
    """An average of this rank sends to the others, and ends before they have all."""

    def send_and_die(reducer: gradferry.Reducer, tensors: Any) -> None:
        gradferry.Reducer.all_reduce(reducer, tensors, async_op=True)
        die()

    with mock.patch.object(_OuterReducer, "all_reduce", send_and_die):
        yield


def run_until_lost(
    lost: list[int], case: Callable[..., None], /, size: int = 4, **how: Any
) -> None:
    """Runs a case in which exactly these ranks are killed, and the others return."""
    world = World(size)
    try:
        with pytest.raises(WorldError) as raised:
            world.run(case, **how)
    finally:
        world.stop()
    rows = [line for line in str(raised.value).splitlines() if line.startswith("rank ")]
    assert rows == [f"rank {rank}: process ended with code -9" for rank in lost], raised.value
