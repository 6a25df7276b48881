"""GradScalers that differ between ranks, or that nobody updates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from forging import check
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from scenario import hooked, placed
from sharding import Sharding
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watching import expect_no_race
from world import World

Worlds = Callable[[int], World]
DIFFERS = "differs from rank 0 in the scale of its GradScaler at step "


# --- scales that differ ---------------------------------------------------------------------------


def case_other_at_attach() -> list[Outcome]:
    rank = dist.get_rank()
    named = {"gradient": torch.zeros(40, 40)}
    outcomes = []
    for scale in (1024.0 * (1 + rank), math.inf if rank else 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        model = nn.Linear(40, 40)
        outcomes += [
            attempt(lambda s=scaler, m=model: hooked(DistributedDataParallel(m), grad_scaler=s)),
            attempt(lambda s=scaler: gradferry.Reducer(named, "q4", grad_scaler=s)),
        ]
    return outcomes


def test_scales_that_differ_at_attach_are_refused(world_of_2: World) -> None:
    answers = world_of_2.run(case_other_at_attach)
    assert [o.text for o in answers[0]] == [o.text for o in answers[1]]
    assert [o.error for o in answers[0]] == ["RankMismatchError"] * 2 + ["ConfigError"] * 2
    for outcome in answers[0][:2]:
        assert (
            "rank 1 differs from rank 0 in scale of grad_scaler: 2048.0 instead of 1024.0"
            in outcome.text
        )
    for outcome in answers[0][2:]:
        assert "rank 1: the scale of grad_scaler is inf; it must be positive" in outcome.text


def steps_of_hook(scaler: torch.amp.GradScaler, options: dict[str, Any]) -> Callable[[], None]:
    ddp = DistributedDataParallel(nn.Linear(70, 70), **options.pop("ddp", {}))
    hooked(ddp, grad_scaler=scaler, **options)
    return lambda: scaler.scale(ddp(torch.ones(2, 70)).square().mean()).backward()


def steps_of_reducer(scaler: torch.amp.GradScaler, _: dict[str, Any]) -> Callable[[], None]:
    reducer = gradferry.Reducer({"gradient": torch.ones(70, 70)}, "q4", grad_scaler=scaler)
    return lambda: reducer.all_reduce([torch.ones(70, 70)])


def steps_of_shards(scaler: torch.amp.GradScaler, options: dict[str, Any]) -> Callable[[], None]:
    scatters = options.pop("scatters")
    sharding = Sharding(replicas=1 if scatters else 2, shards=2 if scatters else 1)
    mesh = sharding.mesh()
    model = sharding.model(mesh["shard"])
    if scatters:
        options |= {"grad_scaler": scaler, "all_gather": "off"}
        gradferry.fsdp.attach(model, "q4", **options)
    else:
        gradferry.fsdp.attach(model, "q4", mesh["replica"], grad_scaler=scaler, **options)

    def step() -> None:
        model.zero_grad()
        scaler.scale(model(sharding.targets(0, 0, dist.get_rank()))).backward()

    return step


# What trains, and the options of its hook. Where a warm-up is exact no residual is touched.
WAYS = (
    (steps_of_hook, {}),
    (steps_of_hook, {"momentum": 0.9, "warmup_steps": 9}),
    (steps_of_hook, {"ddp": {"find_unused_parameters": True}}),
    (steps_of_reducer, {}),
    (steps_of_shards, {"scatters": False}),
    (steps_of_shards, {"scatters": True}),
    (steps_of_shards, {"scatters": True, "scatter_feedback": "worker"}),
)


def case_other_later(ways: Any, other: int) -> list[Outcome]:
    """The error of each way when rank `other` alone has doubled its scale after two steps."""
    outcomes = []
    for make, options in ways:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of FSDP2's unused parameters
            step = make(scaler, dict(options))
            step()
            step()
            if dist.get_rank() == other:
                scaler.load_state_dict({**scaler.state_dict(), "scale": 2048.0})
            outcomes += [attempt(step), attempt(step)]
    return outcomes


def assert_one_error(answers: list[list[Outcome]], text: str) -> None:
    for outcomes in zip(*answers, strict=True):
        assert {outcome.error for outcome in outcomes} == {"RankMismatchError"}
        assert len({outcome.headline for outcome in outcomes}) == 1
        assert text in outcomes[0].headline
        assert "load one state into the GradScalers of all ranks" in outcomes[0].headline


@pytest.mark.torch_core
def test_scales_that_differ_are_one_error_on_all_ranks(world_of_2: World) -> None:
    answers = world_of_2.run(case_other_later, ways=WAYS, other=1)
    assert_one_error(answers, f"rank 1 {DIFFERS}2: 2048 instead of 1024")


def test_scales_that_differ_between_nodes_are_one_error_on_all_ranks(worlds: Worlds) -> None:
    ways = ((steps_of_hook, {"nodes": 2}),)
    answers = worlds(4).run(case_other_later, ways=ways, other=0)
    assert_one_error(answers, f"rank 1 {DIFFERS}2: 1024 instead of 2048")


def case_uneven(growth_interval: int) -> tuple[Outcome, float]:
    """join() with 2 and 6 inputs, then a step of both ranks; and the scale of this rank."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=growth_interval)
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    hooked(ddp, grad_scaler=scaler)

    def step() -> None:
        scaler.scale(ddp(torch.ones(2, 40)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    def train() -> None:
        with ddp.join():
            for _ in range(2 + 4 * dist.get_rank()):
                step()
        step()

    return attempt(train), scaler.get_scale()


def test_a_scale_that_changes_without_a_rank_under_join_is_an_error(world_of_2: World) -> None:
    for outcome, _ in world_of_2.run(case_uneven, growth_interval=100):
        assert outcome.error is None
    answers = world_of_2.run(case_uneven, growth_interval=4)
    assert_one_error([[outcome] for outcome, _ in answers], f"rank 1 {DIFFERS}4: 16 instead of 8")
    assert "throw_on_early_termination=True" in answers[0][0].headline
    assert [scale for _, scale in answers] == [8.0, 16.0]


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("device", "scales", "text"),
    [
        ("streamed", [1024.0, 2048.0], f"rank 1 {DIFFERS}2: 2048 instead of 1024"),
        ("staged", [1024.0, 2048.0], f"rank 1 {DIFFERS}2: 2048 instead of 1024"),
        ("streamed", [math.nan] * 2, "the scale of rank 0's GradScaler is nan at step 2"),
        ("staged", [0.0, 1024.0], "the scale of rank 0's GradScaler is 0 at step 2"),
    ],
)
@on_ranks()
def test_devices_report_scales_that_differ_two_steps_later(
    device: str, scales: list[float], text: str
) -> None:
    """A rank's scale from step 2 on."""

    place, group = placed(device)
    scaler = torch.amp.GradScaler(place.type, init_scale=1024.0)
    ddp = DistributedDataParallel(nn.Linear(70, 70).to(place), process_group=group)
    hooked(ddp, grad_scaler=scaler)

    def step() -> None:
        scaler.scale(ddp(torch.ones(2, 70, device=place)).square().mean()).backward()

    outcomes = []
    for number in range(5):
        if number == 2:
            scaler._scale.fill_(scales[dist.get_rank()])
        if number == 3:
            scaler._scale.fill_(1024.0)  # equal again: only step 2 was wrong
        outcomes.append(attempt(step))
    kind = "RankMismatchError" if DIFFERS in text else "StateError"
    assert [o.error for o in outcomes] == [None] * 4 + [kind]
    assert text in outcomes[4].headline
    expect_no_race()


@pytest.mark.parametrize("scaled", [False, True])
def test_forged_scales_are_refused(world_of_3: World, scaled: bool) -> None:
    sound = int(np.float32(2048).view(np.uint32))
    unsound = [1 << 32, 0x7FC00000, 0] if scaled else []  # more than 32 bits; NaN; none
    for scale in [sound, *unsound]:
        kind, text = check(world_of_3, "commit", {"received": scale}, scaled=scaled)
        assert kind == ("RankMismatchError" if scale == sound else "StateError")
        if scale == sound:
            assert f"rank 1 {DIFFERS}0: 2048 instead of {1024 if scaled else 0}" in text
        else:
            assert "the scale of rank 1's GradScaler is " in text
