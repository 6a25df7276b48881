"""`torch.compile(optimizer.step)` counts inner steps and takes outer steps, with the same bits."""

from __future__ import annotations

from typing import Any

import gradferry
import torch
import torch.distributed as dist
from on_ranks import of_all, on_ranks
from outcomes import attempt
from torch import nn
from training_alone import are_equal, bits_of

SYNC_EVERY = 3
STEPS = 2 * SYNC_EVERY + 1


def compiled(step: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(step, backend="eager")  # inductor has the same bits, and compiles longer


def train(*, is_compiled: bool) -> tuple[Any, ...]:
    """Trains a small model; returns what must be equal however steps are called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 8))
    optimizers = [
        # The compiler changes the last bits of AdamW that is not fused, also without DiLoCo.
        torch.optim.AdamW([p for p in model.parameters() if p.dim() == dim], lr=1e-2, fused=True)
        for dim in (2, 1)
    ]
    diloco = gradferry.DiLoCo(model, optimizers, SYNC_EVERY, "q4")
    steps = [compiled(each.step) if is_compiled else each.step for each in optimizers]
    counts = []
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(8, 24, generator=numbers)
        model.zero_grad()
        (model(x) - x[:, :8]).square().mean().backward()
        for each in steps:
            each()
        stats = diloco.stats()
        counts.append((stats["inner_steps"], stats["outer_steps"]))
    slot = diloco.state_dict()["reducer"][f"slot_{dist.get_rank()}"]
    diloco.finish()
    assert are_equal(of_all(bits_of(model)))
    return counts, slot["worker"].tolist(), bits_of(model)


@on_ranks(2)
def test_compiled_steps_count_and_have_the_same_bits() -> None:
    plain = train(is_compiled=False)
    assert train(is_compiled=True) == plain
    assert plain[0] == [(step, step // SYNC_EVERY) for step in range(1, STEPS + 1)]


@on_ranks(2)
def test_compiled_step_raises_what_an_outer_step_meets() -> None:
    model = nn.Linear(24, 96)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _ = gradferry.DiLoCo(model, optimizer, 1)
    if dist.get_rank() == 1:
        nn.init.constant_(model.weight, float("nan"))
    outcome = attempt(compiled(optimizer.step))
    assert outcome.error == "StateError", outcome
    assert "rank 1: 'weight' has come to NaN or infinity" in outcome.text
