"""A `gradferry.DiLoCo` that was saved goes on with the same bits; damaged states change nothing."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import of_all, on_ranks
from outcomes import attempt
from saved import LOST, NAN, damaged
from training_alone import PERIOD, Training, are_equal, bits_of
from watching import expect_no_race

STEPS = 4 * PERIOD


DEVICES = list(itertools.product(("streamed", "staged"), ("the host", "the device")))


@pytest.mark.parametrize(
    ("device", "place", "codec", "dtype"),
    [
        ("cpu", "the host", "q4", torch.float32),
        ("cpu", "the host", "off", torch.float32),
        *((*where, "q4", torch.float32) for where in DEVICES),
        *((*where, "sign1", torch.bfloat16) for where in DEVICES),
    ],
)
@on_ranks(2)
def test_saved_training_goes_on_with_the_same_bits(
    device: str, place: str, codec: str, dtype: torch.dtype
) -> None:
    """A state is saved in a period, on the host after each step of two, and loaded there and on
    the host. One of a device that is saved before the first step has the bits of the host.
    """
    straight = Training(device, place, codec, dtype)
    assert {each.device for each in straight.diloco.state_dict()["global"].values()} == {
        straight.place
    }
    saved = []
    for step in range(STEPS):
        saved.append(straight.saved())
        straight.train(range(step, step + 1))
    for stop in range(2 * PERIOD + 1) if (device, codec) == ("cpu", "q4") else [0, PERIOD + 1]:
        for where in {(device, place), ("cpu", "the host")}:
            resumed = Training(*where, codec, dtype)
            resumed.train(range(1))
            resumed.load(saved[stop])
            resumed.train(range(stop, STEPS))
            assert resumed.bits() == straight.bits(), (stop, where)
    assert straight.diloco.stats()["inner_steps"] == STEPS
    assert straight.diloco.stats()["outer_steps"] == STEPS // PERIOD
    if device != "cpu":
        expect_no_race()


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
def test_the_same_is_saved_within_global_parameters() -> None:
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

SLOT = "the slot of this rank"
# Where a state is damaged, and what is there.
DAMAGES: list[tuple[tuple[Any, ...], Any]] = [
    *(((key,), LOST) for key in ("format", "global", "outer", "outer_type", "reducer", "since")),
    (("format",), 2),
    (("inner_steps",), None),
    (("outer_steps",), True),
    (("since",), "3"),
    (("global", "weight"), LOST),
    (("global", "more"), torch.zeros(3)),
    *((("global", "weight"), value) for value in (torch.zeros(256, 64), [1.0])),
    (("global", "weight"), torch.zeros(64, 256, dtype=torch.float64)),
    (("outer_type",), "Adam"),
    (("outer",), {}),
    (("outer", "param_groups", 0, "params"), [0]),
    (("reducer", "codec"), "q8"),
    (("reducer", "world_size"), 3),
    (("reducer", SLOT), LOST),
    (("reducer", SLOT, "worker"), NAN),
    (("reducer", SLOT, "owner"), torch.zeros(16)),
]


@on_ranks(2)
def test_damaged_states_are_refused_and_change_nothing() -> None:
    training = Training()
    training.train(range(PERIOD + 1))
    good = training.diloco.state_dict()
    training.train(range(PERIOD + 1, 2 * PERIOD + 1))
    before = training.bits()
    bad = [None, [], "state"]
    for path, value in DAMAGES:
        here = [f"slot_{dist.get_rank()}" if part == SLOT else part for part in path]
        bad.append(damaged(good, (*here,), value))
    for number, state in enumerate(bad):
        outcome = attempt(partial(training.diloco.load_state_dict, state))
        assert outcome.error == "StateError", (number, outcome)
        assert training.bits() == before, number
    unknown = attempt(lambda: training.diloco.load_state_dict(good, on_resize="shrink"))
    assert unknown.error == "ConfigError"
    assert training.bits() == before
    training.diloco.load_state_dict(good)
    assert training.diloco.stats()["inner_steps"] == PERIOD + 1
