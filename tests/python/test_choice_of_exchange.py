"""codec="auto" where ranks share nodes: it chooses the exchange with the codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradferry.core.codec_spec import parse_codec
from gradferry.core.nodes import Nodes, choose_exchange, exchanges_to_choose_from, flat
from gradferry.ddp.auto import CHOSEN_BY, candidates
from gradferry.ddp.state import bound_to
from scenario import Scenario
from test_choice import AUTO, case_forced, case_given, config_of, decide, equal, predicted, run_on
from world import World

FOUND = ((0, 1), (2,))


@pytest.mark.parametrize(
    ("ms", "chosen"),
    [
        ({"q4 flat": 100, "q4 two-level": 101}, "q4 (flat)"),
        ({"q4 flat": 101, "q4 two-level": 100}, "q4 (two-level)"),
        ({"q4 flat": 100, "q8 two-level": 101}, "q8 (two-level)"),  # within 2 %, and more precise
        ({"q8 flat": 103, "q4 two-level": 100}, "q4 (two-level)"),
        ({"off": 101, "q4 two-level": 100}, "off"),
    ],
)
def test_the_exchange_is_chosen_with_the_codec(ms: dict[str, float], chosen: str) -> None:
    found, reason = decide(predicted(**ms), None)
    assert found.named == chosen
    assert f"{chosen} (" in reason


@pytest.mark.parametrize("name", ["flat", "two-level"])
def test_all_ranks_change_the_exchange_at_the_same_step(
    worlds: Callable[[int], World], name: str
) -> None:
    scenario = dataclasses.replace(AUTO, world_size=3)
    told = [f"q4 {name}"] * 3
    world = worlds(3)
    answers = world.run(case_forced, scenario=scenario, answers=told, steps=7, found=FOUND)
    other = {"flat": {"nodes": "flat"}, "two-level": {}}[name]
    chosen = dataclasses.replace(scenario, codec="q4", options=other)
    found = FOUND if name == "two-level" else ((0,), (1,), (2,))
    given = world.run(case_given, scenario=chosen, begin=3, steps=7, found=found)
    assert len({tuple(answer["hashes"]) for answer in answers}) == 1
    for answer, after in zip(answers, given, strict=True):
        assert equal(answer["gradients"][3:], after)
        assert (answer["choice"]["codec"], answer["choice"]["exchange"]) == ("q4", name)
        shown = {"flat": "flat between 3 ranks", "two-level": "two levels, 2 nodes"}[name]
        assert f"exchange: {shown}" in answer["text"]
        assert "because codec='auto' chose it" in answer["text"]


def case_withheld(scenario: Scenario, options: list[str]) -> list[np.ndarray]:
    """What of the mean is in worker residuals, by parameter element, under q4 with each exchange in
    turn, without a step between them.
    """
    run = run_on(scenario, FOUND)
    bound = bound_to(run.state)
    seen = []
    for number, name in enumerate(options):
        exchange = bound.chooser._exchange_named(name)
        bound.running.switch(bound.hook, parse_codec("q4"), min(number, 1) * 3, exchange)
        if number == 0:
            for step in range(3):
                run.step(step)
        tiles = bound.running.engine.tiles()
        _, worker, _, _ = bound.running.engine.state()
        whole = np.zeros(sum(row[1] for row in tiles), np.float32)
        begin = 0
        for _, count, offset, _ in tiles:
            if offset >= 0:
                whole[begin : begin + count] = worker[offset : offset + count]
            begin += count
        seen.append(whole / len(exchange.nodes.members))
    return seen


def test_what_workers_withheld_stays_when_the_exchange_changes(
    worlds: Callable[[int], World],
) -> None:
    scenario = dataclasses.replace(AUTO, world_size=3, error_feedback="both")
    names = ["two-level", "flat", "two-level"]
    answers = worlds(3).run(case_withheld, scenario=scenario, options=names)
    assert_nothing_lost(answers)


def assert_nothing_lost(answers: list[list[np.ndarray]]) -> None:
    """Of `case_withheld`, from two nodes to three and back."""
    before, *later = (sum(kept) for kept in zip(*answers, strict=True))
    assert before.any()
    # The means of 2 and of 3 equal numbers, and the sums of these, are rounded 5 times at most.
    for after in later:
        np.testing.assert_allclose(after, before, rtol=5 * 2.0**-24)


def case_measured_on_nodes(scenario: Scenario) -> dict[str, Any]:
    run = run_on(scenario, FOUND)
    for step in range(CHOSEN_BY + 2):
        run.step(step)
    return {"choice": run.state.stats()["choice"], "hashes": run.hashes, "text": str(run.state)}


def test_it_measures_both_exchanges_where_ranks_share_nodes(
    worlds: Callable[[int], World],
) -> None:
    answers = worlds(3).run(
        case_measured_on_nodes, scenario=dataclasses.replace(AUTO, world_size=3)
    )
    made = answers[0]["choice"]
    assert all(answer["choice"] == made for answer in answers)
    assert len({tuple(answer["hashes"]) for answer in answers}) == 1
    codecs = [name for name in candidates(config_of()) if name != "off"]
    named = {f"{codec} ({name})" for codec in codecs for name in ("flat", "two-level")}
    assert set(made["predicted_ms"]) == named | {"off"}
    assert all(ms > 0 for ms in made["predicted_ms"].values())
    assert made["exchange"] in ("flat", "two-level")


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(("option", "exchange"), [("flat", "flat"), (2, "two-level")])
def test_the_option_nodes_leaves_one_exchange_to_choose_from(
    option: str | int, exchange: str, on_host: bool
) -> None:
    found = Nodes(((0, 1), (2, 3)))
    (only,) = exchanges_to_choose_from(option, found, on_host=on_host)
    assert only.name == exchange
    both = exchanges_to_choose_from("auto", found, on_host=on_host)
    assert {each.name for each in both} == {"flat", "two-level"}
    assert both[-1] == choose_exchange("auto", found, on_host=on_host)
    for nodes in (flat(3), Nodes(((0, 1, 2),))):
        (alone,) = exchanges_to_choose_from("auto", nodes, on_host=on_host)
        assert alone.is_flat
