"""A `gradferry.DiLoCo` that was saved goes on with the same bits; damaged states change nothing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from outcomes import attempt
from resumable import fingerprints
from torch import nn
from training_alone import are_equal, of_all

SYNC_EVERY = 4
STEPS = 11


class Training:
    """A small model that AdamW trains on data of each step and rank."""

    def __init__(self, codec: str, seed: int, **changes: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.diloco = gradferry.DiLoCo(self.model, self.optimizer, SYNC_EVERY, codec, **changes)

    def train(self, steps: range) -> None:
        for step in steps:
            numbers = torch.Generator().manual_seed(100 * step + dist.get_rank())
            x = torch.randn(8, 24, generator=numbers)
            self.optimizer.zero_grad()
            (self.model(x) - x[:, :8]).square().mean().backward()
            self.optimizer.step()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "diloco": self.diloco}

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, file)
        return file.getvalue()

    def load(self, saved: bytes, on_resize: str = "strict") -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        self.diloco.load_state_dict(states["diloco"], on_resize)

    def state(self) -> dict[str, str]:
        return dict(fingerprints({name: part.state_dict() for name, part in self.parts().items()}))


@pytest.mark.parametrize(
    ("codec", "stops"), [("q4", range(2 * SYNC_EVERY + 1)), ("off", [SYNC_EVERY + 1])]
)
@on_ranks(2)
def test_saved_training_goes_on_with_the_same_bits(codec: str, stops: range | list[int]) -> None:
    straight = Training(codec, seed=0)
    saved = []
    for step in range(STEPS):
        saved.append(straight.saved())
        straight.train(range(step, step + 1))
    for stop in stops:
        resumed = Training(codec, seed=1 + stop)
        resumed.load(saved[stop])
        resumed.train(range(stop, STEPS))
        assert resumed.state() == straight.state()
        assert resumed.diloco.stats()["inner_steps"] == STEPS
        assert resumed.diloco.stats()["outer_steps"] == STEPS // SYNC_EVERY
        assert are_equal(of_all([p.tolist() for p in common_of(resumed)]))


def common_of(training: Training) -> list[torch.Tensor]:
    return list(training.diloco.state_dict()["global"].values())


@on_ranks(4)
def test_training_goes_on_with_other_ranks() -> None:
    """Four ranks, then three of them; then four, of which the last loads a state of the first."""
    three: Any = dist.new_group([0, 1, 2])
    four = Training("q4", seed=0)
    four.train(range(SYNC_EVERY + 1))
    saved = four.saved()
    if dist.get_rank() < 3:
        left = Training("q4", seed=1, group=three)
        left.load(saved, on_resize="fold")
        assert are_equal(of_all(left.state()["/diloco/outer_steps"], three))
        left.train(range(SYNC_EVERY + 1, 2 * SYNC_EVERY))
        assert are_equal(of_all([p.tolist() for p in common_of(left)], three))
        saved = left.saved()
    of_first = of_all(saved)[0]
    again = Training("q4", seed=2)
    if dist.get_rank() < 3:
        again.load(saved, on_resize="fold")
    else:
        again.load(of_first, on_resize="drop")
    again.train(range(2 * SYNC_EVERY, 3 * SYNC_EVERY))
    assert again.diloco.stats()["outer_steps"] == 3
    assert are_equal(of_all([p.tolist() for p in common_of(again)]))


@on_ranks(2)
def test_state_of_a_period_saves_what_the_model_cannot_say() -> None:
    """Within global_parameters() the same is saved."""
    training = Training("q4", seed=0)
    training.train(range(SYNC_EVERY + 2))
    local = training.state()
    with training.diloco.global_parameters():
        shown = training.state()
        assert training.model.state_dict().keys() == training.diloco.state_dict()["global"].keys()
        assert all(map(torch.equal, training.model.parameters(), common_of(training)))
    of_diloco = [key for key in local if key.startswith("/diloco")]
    assert all(shown[key] == local[key] for key in of_diloco)
    assert shown != local
    assert training.state() == local


# --- damaged states -------------------------------------------------------------------------------

State = dict[str, Any]
Damage = Callable[[State], Any]
FIRST = "0.weight"


def without(*path: str) -> Damage:
    def damage(state: State) -> None:
        del inside(state, path[:-1])[path[-1]]

    return damage


def replaced(value: Any, *path: Any) -> Damage:
    def damage(state: State) -> None:
        inside(state, path[:-1])[path[-1]] = value

    return damage


def inside(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state


def nan_at(*path: Any) -> Damage:
    def damage(state: State) -> None:
        inside(state, path).view(-1)[-1] = torch.nan

    return damage


def of_rank(damage: Callable[[str], Damage]) -> Damage:
    """Damage of what this rank has withheld."""
    return lambda state: damage(f"slot_{dist.get_rank()}")(state)


def of_adam(state: State) -> None:
    common = [nn.Parameter(each) for each in state["global"].values()]
    optimizer = torch.optim.Adam(common, lr=0.7)
    for each in common:
        each.grad = torch.ones_like(each)
    optimizer.step()
    state["outer"], state["outer_type"] = optimizer.state_dict(), "Adam"


MOMENTUM = ("outer", "state", 0, "momentum_buffer")
DAMAGES: dict[str, Damage] = {
    "no format": without("format"),
    "another format": replaced(2, "format"),
    "no common": without("global"),
    "no outer": without("outer"),
    "no type of the outer": without("outer_type"),
    "no reducer": without("reducer"),
    "no count": without("since"),
    "negative count": replaced(-1, "inner_steps"),
    "count that is true": replaced(True, "outer_steps"),
    "count that is text": replaced("3", "since"),
    "parameter missing": without("global", FIRST),
    "parameter more": replaced(torch.zeros(3), "global", "more"),
    "loaded is no list": replaced(3, "loaded"),
    "loaded of fewer": replaced([], "loaded"),
    "loaded is no tensor": replaced([None] * 4, "loaded"),
    "no hashes": replaced([1, 2], "local"),
    "other shape": replaced(torch.zeros(24, 96), "global", FIRST),
    "other dtype": replaced(torch.zeros(96, 24, dtype=torch.float64), "global", FIRST),
    "no tensor": replaced([1.0], "global", FIRST),
    "NaN": nan_at("global", FIRST),
    "another outer optimizer": of_adam,
    "outer without groups": replaced({}, "outer"),
    "outer of fewer": replaced([0], "outer", "param_groups", 0, "params"),
    "outer of other shape": replaced(torch.zeros(24, 96), *MOMENTUM),
    "NaN in the outer": nan_at(*MOMENTUM),
    "residuals of another codec": replaced("q8", "reducer", "codec"),
    "residuals of another size": replaced(3, "reducer", "world_size"),
    "no residuals": of_rank(lambda slot: without("reducer", slot)),
    "NaN in residuals": of_rank(lambda slot: nan_at("reducer", slot, "worker")),
    "short residuals": of_rank(
        lambda slot: replaced(torch.zeros(16), "reducer", slot, "owner"),
    ),
}


@on_ranks(2)
def test_damaged_states_are_refused_and_change_nothing() -> None:
    training = Training("q4", seed=0)
    training.train(range(SYNC_EVERY + 1))
    good = training.diloco.state_dict()
    training.train(range(SYNC_EVERY + 1, 2 * SYNC_EVERY + 2))
    before = training.state()
    accepted = []
    for name, damage in DAMAGES.items():
        bad = copy.deepcopy(good)
        damage(bad)
        outcome = attempt(partial(training.diloco.load_state_dict, bad))
        if outcome.error != "StateError":
            accepted.append((name, outcome))
            training.diloco.load_state_dict(good)
            before = training.state()
        assert training.state() == before, name
    assert not accepted, accepted
    others: tuple[Any, ...] = (None, [], "state")
    for other in others:
        refused = attempt(partial(training.diloco.load_state_dict, other))
        assert refused.error == "StateError"
    unknown = attempt(lambda: training.diloco.load_state_dict(good, on_resize="shrink"))
    assert unknown.error == "ConfigError"
    assert training.state() == before
    training.diloco.load_state_dict(good)
    assert training.diloco.stats()["inner_steps"] == SYNC_EVERY + 1
