"""The warning for plain Adam behind codecs that train better with OneBitAdam."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World


def case_warnings(codec: str, feedback: str, optimizer: str) -> list[str]:
    import gradferry

    ddp = DistributedDataParallel(nn.Linear(40, 40))
    gradferry.attach(ddp, codec, error_feedback=feedback)
    stepper = getattr(torch.optim, optimizer)(ddp.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            ddp(torch.ones(2, 40)).sum().backward()
            stepper.step()
    return [str(w.message) for w in caught if "error feedback" in str(w.message)]


@pytest.mark.parametrize(
    ("codec", "feedback", "optimizer", "warned"),
    [
        ("sign1", "auto", "AdamW", True),
        ("topk:ratio=0.01", "both", "Adam", True),
        ("rht:bits=2", "worker", "NAdam", True),
        ("sign1", "auto", "SGD", False),
        ("sign1", "owner", "AdamW", False),
        ("q4", "both", "AdamW", False),
    ],
)
def test_plain_adam_behind_a_coarse_codec_is_warned_about_once(
    world_of_2: World, codec: str, feedback: str, optimizer: str, warned: bool
) -> None:
    for texts in world_of_2.run(case_warnings, codec=codec, feedback=feedback, optimizer=optimizer):
        assert len(texts) == warned
        if warned:
            assert texts[0].startswith(f"{optimizer} trains worse behind {codec.split(':')[0]}")
            assert "gradferry.optim.OneBitAdam" in texts[0]


def case_two_models() -> int:
    """Two watched models, one optimizer each: nothing breaks, each is warned about."""
    import gradferry

    models = [DistributedDataParallel(nn.Linear(40, 40)) for _ in range(3)]
    for ddp in models:
        gradferry.attach(ddp, "sign1")
    steppers = [torch.optim.Adam(ddp.parameters()) for ddp in models]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ddp, stepper in [*zip(models, steppers, strict=True)] * 2:
            ddp(torch.ones(2, 40)).sum().backward()
            stepper.step()
    return sum("error feedback" in str(w.message) for w in caught)


def test_every_model_is_warned_about_once(world_of_2: World) -> None:
    assert world_of_2.run(case_two_models) == [3, 3]
