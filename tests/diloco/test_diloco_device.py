"""`gradferry.DiLoCo` of a model on a device has the bits that it has of a model on the host.

Gradients are whole numbers of 2^-8, and rates of both optimizers are powers of two: products are
exact, so that a device that contracts a multiplication and an addition rounds as the CPU does.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from resumable import fingerprints
from scenario import placed
from torch import nn
from torch.utils._pytree import tree_map_only
from training_alone import Plain, are_equal, movements, of_all
from watching import in_two_orders

SYNC_EVERY = 2
OUTER_STEPS = 4
STEPS = SYNC_EVERY * OUTER_STEPS
# The place is that of global parameters, residuals and messages.
everywhere = pytest.mark.parametrize(
    ("device", "place"), list(itertools.product(("streamed", "staged"), ("the host", "the device")))
)


def halving(common: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(common, lr=0.5, momentum=0.5, nesterov=True)


class Training:
    """SGD with momentum, by gradients of each step and rank."""

    def __init__(
        self,
        device: str,
        place: str = "the host",
        codec: str = "q4",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device, group = placed(device)
        self.place = torch.device("cpu") if place == "the host" else self.device
        self.model = Plain(dtype).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        self.diloco = gradferry.DiLoCo(
            self.model,
            self.optimizer,
            SYNC_EVERY,
            codec,
            outer=halving,
            residual_decay=0.5,
            device=self.place,
            group=group,
        )

    def train(self, steps: range) -> None:
        for step in steps:
            given = movements(self.model, dist.get_rank(), step)
            for parameter, gradient in zip(self.model.parameters(), given, strict=True):
                parameter.grad = gradient.to(self.device, parameter.dtype)
            self.optimizer.step()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "diloco": self.diloco}

    def saved(self) -> dict[str, Any]:
        """A copy, in host memory."""
        states = {name: part.state_dict() for name, part in self.parts().items()}
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to("cpu", copy=True), states)

    def load(self, saved: dict[str, Any]) -> None:
        # An optimizer of torch goes on in the tensors that it loads; a DiLoCo copies them.
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        self.diloco.load_state_dict(saved["diloco"])

    def bits(self) -> dict[str, str]:
        return bits(self.saved())


def bits(saved: dict[str, Any]) -> dict[str, str]:
    """By path, a fingerprint of each tensor, and every number; numpy has no bfloat16."""

    def without_bf16(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor

    return dict(fingerprints(tree_map_only(torch.Tensor, without_bf16, saved)))


def trained(device: str, place: str, codec: str, dtype: torch.dtype) -> dict[str, str]:
    training = Training(device, place, codec, dtype)
    training.train(range(STEPS))
    assert training.diloco.stats()["outer_steps"] == OUTER_STEPS
    common = training.diloco.state_dict()["global"]
    assert {each.device for each in common.values()} == {training.place}
    assert are_equal(of_all(bits(training.saved()["diloco"]["global"])))
    return training.bits()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("codec", ["q4", "sign1"])
@everywhere
@on_ranks(2)
def test_training_has_the_bits_of_the_host(
    device: str, place: str, codec: str, dtype: torch.dtype
) -> None:
    """Model, optimizer, global parameters, outer momentum and residuals are equal."""
    expected = trained("cpu", "the host", codec, dtype)
    for found in in_two_orders(lambda: trained(device, place, codec, dtype)):
        assert found == expected


@everywhere
@on_ranks(2)
def test_saved_training_goes_on_with_the_same_bits(device: str, place: str) -> None:
    """A state is saved within a period, and loaded on the device and on the host."""
    stop = SYNC_EVERY + 1
    straight = Training(device, place)
    straight.train(range(stop))
    saved = straight.saved()
    straight.train(range(stop, STEPS))
    for where in ((device, place), ("cpu", "the host")):
        resumed = Training(*where)
        resumed.train(range(1))
        resumed.load(saved)
        assert resumed.bits() == bits(saved)
        resumed.train(range(stop, STEPS))
        assert resumed.bits() == straight.bits()
