"""A `gradferry.DiLoCo` that was saved goes on with the same bits; damaged states change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from outcomes import attempt
from torch import nn
from training_alone import PERIOD, Training, are_equal, bits_of, of_all

STEPS = 4 * PERIOD


@pytest.mark.parametrize(
    ("device", "place", "codec"),
    [
        ("cpu", "the host", "q4"),
        ("cpu", "the host", "off"),
        ("streamed", "the host", "q4"),
        ("streamed", "the device", "q4"),
        ("staged", "the host", "q4"),
        ("staged", "the device", "q4"),
    ],
)
@on_ranks(2)
def test_saved_training_goes_on_with_the_same_bits(device: str, place: str, codec: str) -> None:
    """A state is saved in a period, on the host after each step of two, and loaded there and on
    the host.
    """
    straight = Training(device, place, codec)
    saved = []
    for step in range(STEPS):
        saved.append(straight.saved())
        straight.train(range(step, step + 1))
    for stop in range(2 * PERIOD + 1) if (device, codec) == ("cpu", "q4") else [PERIOD + 1]:
        for where in {(device, place), ("cpu", "the host")}:
            resumed = Training(*where, codec)
            resumed.train(range(1))
            resumed.load(saved[stop])
            resumed.train(range(stop, STEPS))
            assert resumed.bits() == straight.bits(), (stop, where)
    assert straight.diloco.stats()["inner_steps"] == STEPS
    assert straight.diloco.stats()["outer_steps"] == STEPS // PERIOD


@on_ranks(4)
def test_training_goes_on_with_other_ranks() -> None:
    """Four ranks, then three of them; then four, of which the last loads a state of the first."""
    three: Any = dist.new_group([0, 1, 2])
    four = Training()
    four.train(range(PERIOD + 1))
    saved = four.saved()
    if dist.get_rank() < 3:
        left = Training(group=three)
        left.load(saved, on_resize="fold")
        left.train(range(PERIOD + 1, 2 * PERIOD))
        assert are_equal(of_all(bits_of(left.model), three))
        saved = left.saved()
    of_first = of_all(saved)[0]
    again = Training()
    if dist.get_rank() < 3:
        again.load(saved, on_resize="fold")
    else:
        again.load(of_first, on_resize="drop")
    again.train(range(2 * PERIOD, 3 * PERIOD))
    assert again.diloco.stats()["outer_steps"] == 3
    assert are_equal(of_all(bits_of(again.model)))


@on_ranks(2)
def test_state_of_a_period_saves_what_the_model_cannot_say() -> None:
    """Within global_parameters() the same is saved."""
    training = Training()
    training.train(range(PERIOD + 1))
    local = training.bits()
    with training.diloco.global_parameters():
        shown = training.bits()
        tensors = training.diloco.state_dict()["global"].values()
        assert all(map(torch.equal, training.model.parameters(), tensors))
    of_diloco = [key for key in local if key.startswith("/diloco")]
    assert all(shown[key] == local[key] for key in of_diloco)
    assert shown != local
    assert training.bits() == local


# --- damaged states -------------------------------------------------------------------------------

State = dict[str, Any]
Damage = Callable[[State], Any]
FIRST = "weight"


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
    "loaded is no tensor": replaced([None] * 2, "loaded"),
    "no hashes": replaced([1], "local"),
    "other shape": replaced(torch.zeros(256, 64), "global", FIRST),
    "other dtype": replaced(torch.zeros(64, 256, dtype=torch.float64), "global", FIRST),
    "no tensor": replaced([1.0], "global", FIRST),
    "NaN": nan_at("global", FIRST),
    "another outer optimizer": of_adam,
    "outer without groups": replaced({}, "outer"),
    "outer of fewer": replaced([0], "outer", "param_groups", 0, "params"),
    "outer of other shape": replaced(torch.zeros(256, 64), *MOMENTUM),
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
    training = Training()
    training.train(range(PERIOD + 1))
    good = training.diloco.state_dict()
    training.train(range(PERIOD + 1, 2 * PERIOD + 1))
    before = training.bits()
    bad: dict[str, Any] = {name: copy.deepcopy(good) for name in DAMAGES}
    for name, damage in DAMAGES.items():
        damage(bad[name])
    for name, state in {**bad, "none": None, "a list": [], "text": "state"}.items():
        outcome = attempt(partial(training.diloco.load_state_dict, state))
        assert outcome.error == "StateError", (name, outcome)
        assert training.bits() == before, name
    unknown = attempt(lambda: training.diloco.load_state_dict(good, on_resize="shrink"))
    assert unknown.error == "ConfigError"
    assert training.bits() == before
    training.diloco.load_state_dict(good)
    assert training.diloco.stats()["inner_steps"] == PERIOD + 1
