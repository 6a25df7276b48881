"""Loss scaling: residuals follow the scale, and skipped steps are the same on all ranks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mixed import MIXED, NAMES
from on_ranks import on_ranks
from outcomes import attempt
from scenario import ChosenGradients, Run, Scenario, Weight, hooked
from stepping import bits, slot
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("wide", (3, 4099)))
SCENARIO = Scenario(WEIGHTS)
# A matrix and a vector of every codec.
EVERY_CODEC = Scenario(
    tuple(w for n in NAMES for w in (Weight(f"{n}_x", (41, 131)), Weight(f"{n}_bias", (50,)))),
    codec="exact",
    rules=MIXED.rules,
)


def residuals(state: Any) -> torch.Tensor:
    held = slot(state)
    return torch.cat([held["worker"], held["owner"]])


def case_scaled(scenario: Scenario, scales: list[float]) -> list[list[bytes]]:
    """Gradients of every step, unscaled. The GradScaler's scale is set before each."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
    options = {**scenario.options, "grad_scaler": scaler}
    run = Run(dataclasses.replace(scenario, options=options))
    seen = []
    for step, scale in enumerate(scales):
        if step:
            scaler.update(new_scale=scale)
        run.ddp.zero_grad()
        scaler.scale(run.ddp(run.targets(step))).backward()
        seen.append(bits(p.grad.div(scale) for p in run.model.parameters()))
    return seen


@pytest.mark.torch_core
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=["plain", "momentum"])
def test_power_of_two_scales_change_no_bit(world_of_2: World, options: dict[str, Any]) -> None:
    # No block scale, mean or sum comes near the ends of the range, so all of them just shift.
    scenario = dataclasses.replace(
        EVERY_CODEC, error_feedback="both", options=options, ddp={"bucket_cap_mb": 0.1}
    )
    constant = world_of_2.run(case_scaled, scenario=scenario, scales=[1.0] * 6)
    changing = [2.0**16, 2.0**16, 2.0**15, 2.0**3, 2.0**20, 2.0**20]
    assert world_of_2.run(case_scaled, scenario=scenario, scales=changing) == constant


@pytest.mark.parametrize(
    ("factor", "by_hand"), [(0.5, False), (3.0, False), (0.1, False), (0.0, True), (3.0, True)]
)
@on_ranks()
def test_residual_is_rescaled_exactly_for_powers_of_two_and_rounded_once_else(
    factor: float, by_hand: bool
) -> None:
    """Nothing but the scale changes in a step, or a call scales by hand."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ddp = DistributedDataParallel(ChosenGradients(SCENARIO))
    state = hooked(ddp, "topk:ratio=0.05", error_feedback="both", grad_scaler=scaler)
    targets = SCENARIO.targets(0, dist.get_rank())
    scaler.scale(ddp(targets)).backward()
    before = residuals(state)
    if by_hand:
        gain = np.float32(factor)
        state.scale_residuals(factor)
    else:
        gain = np.float32(8.0 * factor) / np.float32(8.0)
        ddp.zero_grad()
        scaler.update(new_scale=8.0 * factor)
        scaler.scale(ddp({name: target * 0 for name, target in targets.items()})).backward()
    assert before.abs().max() > 1
    # fl(gain * residual): one rounding, and none for a power of two.
    assert (before.numpy() * gain).tobytes() == residuals(state).numpy().tobytes()


class Halves(nn.Module):
    """A small classifier in fp16, as gradients travel under mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 40)).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.half()).float()


def case_fp16_loop(codec: str, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """fp32 master weights behind an fp16 model; one rank's gradient is infinite now and then."""
    torch.manual_seed(2)
    rank, model = dist.get_rank(), Halves()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=10)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    state = hooked(ddp, codec, grad_scaler=scaler, **options)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    settings = {"lr": 0.1} if "momentum" in options else {"lr": 0.05, "momentum": 0.9}
    optimizer = torch.optim.SGD(masters, **settings)
    generator = torch.Generator().manual_seed(rank)
    trace, losses, finite = [], [], True
    for step in range(steps):
        ddp.zero_grad()
        x = torch.randn(16, 32, generator=generator)
        loss = cross_entropy(ddp(x), x[:, :40].argmax(1))
        # Once in a while another rank's loss overflows, in a part of the model or in all of it.
        overflows = step % 23 == 7 or 40 <= step < 45  # five in a row
        factor = math.inf if overflows and rank == (step // 23) % 3 else 1.0
        scaler.scale(loss * factor).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float()
        before = masters[0].detach().clone()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        losses.append(loss.item())
        finite &= bool(residuals(state).isfinite().all())
        skipped = torch.equal(before, masters[0].detach())
        trace.append((scaler.get_scale(), skipped, bits(masters)))
    return {"trace": trace, "losses": losses, "finite": finite}


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("q4", {"error_feedback": "both"}),
        ("topk:ratio=0.05", {}),
        ("sign1", {"momentum": 0.9}),
    ],
)
def test_fp16_training_skips_and_scales_alike_on_all_ranks(
    worlds: Worlds, codec: str, options: dict[str, Any]
) -> None:
    steps = 100
    answers = worlds(3).run(case_fp16_loop, codec=codec, options=options, steps=steps)
    assert answers[0]["trace"] == answers[1]["trace"] == answers[2]["trace"]
    assert all(answer["finite"] for answer in answers)
    scales = [scale for scale, _, _ in answers[0]["trace"]]
    skips = [step for step, (_, skipped, _) in enumerate(answers[0]["trace"]) if skipped]
    assert {*range(7, steps, 23), *range(40, 45)} <= set(skips)
    assert len(skips) < steps / 4
    assert len(set(scales)) > 3
    losses = np.mean([answer["losses"] for answer in answers], axis=0)
    assert losses[-20:].mean() < 0.9 * losses[:20].mean()


def case_skips(codec: str) -> dict[str, torch.Tensor]:
    """Residuals around a step with an infinity on rank 0; what was given to it, and what came."""
    scenario = Scenario(WEIGHTS[:2])
    model = ChosenGradients(scenario)
    ddp = DistributedDataParallel(model)
    state = hooked(ddp, codec, error_feedback="both")
    for step in range(4):
        ddp.zero_grad()
        targets = scenario.targets(step, dist.get_rank())
        if step == 3:
            before = slot(state)
            if dist.get_rank() == 0:
                targets["bias"][0] = math.inf
        ddp(targets).backward()
    return {
        "before": before,
        "after": slot(state),
        "given": targets["first"].reshape(-1),
        "got": model.first.grad.reshape(-1),
    }


def test_a_skipped_step_moves_residuals_by_what_was_given_less_what_came(world_of_2: World) -> None:
    answers = world_of_2.run(case_skips, codec="topk:ratio=0.05")

    # Two tiles of "first", one owned by each rank; what is missing is by element.
    def missing(name: str) -> np.ndarray:
        slots = [answer[name] for answer in answers]
        owner = np.concatenate(
            [
                slot["owner"].double().numpy()[:n]
                for slot, n in zip(slots, (4096, 6300 - 4096), strict=True)
            ]
        )
        worker = np.mean([slot["worker"].double().numpy()[:6300] for slot in slots], axis=0)
        return worker + owner

    given = np.mean([answer["given"].double().numpy() for answer in answers], axis=0)
    came = answers[0]["got"].double().numpy()
    moved = missing("after") - missing("before")
    # Per element some 8 roundings of values below 32.
    assert np.abs(moved - (given - came)).max() <= 8 * 32 * 2.0**-24
    assert np.abs(moved).max() > 0.1


@on_ranks()
def test_wrong_scales_are_refused() -> None:
    def model() -> DistributedDataParallel:
        return DistributedDataParallel(nn.Linear(40, 40))

    plain = model()
    state = hooked(plain)
    plain(torch.ones(2, 40)).sum().backward()
    outcomes = [attempt(lambda: state.scale_residuals(math.nan))]
    for factor in (math.inf, -math.inf, 1e39):
        refused = attempt(functools.partial(state.scale_residuals, factor))
        assert refused.error == "ConfigError", factor
    for enabled in (True, False):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaled = model()
        hooked(scaled, grad_scaler=scaler)
        if enabled:
            scaler.update(new_scale=math.inf)
        outcomes.append(attempt(scaled(torch.ones(2, 40)).sum().backward))
    assert [o.error for o in outcomes] == ["ConfigError", "StateError", None]
    assert "factor=nan must be a number that is finite" in outcomes[0].text
    assert "the GradScaler's scale is inf" in outcomes[1].text
