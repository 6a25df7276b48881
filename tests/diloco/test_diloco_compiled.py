"""`torch.compile(optimizer.step)` counts inner steps and takes outer steps, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gradferry
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from outcomes import attempt
from torch import nn
from training_alone import are_equal, bits_of, of_all

SYNC_EVERY = 3
STEPS = 2 * SYNC_EVERY + 1
BACKEND = "eager"  # inductor has the same bits here, and compiles longer
Compiled = Callable[[Callable[[], Any]], Callable[[], Any]]


@contextmanager
def compiled(backend: str) -> Iterator[Compiled]:
    """Yields a function that compiles another; forgets at the end what it has compiled."""
    torch._dynamo.reset()
    try:
        yield lambda function: torch.compile(function, backend=backend)
    finally:
        torch._dynamo.reset()


def train(compile_step: Compiled) -> tuple[Any, ...]:
    """Trains a small model; returns what must be equal however steps are called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 8))
    weights, biases = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    optimizers = [
        # The compiler changes the last bits of AdamW that is not fused, also without DiLoCo.
        torch.optim.AdamW(part, lr=1e-2, fused=True)
        for part in (weights, biases)
    ]
    diloco = gradferry.DiLoCo(model, optimizers, SYNC_EVERY, "q4")
    steps = [compile_step(each.step) for each in optimizers]
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
    residuals = diloco.state_dict()["reducer"]
    withheld = [value["worker"].tolist() for key, value in residuals.items() if "slot" in key]
    diloco.finish()
    assert are_equal(of_all(bits_of(model)))
    return counts, withheld, bits_of(model)


@on_ranks(2)
def test_compiled_steps_count_and_have_the_same_bits() -> None:
    plain = train(lambda step: step)
    with compiled(BACKEND) as compile_step:
        assert train(compile_step) == plain
    counts, _, _ = plain
    assert counts == [(step, step // SYNC_EVERY) for step in range(1, STEPS + 1)]


@on_ranks(2)
def test_compiled_step_raises_what_an_outer_step_meets() -> None:
    """And goes on where it has not changed anything."""
    model = nn.Linear(24, 96)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    diloco = gradferry.DiLoCo(model, optimizer, 1)
    kept = model.weight.detach().clone()
    with compiled(BACKEND) as compile_step:
        step = compile_step(optimizer.step)
        step()
        if dist.get_rank() == 1:
            with torch.no_grad():
                model.weight[2, 3] = float("nan")
            diloco.accept_local()
        outcome = attempt(step)
        assert outcome.error == "StateError", outcome
        assert "rank 1: 'weight' has come to NaN or infinity" in outcome.text
        with torch.no_grad():
            model.weight.copy_(kept)
        diloco.accept_local()
        step()
    assert diloco.stats()["outer_steps"] == 2
