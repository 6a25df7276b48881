"""doctor and codec="auto" where ranks share nodes, on the fake device: both exchanges are measured,
and one of them is chosen.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from gradferry.core.nodes import Nodes
from gradferry.forecast.buckets import CodecTraffic
from gradferry.forecast.hook_names import hook_config
from scenario import Scenario, Weight
from test_choice import case_forced, case_given, equal
from test_choice_of_exchange import assert_nothing_lost, case_withheld
from test_device_forecast import (
    LAYER_S,
    LAYERS,
    WIDTH,
    Prices,
    case_auto,
    case_doctor,
    case_measured,
    group_without_cpu,
    priced,
    small_measurements,
)
from world import World

Worlds = Callable[[int], World]
Members = tuple[tuple[int, ...], ...]

EVEN: Members = ((0, 1), (2, 3))
UNEVEN: Members = ((0, 1), (2,))
NEAR = 1 / 64  # of what a byte takes, what one between siblings takes
PRICES = Prices(byte_sent=8e-9)  # 1 Gb/s


@pytest.fixture
def worlds(device_worlds: Worlds) -> Worlds:
    return device_worlds


@contextlib.contextmanager
def on_nodes(members: Members, near: float = NEAR) -> Iterator[None]:
    """As if ranks were found on these nodes, with a faster link between siblings."""
    from gradferry.core import engine
    from gradferry.forecast import diagnosis
    from gradferry.reduction import start

    make = engine._new_device_backend

    def made(*arguments: Any) -> Any:
        backend = make(*arguments)
        if "/siblings/" in arguments[-1]:
            backend.set_byte_share(near)
        return backend

    nodes = Nodes(members)
    with (
        mock.patch.object(start, "resolve", return_value=nodes),
        mock.patch.object(diagnosis, "found_nodes", return_value=nodes),
        mock.patch.object(engine, "_new_device_backend", made),
    ):
        yield


def case_doctor_on(members: Members, **arguments: Any) -> Any:
    with on_nodes(members):
        return case_doctor(**arguments)


@pytest.fixture(scope="module")
def found(device_worlds: Worlds) -> Any:
    """What doctor finds on two nodes of two ranks."""
    arguments = {"prices": PRICES, "layer_s": LAYER_S, "hooks": ["torch:fp32", "q4", "exact"]}
    first, *others = device_worlds(4).run(case_doctor_on, members=EVEN, **arguments)
    assert all(other == first for other in others)
    return first


def test_doctor_measures_both_exchanges(found: Any) -> None:
    prices = PRICES
    two_level, flat = found.costs  # the last is the one that attach takes
    assert (two_level.nodes.members, flat.nodes.is_flat) == (EVEN, True)
    assert flat.node is flat.link.local is None
    local = two_level.link.local
    for costs, others, share in (
        (flat.link.scatter, 3, 1),
        (flat.link.gather, 3, 1),
        (two_level.link.scatter, 1, 1),
        (two_level.link.gather, 1, 1),
        (local.scatter, 1, NEAR),
        (local.forward, 1, NEAR),
    ):
        assert costs.in_line
        assert [num_bytes for num_bytes, _ in costs.occupied.points] == [
            others * size for size in (64, 16 << 10, 64 << 10)
        ]
        for num_bytes, seconds in costs.occupied.points:
            expected = prices.collective + share * num_bytes * prices.byte_sent
            assert seconds == pytest.approx(expected)
    assert not local.shares_memory
    assert two_level.link.engine.value == "streams"


def test_the_verdict_says_how_to_attach_it(found: Any) -> None:
    assert found.verdict.startswith("Use q4 (two-level): q4 (two-level) takes ")
    assert found.verdict.endswith(
        "the best without gradferry; for this exchange attach with nodes=2."
    )


def test_doctor_times_the_kernels_of_siblings(found: Any) -> None:
    # What they touch per element of 4 bytes; besides, there are 24 bytes per tile of 4096 elements
    # and 64 + 16 per message, at most 1 % of the rest.
    node, prices = found.costs[0].node, PRICES
    assert node.pack_per_element == pytest.approx(2 * 4 * prices.byte, rel=0.01, abs=0)
    assert node.sum_per_element == pytest.approx((2 + 1) * 4 * prices.byte, rel=0.01, abs=0)
    assert node.pack_launch == pytest.approx(prices.launch, rel=0.01)
    assert node.sum_launch == pytest.approx(prices.launch, rel=0.01)


def test_every_chunk_pays_for_both_launches(found: Any) -> None:
    whole = found.costs[0]
    free = dataclasses.replace(whole.node, pack_launch=0.0, sum_launch=0.0)
    traffic = CodecTraffic(hook_config("q4"), found.parameters, whole.nodes)
    cut = traffic.cut([[index] for index in range(LAYERS)])
    costs = (whole, dataclasses.replace(whole, node=free))
    for bucket in zip(*(traffic.cost(cut, each) for each in costs), strict=True):
        for paid, unpaid in zip(*bucket, strict=True):
            pack_s = unpaid.local.pack_s + whole.node.pack_launch
            sum_s = unpaid.local.sum_s + whole.node.sum_launch
            assert (paid.local.pack_s, paid.local.sum_s) == pytest.approx((pack_s, sum_s))


def test_doctor_reduces_a_message_of_every_node(found: Any) -> None:
    (of_two, of_four) = (
        {str(kind.codec): cost for kind, cost in costs.codecs.items()} for costs in found.costs
    )
    # Messages to reduce and one to send, of 4 bytes per element: 2 + 1 against 4 + 1.
    ratio = of_two["exact"].reduce_per_element / of_four["exact"].reduce_per_element
    assert ratio == pytest.approx(3 / 5, rel=0.01)


def test_tables_show_nodes_of_a_device(found: Any) -> None:
    from gradferry_lab.doctor import doctor_rows, doctor_tables

    rows = doctor_rows(found, "own", {"link": "as it is"})
    (node,) = (row for row in rows if row["kind"] == "node")
    assert (node["exchange"], node["ranks_per_node"]) == ("two-level", [2, 2])
    assert node["pack_launch_us"] == pytest.approx(4, rel=0.01)
    assert node["sum_launch_us"] == pytest.approx(4, rel=0.01)
    notes = " ".join(note for table in doctor_tables(rows) for note in table.notes)
    assert "2 nodes, whose sums are encoded" in notes
    assert "sockets" not in notes


def case_measured_on(members: Members, hook: str) -> list[float]:
    """Seconds of each of some steps with two levels."""
    with on_nodes(members):
        return case_measured(PRICES, LAYER_S, hook, nodes=len(members[0]))


def assert_as_predicted(seconds: float, predicted: float) -> None:
    # As for the flat exchange: not foreseen are single kernels, and when DDP copies its buckets.
    copy = PRICES.launch + 2 * 4 * WIDTH**2 * PRICES.byte
    assert predicted - LAYERS * copy - 3 * PRICES.launch <= seconds
    assert seconds <= predicted + 3 * PRICES.launch


@pytest.mark.parametrize("hook", ["exact", "q4"])
def test_steps_of_two_levels_take_the_time_that_was_predicted(
    worlds: Worlds, found: Any, hook: str
) -> None:
    steps = worlds(4).run(case_measured_on, members=EVEN, hook=hook)[0]
    (predicted,) = (p for p in found.predictions if (p.hook, p.exchange) == (hook, "two-level"))
    assert_as_predicted(steps[-1], predicted.seconds)
    assert predicted.exposed_s > 50e-6


def test_uneven_nodes_are_measured_through_the_host(worlds: Worlds) -> None:
    arguments = {"prices": PRICES, "layer_s": LAYER_S, "hooks": ["q4"], "kind": "staged"}
    first, *others = worlds(3).run(case_doctor_on, members=UNEVEN, **arguments)
    assert all(other == first for other in others)
    two_level, flat = found = first.costs
    assert [costs.link.engine.value for costs in found] == ["staged", "staged"]
    assert two_level.nodes.members == UNEVEN
    local = two_level.link.local
    for costs in (two_level.link.scatter, local.scatter, local.forward, flat.link.gather):
        # By the host's clock: real seconds of loopback.
        assert all(seconds > 0 for _, seconds in costs.occupied.points)
    assert {p.exchange for p in first.predictions if p.hook == "q4"} == {"flat", "two-level"}


def case_auto_on(members: Members, near: float, kind: str, has_cpu: bool = True) -> Any:
    """has_cpu: whether the group has a backend for tensors on the CPU."""
    from gradferry.ddp import auto

    few = mock.patch.object(auto, "codecs_to_choose_from", return_value=("exact", "q4"))
    group = contextlib.nullcontext() if has_cpu else group_without_cpu()
    with on_nodes(members, near), few, group:
        return case_auto(PRICES, LAYER_S, kind)


@pytest.mark.parametrize(
    ("near", "has_cpu", "exchange"), [(NEAR, False, "two-level"), (1.0, True, "flat")]
)
def test_auto_takes_the_faster_exchange(
    worlds: Worlds, near: float, has_cpu: bool, exchange: str
) -> None:
    # Siblings exchange whole gradients: where a byte between them takes as long as any other, the
    # flat exchange sends less.
    answers = worlds(4).run(case_auto_on, members=EVEN, near=near, kind="streamed", has_cpu=has_cpu)
    assert all(answer == answers[0] for answer in answers)
    choice, steps = answers[0]
    assert choice["exchange"] == exchange
    named = f"{choice['codec']} ({exchange})"
    other = named.replace(exchange, {"flat": "two-level", "two-level": "flat"}[exchange])
    assert choice["predicted_ms"][named] < choice["predicted_ms"][other]
    assert_as_predicted(steps[-1], 1e-3 * choice["predicted_ms"][named])


def test_auto_chooses_from_both_where_bytes_pass_through_the_host(worlds: Worlds) -> None:
    answers = worlds(3).run(case_auto_on, members=UNEVEN, near=1.0, kind="staged")
    first, *others = (choice for choice, _ in answers)
    assert all(other == first for other in others)
    assert {"off", "q4 (flat)", "q4 (two-level)"} <= set(first["predicted_ms"])
    assert first["exchange"] in ("flat", "two-level")


# --- a change of the exchange ---------------------------------------------------------------------

WEIGHTS = (Weight("first", (60, 100)), Weight("bias", (77,)), Weight("second", (90, 110)))
SCENARIO = Scenario(WEIGHTS, 4, codec="auto", ddp={"bucket_cap_mb": 0.02})


@pytest.mark.parametrize("device", ["streamed", "staged"])
def test_all_ranks_of_a_device_change_the_exchange_at_the_same_step(
    worlds: Worlds, device: str
) -> None:
    scenario = dataclasses.replace(SCENARIO, device=device)
    told = ["q4 two-level", "q4 flat"]  # at steps 3 and 7
    world = worlds(4)
    arguments = {"scenario": scenario, "answers": told, "found": EVEN}
    answers = world.run(case_forced, steps=5, **arguments)
    chosen = dataclasses.replace(scenario, codec="q4", options={"nodes": 2})
    given = world.run(case_given, scenario=chosen, begin=3, steps=5, found=EVEN)
    assert len({tuple(answer["hashes"]) for answer in answers}) == 1
    for answer, after in zip(answers, given, strict=True):
        assert equal(answer["gradients"][3:], after)
        assert (answer["choice"]["codec"], answer["choice"]["exchange"]) == ("q4", "two-level")
        assert "exchange: two levels, 2 nodes" in answer["text"]
        assert answer["stats"]["local_bytes"] > 0


@pytest.mark.parametrize("device", ["streamed", "staged"])
def test_what_workers_withheld_stays_when_the_exchange_of_a_device_changes(
    worlds: Worlds, device: str
) -> None:
    scenario = dataclasses.replace(SCENARIO, world_size=3, device=device, error_feedback="both")
    names = ["two-level", "flat", "two-level"]
    answers = worlds(3).run(case_withheld, scenario=scenario, options=names)
    assert_nothing_lost(answers)


# --- a backend that has no stream of its own ------------------------------------------------------


def case_in_line() -> list[float]:
    """Seconds of a group's all-to-alls that run on the stream from which they are posted."""
    import fake_device
    from gradferry.core.device import load_kernels, transport_of
    from gradferry.core.nodes import Exchange, flat
    from gradferry.forecast.measure_device_link import DeviceLinkProbe

    load_kernels(fake_device.DEVICE.type)
    group = fake_device.group("streamed")
    backend = fake_device.backends["streamed"]
    backend.set_in_line(True)
    try:
        with priced(PRICES), small_measurements():
            transport = transport_of(fake_device.DEVICE, group)
            probe = DeviceLinkProbe(group, transport, [Exchange(flat(2), "")])
            (costs,) = probe.measure([torch.float32], 0.01)
    finally:
        backend.set_in_line(False)
    assert fake_device.machine.races() == []
    points = costs.scatter.occupied.points
    return [seconds - num_bytes * PRICES.byte_sent for num_bytes, seconds in points]


def test_a_collective_without_a_work_is_measured(worlds: Worlds) -> None:
    for latencies in worlds(2).run(case_in_line):
        assert latencies == pytest.approx([PRICES.collective] * len(latencies))
