"""Tools predict what travels. That it is what the documented formula says: test_scenarios.py."""

from __future__ import annotations

import pytest
from scenario import ChosenGradients, Scenario, Weight
from torch.nn.parallel import DistributedDataParallel
from world import World

WEIGHTS = (
    Weight("embedding", (300, 200)),
    Weight("bias", (70,)),
    Weight("hidden", (500, 613)),
    Weight("one", (1,)),
    Weight("empty", (0, 3)),
    Weight("output", (129, 401)),
)
SCENARIO = Scenario(WEIGHTS, 3, steps=2, ddp={"bucket_cap_mb": 0.5})


def case_predicted(hook: str) -> list[tuple[int, int]]:
    """Bytes sent in every step after DDP has arranged its buckets, and what the tools predict."""
    from gradferry_lab.workloads.hooks import apply_hook

    ddp = DistributedDataParallel(ChosenGradients(SCENARIO), bucket_cap_mb=0.5)
    handle = apply_hook(ddp, hook)
    sent, predicted = [0], []
    for step in range(5):
        gradients = [SCENARIO.gradient(step, 0, 0, index) for index in range(len(WEIGHTS))]
        flat = zip(WEIGHTS, gradients, strict=True)
        ddp({weight.name: weight.from_flat(gradient) for weight, gradient in flat}).backward()
        sent.append(handle.wire_bytes(step + 1))
        predicted.append((sent[-1] - sent[-2], handle.formula_bytes()))
        assert handle.bytes_to_other_hosts([0, 0]) == [0, 0]
    return predicted[2:]


@pytest.mark.parametrize("warmup", ["exact", "q8"])
def test_tools_predict_the_bytes_of_warmup_steps(world_of_2: World, warmup: str) -> None:
    hook = f"topk+warmup_steps=3+warmup={warmup}"
    for predictions in world_of_2.run(case_predicted, hook=hook):
        assert [sent for sent, _ in predictions] == [formula for _, formula in predictions]
        assert predictions[0][0] > 4 * predictions[1][0]
