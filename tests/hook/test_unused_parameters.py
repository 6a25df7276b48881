"""Several synced backward passes per optimizer step, each of which uses other parameters.

DDP hands over the .grad that is there, whether this pass made it or an earlier one. Where some rank
used the parameter it counts for the average; where none did nothing may change: not .grad, and no
residual.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from reference import narrow, widen
from residual_sums import reference_of
from scenario import ChosenGradients, Scenario, Weight, attach
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (
    Weight("first", (90, 70)),
    Weight("second", (3, 4099)),
    Weight("bf16", (70, 50), torch.bfloat16),
    Weight("bias", (50,)),
)
STEPS = 12


@dataclasses.dataclass
class Pass:
    """One backward pass, drawn from its numbers alone, so that every rank knows it all."""

    synced: bool
    used: np.ndarray  # [rank, weight]

    @staticmethod
    def draw(step: int, turn: int, world_size: int) -> Pass:
        rng = np.random.default_rng([step, turn, world_size])
        used = rng.random((world_size, len(WEIGHTS))) < 0.6
        used[:, rng.random(len(WEIGHTS)) < 0.3] = False  # by no rank
        used[:, -1] = True  # a pass has a loss
        return Pass(bool(rng.random() < 0.7), used)


def passes_of(step: int, world_size: int) -> list[Pass]:
    count = int(np.random.default_rng([step, world_size]).integers(1, 5))
    passes = [Pass.draw(step, turn, world_size) for turn in range(count)]
    passes[-1].synced = True
    return passes


def scenario_of(codec: str, world_size: int, *, views: bool, native: bool) -> Scenario:
    ddp = {"find_unused_parameters": True, "bucket_cap_mb": 0.02, "gradient_as_bucket_view": views}
    return Scenario(WEIGHTS, world_size, codec=codec, error_feedback="both", native=native, ddp=ddp)


def case_passes(scenario: Scenario) -> list[list[np.ndarray | None]]:
    """.grad of all parameters after every synced pass."""
    rank, model = dist.get_rank(), ChosenGradients(scenario)
    ddp = DistributedDataParallel(model, **scenario.ddp)
    attach(ddp, scenario)
    seen: list[list[np.ndarray | None]] = []
    for step in range(STEPS):
        # Now and then nobody zeroes, and now and then only one optimizer of two does.
        if step % 4 != 3:
            ddp.zero_grad()
        elif step % 8 == 3:
            model.first.grad = None
        for turn, one in enumerate(passes_of(step, scenario.world_size)):
            targets = {
                w.name: w.from_flat(scenario.gradient(step, turn, rank, i))
                for i, w in enumerate(WEIGHTS)
                if one.used[rank, i]
            }
            with contextlib.nullcontext() if one.synced else ddp.no_sync():
                ddp(targets).backward()
            if one.synced:
                pairs = zip(WEIGHTS, model.parameters(), strict=True)
                seen.append([None if p.grad is None else w.to_flat(p.grad) for w, p in pairs])
    return seen


def expected_passes(scenario: Scenario) -> list[list[list[np.ndarray | None]]]:
    """[rank][synced pass][weight]: as DDP does it, with the reference in the place of the mean."""
    engine, ranks = reference_of(scenario), range(scenario.world_size)
    grads: list[list[np.ndarray | None]] = [[None] * len(WEIGHTS) for _ in ranks]
    seen: list[list[list[np.ndarray | None]]] = [[] for _ in ranks]
    used = np.zeros((scenario.world_size, len(WEIGHTS)), bool)
    for step in range(STEPS):
        for grad in grads:
            if step % 4 != 3:
                grad[:] = [None] * len(WEIGHTS)
            elif step % 8 == 3:
                grad[0] = None
        for turn, one in enumerate(passes_of(step, scenario.world_size)):
            used |= one.used
            for rank in ranks:
                for i in np.flatnonzero(one.used[rank]):
                    new = scenario.gradient(step, turn, rank, i)
                    grads[rank][i] = added(grads[rank][i], new, i)
            if not one.synced:
                continue
            anywhere = used.any(axis=0)
            handed = [
                [
                    np.zeros_like(scenario.gradient(0, 0, 0, i))
                    if not anywhere[i] or grads[rank][i] is None
                    else grads[rank][i]
                    for i in range(len(WEIGHTS))
                ]
                for rank in ranks
            ]
            averaged = engine.step(handed)
            for rank in ranks:
                for i in np.flatnonzero(anywhere):
                    grads[rank][i] = averaged[rank][i]
                seen[rank].append(list(grads[rank]))
            used[:] = False
    return seen


def added(old: np.ndarray | None, new: np.ndarray, index: int) -> np.ndarray:
    """As torch accumulates: in the gradient's dtype."""
    if old is None:
        return new
    dtype = WEIGHTS[index].real_dtype
    return narrow(widen(old, dtype) + widen(new, dtype), dtype)


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("world_size", "native"), [(2, True), (3, False), (3, True)], ids=["2", "3_python", "3"]
)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("codec", ["q4", "sign1", "topk:ratio=0.05"])
def test_passes_that_use_other_parameters_equal_the_reference(
    worlds: Worlds, codec: str, views: bool, world_size: int, native: bool
) -> None:
    scenario = scenario_of(codec, world_size, views=views, native=native)
    answers = worlds(world_size).run(case_passes, scenario=scenario)
    for rank, wanted in enumerate(expected_passes(scenario)):
        assert len(answers[rank]) == len(wanted) > STEPS
        for number, (got, want) in enumerate(zip(answers[rank], wanted, strict=True)):
            for weight, one, other in zip(WEIGHTS, got, want, strict=True):
                where = f"rank {rank}, synced pass {number}, {weight.name}"
                assert (one is None) == (other is None), where
                assert one is None or one.tobytes() == other.tobytes(), where


def case_stale(views: bool, scaled: bool) -> list[dict[str, Any]]:
    """Around a pass that does not use `first`, whose .grad holds an infinity from elsewhere."""
    import gradferry

    scenario = scenario_of("topk:ratio=0.05", 2, views=views, native=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    model = ChosenGradients(scenario)
    ddp = DistributedDataParallel(model, **scenario.ddp)
    state = gradferry.attach(
        ddp,
        scenario.codec,
        grad_scaler=scaler,
        nonfinite="propagate" if scaled else "raise",
        exact_skip=scaled,
    )
    seen = []
    for turn in range(4):
        names = ("first", "second", "bias") if turn < 2 else ("second", "bias")
        targets = {
            w.name: w.from_flat(scenario.gradient(0, turn, dist.get_rank(), i))
            for i, w in enumerate(WEIGHTS)
            if w.name in names
        }
        if turn == 3:
            with torch.no_grad():
                model.first.grad[7, 7] = math.inf
        loss = ddp(targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
        slot = state.state_dict()[f"slot_{dist.get_rank()}"]
        seen.append(
            {
                "residual": slot["worker"][:6300] / (scaler.get_scale() if scaler else 1.0),
                "grad": model.first.grad.clone(),
            }
        )
        if scaler is not None:
            scaler.update(new_scale=2.0 ** (turn + 3))
    return seen


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_what_no_rank_used_keeps_its_bits_and_is_no_infinity(
    world_of_2: World, views: bool, scaled: bool
) -> None:
    # An infinity in a .grad that nobody asks for is no reason to raise, or to take a step back.
    for seen in world_of_2.run(case_stale, views=views, scaled=scaled):
        assert seen[1]["residual"].abs().max() > 0.1
        # Residuals follow a scale that changes by powers of two, exactly.
        for later in seen[2:]:
            assert torch.equal(later["residual"], seen[1]["residual"])
        assert torch.equal(seen[2]["grad"], seen[1]["grad"])
        assert seen[3]["grad"][7, 7] == math.inf


def case_first_pass_after_attach(codec: str | None, views: bool, no_sync: bool) -> dict[str, Any]:
    """ "second" is used before attach only: in a synced pass, then perhaps under no_sync()."""
    scenario = scenario_of(codec or "exact", 2, views=views, native=True)
    rank, model = dist.get_rank(), ChosenGradients(scenario)
    ddp = DistributedDataParallel(model, **scenario.ddp)

    def backward(turn: int, *left_out: str) -> None:
        ddp(
            {
                w.name: w.from_flat(scenario.gradient(0, turn, rank, i))
                for i, w in enumerate(WEIGHTS)
                if w.name not in left_out
            }
        ).backward()

    backward(0)
    if no_sync:
        with ddp.no_sync():
            backward(1)
    before = model.second.grad.clone()
    state = attach(ddp, scenario) if codec else None
    backward(2, "second")
    slot = state.state_dict()[f"slot_{rank}"] if state else {"worker": torch.zeros(0)}
    # Of "first" come its 6300 elements, then, aligned to 16, "second".
    return {
        "before": before,
        "after": model.second.grad.clone(),
        "withheld": slot["worker"][6304 : 6304 + 3 * 4099],
    }


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_use_before_attach_is_as_ddp_knows_it(worlds: Worlds, views: bool) -> None:
    for answer in worlds(2).run(
        case_first_pass_after_attach, codec="sign1", views=views, no_sync=False
    ):
        assert torch.equal(answer["after"], answer["before"])
        assert not answer["withheld"].any()
    plain, exact = (
        worlds(2).run(case_first_pass_after_attach, codec=codec, views=views, no_sync=True)
        for codec in (None, "exact")
    )
    for one, other in zip(plain, exact, strict=True):
        assert torch.equal(one["after"], other["after"])
