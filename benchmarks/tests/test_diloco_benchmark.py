"""benchmarks/diloco.py: when its clock begins, and what it refuses before it trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import gradferry
import pytest
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
    """All optimizers have stepped, and DiLoCo has not looked how far this rank has come."""
    clock_type, seen = load().OuterClock, []
    model = nn.Linear(4, 4)
    parts = [torch.optim.SGD([each], lr=1.0) for each in model.parameters()]
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    clock = clock_type(parts[-1])
    diloco = gradferry.DiLoCo(model, parts, sync_every=2)

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
            for part in parts:
                part.step()
            clock.ends()
    assert [name for name, _ in seen] == ["barrier", "outer step"] * 2
    for (_, when_timed), (_, when_taken) in (seen[:2], seen[2:]):
        assert all(map(torch.equal, when_timed, when_taken))
    assert len(clock.ms) == 2


def refused(*words: str, capsys: Any) -> str:
    module = load()
    never = mock.patch.object(module, "train", side_effect=AssertionError("it trains"))
    with mock.patch.object(sys, "argv", [PROGRAM, *words]), never, pytest.raises(SystemExit):
        module.main()
    return " ".join(capsys.readouterr().err.split())


def test_a_foreign_file_is_refused_before_it_trains(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"schema": 1, "results_of": "demo", "rows": []}))
    assert str(file) in refused("--json", str(file), capsys=capsys)


def test_what_torchft_or_a_task_has_not_is_refused(capsys: Any) -> None:
    with mock.patch("importlib.util.find_spec", return_value=None):
        text = refused("--codecs", "q4", "torchft:q4", capsys=capsys)
    assert 'torchft:q4: torchft is not installed here: pip install "gradferry[torchft]"' in text
