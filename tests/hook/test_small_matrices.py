"""Under a codec below 3 bits per element, the smallest matrices travel with q4: which they are, and
what follows for averages, bytes, momentum and saved states, on every way in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry import _native
from gradferry.core.codec_spec import parse_codec
from gradferry.core.config import Config, Sized, make_config
from gradferry.core.engine import planned_bytes
from gradferry.core.parameters import ParameterLayout, describe_parameters
from gradferry.ddp.state import bound_to
from on_ranks import on_ranks
from reducing import case_reduce
from scenario import Run, Scenario, Weight, assert_bit_equal, trained
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training_alone import make
from world import World

TOPK = "topk:ratio=0.05"
# Sends with sign1 what was sent so before small matrices were an exception.
AS_BEFORE = {"min_dims": 2, "min_size": 1024, "codec": "sign1"}
# "first" and "last" have 2,400 of 100,070 elements. With "middle" it would be 6,400.
WEIGHTS = (
    Weight("first", (12, 100)),
    Weight("bias", (70,)),
    Weight("large", (468, 200)),
    Weight("middle", (80, 50)),
    Weight("last", (30, 40)),
)
SCENARIO = Scenario(WEIGHTS, codec="sign1", steps=3, options={"momentum": 0.5})


# --- which they are


def matrices(*sizes: int, names: str = "abcdefgh") -> list[Sized]:
    return [Sized(name, 2, size, size) for name, size in zip(names, sizes, strict=False)]


def small_of(
    parameters: Sequence[Sized], codec: str = "sign1", **options: Any
) -> tuple[str, list[str]]:
    """Names of those with q4, in one word, and the codecs of all."""
    chosen = make_config(codec, options).codecs_of(parameters)
    for each in chosen:
        assert each.is_small == (str(each.codec) == "q4" != codec)
    names = [p.name for p, own in zip(parameters, chosen, strict=True) if own.is_small]
    return "".join(names), [str(each.codec) for each in chosen]


@pytest.mark.parametrize(
    ("sizes", "small"),
    [
        ((97_000, 3_000), "b"),  # 3 % exactly
        ((96_999, 3_000), ""),
        ((97_001, 3_000), "b"),
        ((3_000, 200_000, 1_500, 1_400), "acd"),  # of 205,900, 5,900 are 2.9 %
        ((3_000, 190_000, 1_500, 1_400), "cd"),  # of 195,900, 5,900 are 3.01 %
        ((1_500, 1_500, 97_000, 1_500), ""),  # of equal ones all or none
        ((1_500, 1_200, 97_000, 1_500), "b"),
        ((1_500, 1_500, 150_000, 1_500), "abd"),
        ((97_000, 1_200, 1_100, 1_100), "cd"),
        ((500_000,), ""),  # one is all there is
        ((250_000, 250_000), ""),
        ((), ""),
    ],
)
def test_the_smallest_matrices_within_3_percent_are_small(
    sizes: tuple[int, ...], small: str
) -> None:
    assert small_of(matrices(*sizes))[0] == small


def test_what_is_sent_as_it_is_counts_among_all_elements_only() -> None:
    others = [
        Sized("vector", 1, 90_000, 90_000),
        Sized("tiny", 2, 1_023, 1_023),
        Sized("double", 2, 2_000, 2_000, is_compressible=False),
    ]
    matrix, large = Sized("m", 2, 3_000, 3_000), Sized("large", 2, 5_000, 5_000)
    names, codecs = small_of([*others, matrix, large])
    assert names == "m"
    assert codecs == ["exact"] * 3 + ["q4", "sign1"]


def test_a_rule_comes_first_and_leaves_the_share_to_others() -> None:
    parameters = matrices(1_050, 2_000, 2_900, 97_000)
    assert small_of(parameters)[0] == "ab"
    by_rules = small_of(parameters, rules=[{"name": "a", "codec": "sign1"}])
    assert by_rules == ("b", ["sign1", "q4", "sign1", "sign1"])
    by_rules = small_of(parameters, rules=[{"name": "[ab]", "codec": "q8"}])
    assert by_rules == ("c", ["q8", "q8", "q4", "sign1"])


def test_a_rule_for_all_matrices_turns_it_off() -> None:
    parameters = [*matrices(1_100, 97_000), Sized("bias", 1, 50, 50), Sized("tiny", 2, 50, 50)]
    by_rules = small_of(parameters, rules=[AS_BEFORE])
    assert by_rules == ("", ["sign1", "sign1", "exact", "exact"])


def test_codecs_below_3_bits_alone_have_small_matrices() -> None:
    parameters = matrices(1_100, 97_000)
    codecs = [*(str(row["name"]) for row in _native.codecs()), "off", "rht:bits=2", "rht:bits=3"]
    found = {codec for codec in codecs if small_of(parameters, codec)[0]}
    assert found == {"sign1", "topk", "rht:bits=2"}
    # A rule with such a codec changes nothing for the others.
    assert small_of(parameters, "q8", rules=[{"name": "b", "codec": "sign1"}])[0] == ""


@pytest.mark.parametrize(
    ("codec", "warmup", "small", "large"),
    [
        ("sign1", "exact", ("q4", "exact"), ("sign1", "exact")),
        ("sign1", "q8", ("q4", "q8"), ("sign1", "q8")),
        ("sign1", "rht:bits=2", ("q4", "q4"), ("sign1", "rht:bits=2")),
        ("q8", "sign1", ("q8", "q4"), ("q8", "sign1")),
        ("q8", "bf16", ("q8", "bf16"), ("q8", "bf16")),
    ],
)
def test_a_compressed_warmup_has_small_matrices_too(
    codec: str, warmup: str, small: tuple[str, str], large: tuple[str, str]
) -> None:
    config = make_config(codec, {"warmup_steps": 2, "warmup": warmup})
    parameters = [*matrices(1_100, 97_000), Sized("bias", 1, 50, 50)]
    found = [(str(each.codec), str(each.warmup)) for each in config.codecs_of(parameters)]
    asked = str(parse_codec(codec)), str(parse_codec(warmup))
    large = tuple(str(parse_codec(each)) for each in large)
    assert found == [small, large, ("exact", "exact")]
    marks = [each.is_small for each in config.codecs_of(parameters)]
    assert marks == [small != asked, False, False]
    rules = [{"name": "a", "codec": "sign1"}]
    ruled = make_config(codec, {"warmup_steps": 2, "warmup": warmup, "rules": rules})
    assert ruled.codecs_of(parameters)[0].warmup == config.warmup


def test_shards_of_a_parameter_are_one_matrix_and_have_its_size() -> None:
    # On each of two ranks. "a" has one row, and so one rank has padding alone.
    pieces = [
        Sized("a", 2, 2_400, 2_400),
        Sized("b", 2, 1_300, 2_500),
        Sized("c", 2, 49_000, 98_000),
    ]
    assert small_of(pieces * 2) == ("aa", ["q4", "sign1", "sign1"] * 2)


def layouts(config: Config) -> dict[str, ParameterLayout]:
    named = [(w.name, torch.empty(w.shape)) for w in WEIGHTS]
    return {p.name: p for p in describe_parameters(named, config, exchanges=True)}


@pytest.mark.parametrize("feedback", ["none", "owner", "worker", "both", "auto"])
@pytest.mark.parametrize("codec", ["sign1", TOPK, "rht:bits=2"])
def test_small_matrices_have_the_residuals_of_others(codec: str, feedback: str) -> None:
    found = layouts(make_config(codec, {"error_feedback": feedback}))
    assert [name for name, each in found.items() if each.is_small] == ["first", "last"]
    assert found["first"].residuals == found["large"].residuals


def test_the_momentum_of_small_matrices_is_that_of_q4() -> None:
    config = make_config(TOPK, {"momentum": 0.5})
    shares = {name: config.momentum_share(each.codec) for name, each in layouts(config).items()}
    assert shares["first"] == shares["last"] == 1.0
    assert shares["large"] == shares["middle"] > 1.5


# --- every way in


def case_train(scenario: Scenario) -> dict[str, Any]:
    run = Run(scenario)
    answer = trained(run)
    config, stats = run.state.config, run.state.stats()
    by_rank = planned_bytes(
        config, run.state.parameters, run.state.nodes, stats["step_buckets"], hosts=range(2)
    )
    planned = by_rank[run.rank][0]
    return {**answer, "text": str(run.state), "planned": planned, "sent": stats["wire_bytes"]}


LINE = "  q4 instead of {}, as the smallest matrices (at most 3 % of all elements): first, last"


@pytest.mark.parametrize("codec", ["sign1", TOPK])
def test_averages_and_bytes_are_those_of_both_codecs(world_of_2: World, codec: str) -> None:
    scenario = dataclasses.replace(SCENARIO, codec=codec)
    answers = world_of_2.run(case_train, scenario=scenario)
    assert_bit_equal(answers, scenario)
    canonical = str(parse_codec(codec))
    for answer in answers:
        assert answer["sent"] == scenario.steps * answer["planned"]
        assert LINE.format(canonical) in answer["text"].splitlines()
        assert "  q4: 2 parameters, 2,400 elements (2.4%), 4.28 bits/element" in answer["text"]
        assert f"  {canonical}: 2 parameters, 97,600 elements (97.5%)" in answer["text"]


def test_averages_of_a_warmup_are_those_of_both_codecs(world_of_2: World) -> None:
    options = {"momentum": 0.5, "warmup_steps": 2, "warmup": "sign1"}
    scenario = dataclasses.replace(SCENARIO, codec="q4", options=options, steps=4)
    answers = world_of_2.run(case_train, scenario=scenario)
    assert_bit_equal(answers, scenario)
    assert LINE.format("sign1") in answers[0]["text"].splitlines()


def test_a_reducer_averages_like_the_reference(world_of_2: World) -> None:
    assert_bit_equal(world_of_2.run(case_reduce, scenario=SCENARIO), SCENARIO)


@on_ranks()
def test_outer_steps_have_small_matrices() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Parameter(torch.zeros(200, 250))
            self.last = nn.Parameter(torch.zeros(30, 40))

    _, diloco = make(Two(), "sign1")
    assert codecs_of(diloco._reducer) == {"large": "sign1", "last": "q4"}
    assert "q4 instead of sign1" in str(diloco)


def codecs_of(state: Any) -> dict[str, str]:
    return {p.name: str(p.codec) for p in state.parameters}


class Sharded(nn.Module):
    """Of the two smallest, "rows" has more elements on a rank, with padding, and fewer in all."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(500, 200))
        self.wide = nn.Parameter(torch.zeros(10, 290))
        self.rows = nn.Parameter(torch.zeros(1, 2_000))
        self.tiny = nn.Parameter(torch.zeros(20, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((p * x).sum() for p in self.parameters())


@on_ranks(4)
def test_whole_parameters_decide_under_fsdp2() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Sharded()
    fully_shard(model, mesh=mesh["shard"])
    state = gradferry.fsdp.attach(
        model,
        "sign1",
        mesh["replica"],
        reduce_scatter=TOPK,
        scatter_feedback="worker",
        all_gather="q8",
    )
    topk = str(parse_codec(TOPK))
    for each, coarse, gathered in zip(state._attached, ("sign1", topk, "q8"), "001", strict=True):
        small = "q8" if gathered == "1" else "q4"
        expected = {"large": coarse, "wide": coarse, "rows": small, "tiny": "exact"}
        assert codecs_of(each.running) == expected
    lines = [line for line in str(state).splitlines() if "smallest matrices" in line]
    assert [line.split(": ")[-1] for line in lines] == ["rows", "rows"]
    # q4 has the largest number of a block exactly if it is 6 times a number of E4M3.
    model(torch.tensor(6.0 + 12.0 * (dist.get_rank() // 2))).backward()
    rows = model.rows.grad.to_local()
    assert torch.equal(rows, torch.full_like(rows, 12.0))


# --- codec="auto"


@on_ranks()
def test_a_change_of_the_codec_rescales_what_has_another_momentum() -> None:
    """Worker residuals under sign1, then topk, then sign1 again."""
    scenario = dataclasses.replace(SCENARIO, codec="auto", options={"momentum": 0.5})
    run = Run(scenario)
    bound = bound_to(run.state)
    seen = []
    for number, codec in enumerate(("sign1", TOPK, "sign1")):
        bound.running.switch(bound.hook, parse_codec(codec), min(number, 1))
        assert codecs_of(run.state)["first"] == "q4"
        assert not bound.running.loses_under(parse_codec("q4"))
        if number == 0:
            run.step(0)
        worker = bound.running.engine.state()[1]
        by_name = {}
        for tile in bound.running.tiles():
            part = worker[tile.worker_offset : tile.worker_offset + tile.num_elements]
            by_name.setdefault(run.state.parameters[tile.parameter].name, []).append(part)
        seen.append({name: torch.cat(parts) for name, parts in by_name.items()})
    sign1, topk, again = seen
    for name in ("first", "last"):
        assert sign1[name].any()
        assert torch.equal(sign1[name], topk[name])
        assert torch.equal(sign1[name], again[name])
    share = 2 / (1 + 1 / 5.75)  # see SHARE in test_auto_residuals.py
    torch.testing.assert_close(topk["large"], sign1["large"] * share, rtol=2.0**-22, atol=0)


# --- saved states


def test_a_state_with_small_matrices_goes_on_to_the_bit_and_in_another_world(
    worlds: Callable[[int], World],
) -> None:
    answers = worlds(2).run(case_resume, scenario=SCENARIO)
    assert all(same for same, _ in answers)
    alone = dataclasses.replace(SCENARIO, world_size=1)
    saved = [state for _, state in answers]
    worlds(1).run(case_load, scenario=alone, saved=saved)


def case_resume(scenario: Scenario) -> tuple[bool, dict[str, Any]]:
    straight, before = Run(scenario), Run(scenario)
    expected = [straight.step(step) for step in range(3)][2]
    for step in range(2):
        before.step(step)
    state = before.state.state_dict()
    got = before.saved_and_loaded().step(2)
    return all((a == b).all() for a, b in zip(got, expected, strict=True)), state


def case_load(scenario: Scenario, saved: list[dict[str, Any]]) -> None:
    run = Run(scenario)
    run.state.load_state_dict(gradferry.checkpoint.merge(saved), on_resize="mean")
    assert run.state.stats()["total_steps"] == 2
