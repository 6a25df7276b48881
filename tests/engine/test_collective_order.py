"""Collectives of several communicators on one device, which proceed one at a time: NCCL promises no
more. Two levels, with three communicators, must not hang then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradferry.core import engine
from mixed import mixed, scenario_on
from scenario import Scenario, assert_bit_equal
from streaming import MANY_CHUNKS, PATIENCE, case_train, one_at_a_time
from world import World

Worlds = Callable[[int], World]


def case_ordered(scenario: Scenario, seeds: list[int]) -> dict[str, Any] | None:
    """Trains in as many orders of streams; nothing may be unordered, or wait in a circle."""
    with one_at_a_time(PATIENCE):
        return case_train(scenario, seeds)


@pytest.mark.parametrize(
    ("scenario", "num_seeds"),
    [
        pytest.param(scenario_on("2x2", MANY_CHUNKS), 2, id="2x2"),
        pytest.param(
            scenario_on("2+1", mixed(3, device="streamed"), options={"check_every": 2}),
            2,
            id="2+1, check_every",
        ),
        pytest.param(scenario_on("3x2", MANY_CHUNKS), 6, id="3x2", marks=pytest.mark.slow),
    ],
)
def test_two_levels_need_no_collectives_side_by_side(
    device_worlds: Worlds, scenario: Scenario, num_seeds: int
) -> None:
    answers = device_worlds(scenario.world_size).run(
        case_ordered, scenario=scenario, seeds=list(range(num_seeds)), seconds=300
    )
    assert_bit_equal(answers, scenario)


@pytest.mark.parametrize(
    ("device", "value", "version", "expected"),
    [
        ("cuda", "1", (2, 26, 2), True),
        ("cuda", "1", (2, 25, 1), False),
        ("cuda", "0", (2, 28, 9), False),
        ("cuda", None, (2, 28, 9), False),
        ("fake", "1", (2, 28, 9), False),
    ],
)
def test_nccl_keeps_the_order_where_it_is_asked_to_and_can(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    value: str | None,
    version: tuple[int, int, int],
    expected: bool,
) -> None:
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    if value is not None:
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert engine.starts_in_order(SimpleNamespace(type=device)) is expected


NET_NAME = 32  # where ncclConfig_t has the pointer to its network's name


@pytest.mark.skipif(
    not hasattr(dist, "ProcessGroupNCCL"), reason="this torch was built without NCCL"
)
def test_communicators_of_lanes_have_the_groups_configuration_and_their_own_strings() -> None:
    theirs = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    theirs.config.net_name, theirs.config.max_ctas = "Socket", 7
    ours = engine.nccl_options(theirs)
    assert ours.is_high_priority_stream
    assert (ours.config.net_name, ours.config.max_ctas) == ("Socket", 7)
    assert ours.config.min_ctas == theirs.config.min_ctas
    names = [
        ctypes.c_void_p.from_address(options.config.unsafe_get_ptr() + NET_NAME).value
        for options in (theirs, ours)
    ]
    assert [ctypes.string_at(name) for name in names] == [b"Socket"] * 2
    assert names[0] != names[1]
    assert not engine.nccl_options(object()).is_high_priority_stream
