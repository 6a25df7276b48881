"""What integrations in trainers have in common; tests/hosts has the trainers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry import checkpoint
from gradferry.integrations import checkpoints
from gradferry.integrations.models import Metrics, find_ddp, take_momentum
from on_ranks import of_all, on_ranks
from outcomes import Outcome, attempt
from stepping import settings, settings_of_steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from world import Worlds


def attached(codec: str = "q4", momentum: float | None = 0.8) -> tuple[nn.Module, Any]:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 16)))
    return ddp, gradferry.attach(ddp, codec, momentum=momentum)


@pytest.mark.parametrize(
    ("make", "rate"),
    [
        # In units of the root of (1 - 0.8) / (1 + 0.8), a third. CyclicLR begins at 0.001.
        (torch.optim.AdamW, 0.001 / 3),
        (torch.optim.RMSprop, 0.001),
    ],
)
@on_ranks()
def test_an_optimizer_with_momentum_of_its_own_gives_it_up(
    make: Callable[..., Any], rate: float
) -> None:
    """It keeps its settings, and steps with others."""
    ddp, state = attached()
    optimizer = make(ddp.parameters(), lr=0.01)
    lr_scheduler.CyclicLR(optimizer, 0.001, 0.01, cycle_momentum=False)
    before = settings(optimizer)
    take_momentum(optimizer, state)
    take_momentum(optimizer, state)  # as a second training
    seen = settings_of_steps(optimizer)
    optimizer.step()
    assert settings(optimizer) == before
    assert [group["lr"] for group in seen[0]] == pytest.approx([rate], rel=1e-14)


@on_ranks()
def test_metrics_are_means_since_they_were_taken() -> None:
    ddp, state = attached(momentum=None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    metrics, rows = Metrics(state), []
    state.on_step(rows.append)
    for _ in range(3):
        ddp(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    means = metrics.take()
    assert means["gradferry/wire_bytes"] == rows[1]["wire_bytes"] > 0
    exposed = sum(row["exposed_ms"] for row in rows) / 3
    assert means["gradferry/exposed_ms"] == pytest.approx(exposed, rel=1e-12)
    assert metrics.take() == {}


def case_checkpoint(folder: str, on_resize: str, save: bool) -> Outcome:
    ddp, state = attached(momentum=None)
    if save:
        ddp(torch.randn(4, 64)).sum().backward()
        checkpoints.save(Path(folder), state, ddp.process_group)
    assert dist.get_rank() == state.rank
    outcome = attempt(lambda: checkpoints.load(Path(folder), state, ddp.process_group, on_resize))
    if outcome.error is None:
        assert state.state_dict()["steps"] == (1 if Path(folder).exists() else 0)
    return outcome


def test_checkpoint_of_another_number_of_ranks_goes_by_on_resize(
    worlds: Worlds, tmp_path: Path
) -> None:
    folder = str(tmp_path / "gradferry")

    def run(size: int, on_resize: str, *, save: bool = False) -> list[Outcome]:
        arguments = {"folder": folder, "on_resize": on_resize, "save": save}
        outcomes = worlds(size).run(case_checkpoint, **arguments)
        assert len({outcome.text for outcome in outcomes}) == 1  # the same on all ranks
        return outcomes

    for outcome in run(3, "strict"):
        assert outcome.error == "StateError"
        assert "holds nothing of gradferry" in outcome.text
        assert "on_resize='drop'" in outcome.text
    assert run(3, "drop")[0].error is None
    assert run(2, "mean", save=True)[0].error is None
    for outcome in run(3, "strict"):
        assert outcome.error == "StateError"
        assert folder in outcome.text
        assert "world_size 2, this hook has 3" in outcome.text
    for way in ("mean", "drop"):
        assert run(3, way)[0].error is None
    next((tmp_path / "gradferry").glob("*/rank-1.pt")).unlink()
    for outcome in run(2, "strict"):
        assert outcome.error == "StateError"
        assert "rank 1: " in outcome.text
        assert "rank-1.pt is lost" in outcome.text


@on_ranks()
def test_drop_begins_without_a_state_and_what_is_none_is_one_error_on_all_ranks(
    tmp_path: Path,
) -> None:
    """In momentum mode, behind what was saved without; what other code saved; and a folder that
    only the first rank sees.
    """
    ddp, state = attached()

    def load(name: str) -> Outcome:
        path = tmp_path / name
        return attempt(lambda: checkpoints.load(path, state, ddp.process_group, "drop"))

    checkpoint.save(tmp_path / "foreign", {"other": 1})
    mine = "seen" if dist.get_rank() == 0 else "nowhere"
    checkpoint.save(tmp_path / "seen", {"hook": state.state_dict()})
    assert load("missing").error is None
    foreign, unseen = load("foreign"), load(mine)
    assert (foreign.error, unseen.error) == ("StateError", "RankMismatchError")
    assert "not saved by an integration of gradferry" in foreign.text
    assert "rank 1 differs from rank 0 in sight of the checkpoint" in unseen.text


@on_ranks(3)
def test_gathered_states_are_those_of_all_ranks() -> None:
    """The first rank has what all ranks saved, to the bit, and the others nothing."""
    ddp, state = attached("sign1")
    ddp(torch.randn(4, 64)).sum().backward()
    got = checkpoints.gather(state, ddp.process_group)
    everything = of_all(state.state_dict())
    assert (got is None) == (state.rank != 0)
    if got is not None:
        expected = checkpoint.merge(everything)
        assert got.keys() == expected.keys()
        for rank in range(state.world_size):
            for name, kept in expected[f"slot_{rank}"].items():
                assert torch.equal(got[f"slot_{rank}"][name], kept)


@on_ranks(1)
def test_model_without_ddp_is_an_error_or_a_warning() -> None:
    model = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="the host trains with a single process"):
        assert find_ddp(model, "the host", 1, None) is None
    ddp = DistributedDataParallel(model)
    compiled = nn.Module()
    compiled._orig_mod = ddp  # as torch.compile names it
    assert find_ddp(compiled, "the host", 1, None) is ddp
    with pytest.raises(gradferry.ConfigError, match=r"momentum=0\.9 is for a hook"):
        find_ddp(model, "the host", 1, 0.9)
    with pytest.raises(gradferry.ConfigError, match="the host trains with Linear"):
        find_ddp(model, "the host", 2, None)


@pytest.mark.parametrize(
    ("name", "trainers"),
    [
        ("transformers", ["transformers"]),
        ("lightning", ["lightning.pytorch", "pytorch_lightning"]),
        ("torchft", ["torchft"]),
    ],
)
def test_missing_trainer_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, trainers: list[str]
) -> None:
    for trainer in trainers:
        monkeypatch.setitem(sys.modules, trainer, None)
    monkeypatch.delitem(sys.modules, f"gradferry.integrations.{name}", raising=False)
    with pytest.raises(gradferry.ConfigError, match=rf'pip install "gradferry\[{name}\]"'):
        importlib.import_module(f"gradferry.integrations.{name}")
