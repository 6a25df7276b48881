"""What integrations in trainers have in common; tests/hosts has the trainers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import Outcome, attempt
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from world import World

Worlds = Callable[[int], World]

STEPS = 6
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    # At rate 0 at first.
    "warm-up": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1, step / 3)),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.PolynomialLR(o, STEPS)], [3]
    ),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.01, "momentum": 0.75},
}


def attached(codec: str = "q4", momentum: float | None = 0.8) -> tuple[nn.Module, Any]:
    import gradferry

    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 16)))
    return ddp, gradferry.attach(ddp, codec, momentum=momentum)


def rates(optimizer: torch.optim.Optimizer, schedule: Any) -> list[list[float]]:
    seen = []
    for _ in range(STEPS):
        seen.append([group["lr"] for group in optimizer.param_groups])
        assert schedule.get_last_lr() == seen[-1]
        optimizer.step()
        schedule.step()
    return seen


def case_schedule(optimizer: str, schedule: str) -> tuple[list[Any], list[Any]]:
    """Rates of a schedule that was there before momentum mode, and of one that came after."""
    import gradferry
    from gradferry.integrations.momentum import take_momentum

    results = []
    for early in (True, False):
        ddp, state = attached()
        weights = [p for p in ddp.parameters() if p.dim() > 1]
        biases = {"params": [p for p in ddp.parameters() if p.dim() == 1], "lr": 0.02}
        made = getattr(torch.optim, optimizer)(
            [{"params": weights}, biases], **OPTIMIZERS[optimizer]
        )
        if early:
            planned = SCHEDULES[schedule](made)
            take_momentum(made, [planned], state)
            take_momentum(made, [planned], state)  # has no momentum any more
        else:
            gradferry.optim.momentum_mode(made, state)
            planned = SCHEDULES[schedule](made)
        others = ("params", "lr")
        settings = [{k: v for k, v in g.items() if k not in others} for g in made.param_groups]
        results.append((rates(made, planned), settings))
    return results[0], results[1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_schedule_that_was_there_goes_on_as_one_made_in_momentum_mode(
    worlds: Worlds, optimizer: str, schedule: str
) -> None:
    ((early, late),) = worlds(1).run(case_schedule, optimizer=optimizer, schedule=schedule)
    for mine, expected in zip(early[0], late[0], strict=True):
        # A product of three numbers in another order: two roundings of fp64 each.
        assert mine == pytest.approx(expected, rel=1e-15)
    assert early[1] == late[1]


def case_left_alone() -> list[dict[str, Any]]:
    """Settings of optimizers that need no change, and of one without momentum mode."""
    from gradferry.integrations.momentum import take_momentum

    found = []
    for momentum, betas in ((0.8, (0.0, 0.99)), (None, (0.9, 0.99))):
        ddp, state = attached(momentum=momentum)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, betas=betas)
        planned = SCHEDULES["step"](optimizer)
        take_momentum(optimizer, [planned], state)
        group = optimizer.param_groups[0]
        found.append({name: group[name] for name in ("lr", "initial_lr", "betas")})
    return found


def test_an_optimizer_without_momentum_of_its_own_is_left_as_it_is(worlds: Worlds) -> None:
    ((by_hand, plain),) = worlds(1).run(case_left_alone)
    assert by_hand == {"lr": 0.01, "initial_lr": 0.01, "betas": (0.0, 0.99)}
    assert plain == {"lr": 0.01, "initial_lr": 0.01, "betas": (0.9, 0.99)}


def case_refused() -> list[Outcome]:
    from gradferry.integrations.momentum import take_momentum

    def take(codec: str, plan: Callable[[torch.optim.Optimizer], Any]) -> None:
        ddp, state = attached(codec)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        take_momentum(optimizer, [plan(optimizer)], state)

    return [
        attempt(lambda: take("q4", lambda o: lr_scheduler.CosineAnnealingLR(o, 5, eta_min=1e-4))),
        attempt(lambda: take("q4", lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1))),
        attempt(lambda: take("topk:ratio=0.1", SCHEDULES["step"])),
    ]


def test_schedules_that_cannot_follow_are_refused(world_of_2: World) -> None:
    for least, cyclic, divided in world_of_2.run(case_refused):
        assert {least.error, cyclic.error, divided.error} == {"ConfigError"}
        assert "CosineAnnealingLR has rates that do not follow" in least.text
        assert "CyclicLR" in cyclic.text
        assert "several momenta" in divided.text


def case_metrics() -> list[dict[str, float]]:
    from gradferry.integrations.metrics import Metrics

    ddp, state = attached(momentum=None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    metrics, rows = Metrics(state), []
    state.on_step(rows.append)
    for _ in range(3):
        ddp(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    taken = [metrics.take(), metrics.take()]
    return [*taken, {"bytes": rows[1]["wire_bytes"], "ms": sum(r["exposed_ms"] for r in rows) / 3}]


def test_metrics_are_means_since_they_were_taken(world_of_2: World) -> None:
    for means, nothing, expected in world_of_2.run(case_metrics):
        assert means["gradferry/wire_bytes"] == expected["bytes"] > 0
        assert means["gradferry/exposed_ms"] == pytest.approx(expected["ms"], rel=1e-12)
        assert nothing == {}


def case_checkpoint(folder: str, on_resize: str, save: bool) -> Outcome:
    import torch.distributed as dist
    from gradferry.integrations import checkpoints

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
    next((tmp_path / "gradferry").glob("rank-1-*.pt")).unlink()
    for outcome in run(2, "strict"):
        assert outcome.error == "StateError"
        assert "rank 1: " in outcome.text
        assert "lacks rank-1-" in outcome.text


def case_without_gradferry_or_folder(folder: str) -> list[Outcome]:
    """Loads, in momentum mode, what was saved without; what other code saved; and a folder that
    only the first rank sees.
    """
    import torch.distributed as dist
    from gradferry import checkpoint
    from gradferry.integrations import checkpoints

    ddp, state = attached()

    def load(name: str) -> Outcome:
        path = Path(folder, name)
        return attempt(lambda: checkpoints.load(path, state, ddp.process_group, "drop"))

    checkpoint.save(Path(folder, "foreign"), {"other": 1})
    mine = "seen" if dist.get_rank() == 0 else "nowhere"
    checkpoint.save(Path(folder, "seen"), {"hook": state.state_dict()})
    return [load("missing"), load("foreign"), load(mine)]


def test_checkpoint_that_would_train_wrongly_is_one_error_on_all_ranks(
    world_of_2: World, tmp_path: Path
) -> None:
    answers = world_of_2.run(case_without_gradferry_or_folder, folder=str(tmp_path))
    for outcomes in answers:
        assert [outcome.error for outcome in outcomes] == ["StateError"] * 3
        missing, foreign, unseen = (outcome.text for outcome in outcomes)
        assert "attach without momentum=" in missing
        assert "not saved by an integration of gradferry" in foreign
        assert "rank 1 cannot see" in unseen


def case_gather() -> tuple[bool, bool]:
    """Whether the first rank has what all ranks saved, to the bit, and the others nothing."""
    from unittest import mock

    from gradferry import checkpoint
    from gradferry.integrations import checkpoints

    ddp, state = attached("sign1")
    ddp(torch.randn(4, 64)).sum().backward()
    with mock.patch.object(checkpoints, "_PIECE", 1000):  # several, and no multiple
        got = checkpoints.gather(state, ddp.process_group)
    everything: list[Any] = [None] * state.world_size
    torch.distributed.all_gather_object(everything, state.state_dict())
    if state.rank != 0:
        return got is None, True
    assert got is not None
    expected = checkpoint.merge(everything)
    slots = [key for key in expected if key.startswith("slot_")]
    equal = all(
        torch.equal(got[slot][name], expected[slot][name])
        for slot in slots
        for name in expected[slot]
    )
    return got.keys() == expected.keys(), equal and len(slots) == state.world_size


def test_gathered_states_are_those_of_all_ranks(world_of_3: World) -> None:
    assert world_of_3.run(case_gather) == [(True, True)] * 3


def case_alone() -> list[Outcome]:
    from gradferry.integrations.models import find_ddp

    model = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="the host trains with a single process"):
        assert find_ddp(model, "the host", 1, None) is None
    ddp = DistributedDataParallel(model)
    compiled = nn.Module()
    compiled._orig_mod = ddp  # as torch.compile names it
    assert find_ddp(compiled, "the host", 1, None) is ddp
    return [
        attempt(lambda: find_ddp(model, "the host", 1, 0.9)),
        attempt(lambda: find_ddp(model, "the host", 2, None)),
    ]


def test_model_without_ddp_is_an_error_or_a_warning(worlds: Worlds) -> None:
    ((momentum, several),) = worlds(1).run(case_alone)
    assert momentum.error == several.error == "ConfigError"
    assert "momentum=0.9 is for a hook" in momentum.text
    assert "the host trains with Linear" in several.text


@pytest.mark.parametrize(
    ("name", "trainers"),
    [("transformers", ["transformers"]), ("lightning", ["lightning.pytorch", "pytorch_lightning"])],
)
def test_missing_trainer_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, trainers: list[str]
) -> None:
    import gradferry

    for trainer in trainers:
        monkeypatch.setitem(sys.modules, trainer, None)
    monkeypatch.delitem(sys.modules, f"gradferry.integrations.{name}", raising=False)
    with pytest.raises(gradferry.ConfigError, match=rf'pip install "gradferry\[{name}\]"'):
        importlib.import_module(f"gradferry.integrations.{name}")
