"""`gradferry.DiLoCo` of a model on a device has the bits that it has of a model on the host.

Gradients are whole numbers of 2^-8, and rates of both optimizers are powers of two: products are
exact, so that a device that contracts a multiplication and an addition rounds as the CPU does.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from on_ranks import on_ranks
from training_alone import PERIOD, Training, are_equal, of_all
from watching import in_two_orders

OUTER_STEPS = 4


def trained(device: str, place: str, codec: str, dtype: torch.dtype) -> dict[str, str]:
    training = Training(device, place, codec, dtype)
    training.train(range(PERIOD * OUTER_STEPS))
    assert training.diloco.stats()["outer_steps"] == OUTER_STEPS
    tensors = training.diloco.state_dict()["global"].values()
    assert {each.device for each in tensors} == {training.place}
    bits = training.bits()
    assert are_equal(of_all({key: bits[key] for key in bits if key.startswith("/diloco/global")}))
    return bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("codec", ["q4", "sign1"])
@pytest.mark.parametrize(
    ("device", "place"), list(itertools.product(("streamed", "staged"), ("the host", "the device")))
)
@on_ranks(2)
def test_training_has_the_bits_of_the_host(
    device: str, place: str, codec: str, dtype: torch.dtype
) -> None:
    """Model, optimizer, global parameters, outer momentum and residuals are equal."""
    expected = trained("cpu", "the host", codec, dtype)
    for found in in_two_orders(lambda: trained(device, place, codec, dtype)):
        assert found == expected
