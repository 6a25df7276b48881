"""check_every: ranks whose parameters differ find out, all of them, in the same step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from forging import FORGER, WEIGHTS, WORLD_SIZE, Forger
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from scenario import Run, Scenario, Weight
from stepping import flip_last_bit
from world import World

Worlds = Callable[[int], World]

KINDS = (
    Weight("first", (90, 70)),
    Weight("bias", (51,), torch.bfloat16),
    Weight("channels", (32, 20, 3, 3), channels_last=True),
    Weight("fp64", (5, 7), torch.float64),
    Weight("complex", (7, 3), torch.complex64),
    Weight("empty", (0, 3)),
    Weight("one", (1,)),
)


def scenario_of(every: int, world_size: int = 3, native: bool = True) -> Scenario:
    options = {"check_every": every}
    ddp = {"bucket_cap_mb": 0.02}
    return Scenario(KINDS, world_size, native=native, options=options, ddp=ddp)


def case_train(
    scenario: Scenario, change: tuple[int, int, str] | None, far: bool = False
) -> list[Outcome]:
    """Steps one by one; `change` (step, rank, name) moves a parameter before a step: by one bit,
    or so far that it stays apart.
    """
    run = Run(scenario)
    outcomes = []
    for step in range(10):
        if change is not None and change[:2] == (step, run.rank):
            parameter = run.model.get_parameter(change[2])
            parameter.data.add_(1) if far else flip_last_bit(parameter)
        outcomes.append(attempt(lambda step=step: run.step(step)))
    return outcomes


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("every", "world_size", "native"), [(1, 3, True), (3, 3, True), (1, 3, False), (1, 1, True)]
)
def test_equal_parameters_raise_no_alarm(
    worlds: Worlds, every: int, world_size: int, native: bool
) -> None:
    scenario = scenario_of(every, world_size, native)
    for outcomes in worlds(world_size).run(case_train, scenario=scenario, change=None):
        assert [o.error for o in outcomes] == [None] * 10


@pytest.mark.parametrize(
    ("odd", "name"), [(i % 3, w.name) for i, w in enumerate(w for w in KINDS if w.num_elements)]
)
def test_one_bit_on_one_rank_is_named_on_all(worlds: Worlds, odd: int, name: str) -> None:
    # In the step that looks: adding a gradient may round the bit away.
    answers = worlds(3).run(case_train, scenario=scenario_of(4), change=(8, odd, name))
    usual = 1 if odd == 0 else 0
    for outcomes in answers:
        assert [o.error for o in outcomes[:9]] == [None] * 8 + ["DivergedError"]
        assert f"parameter '{name}' of rank {odd} differs from that of rank {usual} at step 8" in (
            outcomes[8].text
        )
    assert len({outcomes[8].headline for outcomes in answers}) == 1


def test_nobody_looks_between_checks(worlds: Worlds) -> None:
    answers = worlds(3).run(case_train, scenario=scenario_of(4), change=(5, 1, "one"), far=True)
    for outcomes in answers:
        assert [o.error for o in outcomes[:9]] == [None] * 8 + ["DivergedError"]


@on_ranks()
def test_first_of_several_parameters_is_named() -> None:
    run = Run(scenario_of(2, world_size=2))
    run.step(0)
    run.step(1)
    if run.rank == 1:
        flip_last_bit(run.model.get_parameter("one"))
        flip_last_bit(run.model.get_parameter("channels"))
    assert "parameter 'channels' of rank 1" in attempt(lambda: run.step(2)).text


def bytes_of_steps(scenario: Scenario) -> list[int]:
    """wire_bytes after every step."""
    run = Run(scenario)
    seen = []
    for step in range(6):
        run.step(step)
        seen.append(run.state.stats()["wire_bytes"])
    return seen


@on_ranks(3)
def test_check_costs_the_documented_bytes_in_its_steps_only() -> None:
    plain, checked = (bytes_of_steps(scenario_of(every)) for every in (0, 2))
    extra = [b - a for a, b in zip(plain, checked, strict=True)]
    once = 2 * (64 + 8 * len(KINDS))
    assert extra == [0, 0, once, once, 2 * once, 2 * once]


def take_part_in_rebuild(num_parameters: int) -> None:
    """Before its second forward pass DDP broadcasts rank 0's order of parameters, their number of
    buckets behind it, then the buckets' sizes.
    """
    order = torch.empty(num_parameters + 1, dtype=torch.int32)
    dist.broadcast(order, 0)
    dist.broadcast(torch.empty(int(order[-1]), dtype=torch.int32), 0)


def case_forged(change: dict[str, int]) -> Outcome | None:
    """A second step that begins with a check to which rank 1 sends hashes of its own making."""
    scenario = Scenario(WEIGHTS, WORLD_SIZE, options={"check_every": 1})
    if dist.get_rank() == FORGER:
        forger = Forger(scenario, "parameters", change)
        forger.run()
        take_part_in_rebuild(len(WEIGHTS))
        forger.step = 1
        forger.parameters(len(WEIGHTS))
        if change:
            forger.run()
        return None
    run = Run(scenario)
    run.step(0)
    return attempt(lambda: run.step(1))


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({}, "DivergedError", "parameter 'first' of rank 1 differs"),
        ({"magic": 7}, "ProtocolError", "magic is 7, expected"),
        ({"phase": 1}, "ProtocolError", "phase is 1, expected 5"),
        ({"step": 0}, "ProtocolError", "step is 0, expected 1"),
        ({"payload_bytes": 8}, "ProtocolError", "payload bytes is 8, expected 24"),
        ({"checksum": 5}, "ProtocolError", "checksum is 0, expected 5"),
    ],
)
def test_forged_check_is_refused_by_all(
    world_of_3: World, change: dict[str, int], kind: str, text: str
) -> None:
    outcomes = [o for o in world_of_3.run(case_forged, change=change) if o is not None]
    assert [o.error for o in outcomes] == [kind] * 2
    assert len({o.headline for o in outcomes}) == 1
    assert text in outcomes[0].text
    if change:
        assert "(step 1, chunk 1, check of parameters)" in outcomes[0].text
