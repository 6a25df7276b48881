"""benchmarks/diloco.py: when its clock begins."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from unittest import mock

import gradferry
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from programs import load_program
from torch import nn

PROGRAM = "benchmarks/diloco.py"


def load() -> ModuleType:
    """The program under another name than that of the example that it imports."""
    return load_program(PROGRAM, "diloco_benchmark")


@on_ranks(2)
def test_an_outer_step_is_timed_from_when_all_have_taken_their_inner_step() -> None:
    """The inner optimizer has stepped, and DiLoCo has not looked how far this rank has come."""
    clock_type, seen = load().OuterClock, []
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    clock = clock_type(optimizer)
    diloco = gradferry.DiLoCo(model, optimizer, sync_every=2)

    def note(name: str, act: Any) -> Any:
        def call(*arguments: Any) -> Any:
            seen.append((name, [each.detach().clone() for each in model.parameters()]))
            return act(*arguments)

        return call

    barrier = mock.patch.object(dist, "barrier", note("barrier", dist.barrier))
    outer = mock.patch.object(diloco, "_outer_step", note("outer step", diloco._outer_step))
    with barrier, outer:
        for step in range(4):
            clock.is_due = step % 2 == 1
            optimizer.step()
            clock.ends()
    assert [name for name, _ in seen] == ["barrier", "outer step"] * 2
    for (_, when_timed), (_, when_taken) in (seen[:2], seen[2:]):
        assert all(map(torch.equal, when_timed, when_taken))
    assert len(clock.ms) == 2
