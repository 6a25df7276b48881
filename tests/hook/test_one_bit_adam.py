"""OneBitAdam: AdamW, then 1-bit Adam."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradferry.optim import OneBitAdam
from momentum_training import BETAS, one_bit_adam
from on_ranks import on_ranks
from outcomes import attempt
from products import rows
from reference.codecs import find_codec
from reference.engine import momentum_behind
from reference.one_bit_adam import OneBitMomentum
from residual_sums import still_missing
from scenario import ChosenGradients, Scenario, Weight, attach, hooked
from stepping import slot
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (64, 60)))
FREEZE = 4
STEPS = 10
FLOOR = 0.01  # variance_floor by default
EPS = 1e-8  # by default


SCENARIO = Scenario(WEIGHTS)


def flat_gradient(step: int, rank: int, index: int) -> np.ndarray:
    return SCENARIO.gradient(step, 0, rank, index)


def build(codec: str, freeze: int, **options: Any) -> tuple[ChosenGradients, Any, Any]:
    model = ChosenGradients(SCENARIO)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    return model, ddp, one_bit_adam(ddp, codec, freeze=freeze, **options)[1]


def case_train(codec: str, freeze: int, steps: int) -> list[list[np.ndarray]]:
    """Parameters after every step."""
    model, ddp, optimizer = build(codec, freeze, lr=0.01, weight_decay=0.1)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        ddp(SCENARIO.targets(step, dist.get_rank())).backward()
        optimizer.step()
        seen.append([p.detach().numpy().copy() for p in model.parameters()])
    assert all("exp_avg" not in state for state in optimizer.state.values()) == (steps >= freeze)
    return seen


def adamw_on_the_mean(world_size: int, steps: int) -> list[list[np.ndarray]]:
    model = ChosenGradients(Scenario(WEIGHTS))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=BETAS, weight_decay=0.1, foreach=False
    )
    seen = []
    for step in range(steps):
        for index, p in enumerate(model.parameters()):
            total = flat_gradient(step, 0, index)
            for rank in range(1, world_size):
                total = total + flat_gradient(step, rank, index)
            mean = total * (np.float32(1) / np.float32(world_size))
            p.grad = WEIGHTS[index].from_flat(mean)
        optimizer.step()
        seen.append([p.detach().numpy().copy() for p in model.parameters()])
    return seen


@pytest.mark.torch_core
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_dense_steps_are_those_of_adamw(worlds: Worlds, world_size: int) -> None:
    expected = adamw_on_the_mean(world_size, STEPS)
    for seen in worlds(world_size).run(case_train, codec="sign1", freeze=STEPS + 1, steps=STEPS):
        for step, parameters in enumerate(seen):
            for got, want in zip(parameters, expected[step], strict=True):
                assert got.tobytes() == want.tobytes(), step


def test_frozen_steps_are_those_of_adam_with_a_constant_variance(worlds: Worlds) -> None:
    # A world of one sends nothing, so the momentum is exact.
    seen = worlds(1).run(case_train, codec="sign1", freeze=FREEZE, steps=STEPS)[0]
    assert_bits(seen[FREEZE - 1], adamw_on_the_mean(1, FREEZE)[-1])
    lr, decay, eps = 0.01, 0.1, 1e-8
    for index in range(len(WEIGHTS)):
        average, square = torch.zeros(()), torch.zeros(())
        for step in range(FREEZE):
            g = torch.from_numpy(flat_gradient(step, 0, index))
            average = torch.lerp(average.expand_as(g), g, 1 - BETAS[0])
            square = (square * BETAS[1]).expand_as(g).addcmul(g, g, value=1 - BETAS[1])
        p = torch.from_numpy(seen[FREEZE - 1][index].reshape(-1).copy())
        square.clamp_(min=FLOOR * float(square.double().mean()))
        deviation = square.sqrt() / (1 - BETAS[1] ** FREEZE) ** 0.5 + eps
        for step in range(FREEZE, STEPS):
            g = torch.from_numpy(flat_gradient(step, 0, index))
            average = np.float32(1 - BETAS[0]) * g + average * np.float32(BETAS[0])
            p.mul_(1 - lr * decay)
            p.addcdiv_(average, deviation, value=-lr / (1 - BETAS[0] ** (step + 1)))
            assert p.numpy().tobytes() == seen[step][index].tobytes(), step


def assert_bits(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == b.tobytes()


def case_exact_numbers(weight: Weight, steps: int, freeze: int) -> dict[str, Any]:
    """The momentum of every frozen step, and the residuals at the end."""
    model = ChosenGradients(Scenario((weight,)))
    ddp = DistributedDataParallel(model)
    state, optimizer = one_bit_adam(ddp, freeze=freeze, betas=(0.5, 0.9), lr=0.0)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        gradient = eighths(step, dist.get_rank(), weight.num_elements)
        ddp({weight.name: weight.from_flat(gradient)}).backward()
        optimizer.step()
        seen.append(next(model.parameters()).grad.reshape(-1).numpy().copy())
    held = {name: slot(state)[name].numpy() for name in ("worker", "owner")}
    return {"momentum": seen[freeze:], **held}


def eighths(step: int, rank: int, n: int) -> np.ndarray:
    rng = np.random.default_rng([step, rank])
    return (rng.integers(-7, 8, n) / 8).astype(np.float32)


def mean_magnitude_of_blocks(v: np.ndarray) -> np.ndarray:
    """The scale of sign1: its codec decodes to it, up to the sign."""
    codec = find_codec("sign1")
    tile = np.abs(v)[None].astype(np.float32)
    return codec.decode(codec.encode(tile, "float32"), v.size, "float32")[0].astype(v.dtype)


def test_compressed_momentum_is_that_of_deepspeeds_algorithm(worlds: Worlds) -> None:
    # Multiples of 1/8, beta 1/2, two ranks and a few steps: float64 and float32 are both exact, so
    # that two algorithms with other buffers and another order must agree to the bit.
    n, freeze, steps = 2048, 2, 6
    answers = worlds(2).run(
        case_exact_numbers, weight=Weight("w", (64, 32)), steps=steps, freeze=freeze
    )
    momentum = np.zeros(n)
    for step in range(freeze):
        mean = (eighths(step, 0, n).astype(float) + eighths(step, 1, n)) / 2
        momentum = (momentum + mean) / 2
    reference = OneBitMomentum(momentum, 2, 0.5, mean_magnitude_of_blocks)
    for step in range(freeze, steps):
        expected = reference.step([eighths(step, rank, n).astype(float) for rank in range(2)])
        for answer in answers:
            assert (answer["momentum"][step - freeze] == expected).all(), step
    for rank, answer in enumerate(answers):
        # Ours has one buffer for what DeepSpeed has two.
        withheld = reference.worker_error[rank] + reference.beta * reference.momentum
        assert (answer["worker"] == withheld).all()
    owner = next(answer["owner"] for answer in answers if answer["owner"].size)
    assert (owner == reference.server_error).all()


def case_skip_at_the_switch(skipped: tuple[int, ...]) -> dict[str, Any]:
    """Trains under a GradScaler; all gradients of the steps in `skipped` are infinite, so that they
    leave every residual as it was.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    model = ChosenGradients(SCENARIO)
    ddp = DistributedDataParallel(model)
    options = {"grad_scaler": scaler}
    _, optimizer = one_bit_adam(ddp, "exact", freeze=FREEZE, attach=options, lr=0.01)
    taken = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        targets = SCENARIO.targets(taken, dist.get_rank())
        if step in skipped:
            targets = {name: torch.full_like(each, math.inf) for name, each in targets.items()}
        else:
            taken += 1
        scaler.scale(ddp(targets)).backward()
        scaler.step(optimizer)
        scaler.update()
    return {
        "parameters": [p.detach().numpy().copy() for p in model.parameters()],
        "taken": taken,
        "scale": scaler.get_scale(),
    }


@pytest.mark.parametrize("skipped", [(), (1,), (FREEZE - 1,), (FREEZE - 1, FREEZE), (FREEZE, 6)])
def test_switch_survives_steps_that_a_scaler_skips(
    worlds: Worlds, skipped: tuple[int, ...]
) -> None:
    answers = worlds(2).run(case_skip_at_the_switch, skipped=skipped)
    assert_bits(answers[0]["parameters"], answers[1]["parameters"])
    # The variance freezes after the dense steps that were taken, the momentum goes on.
    frozen_at = FREEZE - sum(step < FREEZE for step in skipped)
    for index in range(len(WEIGHTS)):
        m = v = p = np.zeros(WEIGHTS[index].num_elements)
        for step in range(answers[0]["taken"]):
            g = (flat_gradient(step, 0, index).astype(float) + flat_gradient(step, 1, index)) / 2
            m = BETAS[0] * m + (1 - BETAS[0]) * g
            if step < frozen_at:
                v = BETAS[1] * v + (1 - BETAS[1]) * g * g
            elif step == frozen_at:
                v = np.maximum(v, FLOOR * v.mean())
            m_hat = m / (1 - BETAS[0] ** (step + 1))
            deviation = np.sqrt(v / (1 - BETAS[1] ** min(step + 1, frozen_at))) + EPS
            p = p - 0.01 * m_hat / deviation
        got = answers[0]["parameters"][index].reshape(-1)
        # A gradient near 0 in all dense steps has a deviation near eps and a large update; what
        # counts is the momentum's error: some 10 fp32 roundings per step, of values below 32,
        # and those of the parameter itself.
        bound = STEPS * 10 * 2.0**-24 * (32 * 0.01 / deviation + np.abs(p) + 1)
        assert (np.abs(got - p) <= bound).all(), (index, np.abs(got - p).max())


def quiet_elements(floor: float) -> dict[str, Any]:
    """Every other element never has a gradient, and a neighbour in its block always does."""
    weights = (Weight("real", (64, 32)), Weight("complex", (8, 4), torch.complex64))
    targets = {w.name: w.from_flat(np.resize(np.float32([1, 0]), w.num_elements)) for w in weights}
    model = ChosenGradients(Scenario(weights))
    ddp = DistributedDataParallel(model)
    _, optimizer = one_bit_adam(ddp, freeze=FREEZE, lr=1.0, variance_floor=floor)
    starts = [p.detach().clone() for p in model.parameters()]
    for _ in range(FREEZE + 2):
        optimizer.zero_grad()
        ddp(targets).backward()
        optimizer.step()
    moved = [(p.detach() - start).abs() for p, start in zip(ddp.parameters(), starts, strict=True)]
    denominator = optimizer.state[next(model.parameters())]["denominator"]
    return {
        "moved": float(moved[0].flatten()[1::2].max()),
        "complex_moved": float(moved[1].max()),
        "denominators": denominator.flatten()[:2].tolist(),
    }


@on_ranks()
def test_elements_without_a_gradient_are_not_thrown_far() -> None:
    floored, published = quiet_elements(FLOOR), quiet_elements(0.0)
    active, quiet = (denominator - EPS for denominator in floored["denominators"])
    # Half of the elements are active, so that the mean is half of their variance. Root, correction
    # and eps round both by 2^-24 each, which the square doubles.
    assert quiet**2 == pytest.approx(FLOOR * active**2 / 2, rel=12 * 2.0**-24)
    # sign1 gives a quiet element at most its neighbours' momentum, and that is at most 1 - beta^t
    # of the gradient 1, which the correction divides by: a step is below 1 / deviation.
    assert 0 < floored["moved"] < 2 / (FLOOR / 2) ** 0.5
    assert published["moved"] > 1e6  # over eps
    # A complex element whose imaginary part is quiet is as active as its real part.
    assert floored["complex_moved"] == published["complex_moved"]


@on_ranks()
def test_what_would_train_wrongly_is_refused() -> None:
    model, ddp, optimizer = build("sign1", FREEZE)
    plain, other = (DistributedDataParallel(nn.Linear(40, 40)) for _ in range(2))
    unbound = gradferry.HookState("sign1", momentum=0.9)
    without = hooked(plain, "sign1", warmup_steps=FREEZE)
    bound = hooked(other, "sign1", momentum=0.9, warmup_steps=FREEZE)
    wrong: list[tuple[Any, Any, dict[str, Any]]] = [
        (model, unbound, {}),
        (plain, without, {}),
        (other, bound, {"freeze_step": FREEZE + 1}),
        (other, bound, {"betas": (0.8, 0.999)}),
        (model, bound, {}),
        (model, None, {}),
        (other, bound, {"variance_floor": math.nan}),
    ]
    outcomes = []
    for owner, state, options in wrong:
        options = {"freeze_step": FREEZE, **options}
        outcomes.append(attempt(lambda: OneBitAdam(owner.parameters(), state=state, **options)))  # noqa: B023

    rank = dist.get_rank()
    ddp(SCENARIO.targets(0, rank)).backward()
    optimizer.step()
    outcomes.append(attempt(optimizer.step))
    ddp(SCENARIO.targets(1, rank)).backward()
    ddp(SCENARIO.targets(2, rank)).backward()
    outcomes.append(attempt(optimizer.step))
    texts = [o.text for o in outcomes]
    assert [o.error for o in outcomes] == ["StateError"] + ["ConfigError"] * 6 + [
        "StateError"
    ] * 2, texts
    assert "not bound" in texts[0]
    assert "betas[0]=0.9 and the hook's momentum=None" in texts[1]
    assert "freeze_step=5 and the hook's warmup_steps=4" in texts[2]
    assert "betas[0]=0.8 and the hook's momentum=0.9" in texts[3]
    assert "of shape (90, 70), is none that the hook reduces" in texts[4]
    assert "is None, not a gradferry.HookState" in texts[5]
    assert "variance_floor=nan must be from 0 to 1" in texts[6]
    assert "0 synced backward passes since the last step" in texts[7]
    assert "2 synced backward passes since the last step" in texts[8]


@on_ranks()
def test_disabled_hook_leaves_adamw() -> None:
    """A hook that passes gradients through makes it AdamW."""
    model = ChosenGradients(SCENARIO)
    ddp = DistributedDataParallel(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADFERRY_DISABLE", "1")
        with pytest.warns(UserWarning, match="without the momentum"):
            _, optimizer = one_bit_adam(ddp, freeze=2, lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(SCENARIO.targets(step, dist.get_rank())).backward()
        optimizer.step()
    # Halving commutes with rounding: DDP's mean of two is the reference's.
    expected = adamw_on_the_mean(2, STEPS)[-1]
    assert_bits([p.detach().numpy() for p in model.parameters()], expected)


def case_momentum_handed_over(scenario: Scenario, num_silent: int) -> dict[str, Any]:
    """The momentum at the freeze, and what comes of it in steps without gradients."""
    model = ChosenGradients(scenario)
    ddp = DistributedDataParallel(model)
    state = attach(ddp, scenario)
    optimizer = OneBitAdam(ddp.parameters(), lr=0.0, betas=BETAS, freeze_step=FREEZE, state=state)
    average = np.zeros((80, 70))
    came = np.zeros((80, 70))
    for step in range(FREEZE + num_silent):
        optimizer.zero_grad()
        gradient = eighths(step, dist.get_rank(), 80 * 70) * (step < FREEZE)
        ddp({"only": torch.from_numpy(gradient).view(80, 70)}).backward()
        optimizer.step()
        arrived = next(model.parameters()).grad.double().numpy()
        if step < FREEZE:
            average += (1 - BETAS[0]) * (arrived - average)
        else:
            came += arrived
    return {"average": average, "came": came, "saved": state.state_dict()}


@pytest.mark.parametrize(
    ("codec", "nodes"),
    rows(
        ("exact", "sign1", "topk:ratio=0.25", "topk:ratio=0.01"),
        (((0,), (1,)), ((0, 1), (2, 3)), ((0,),)),
    ),
)
def test_all_of_the_momentum_comes_behind_every_codec(
    worlds: Worlds, codec: str, nodes: tuple[tuple[int, ...], ...]
) -> None:
    num_silent, world_size = 12, sum(map(len, nodes))
    scenario = Scenario(
        (Weight("only", (80, 70)),),  # two tiles
        world_size,
        codec=codec,
        nodes=nodes if len(nodes) < world_size else None,
        options={"momentum": BETAS[0], "warmup_steps": FREEZE},
    )
    answers = worlds(world_size).run(
        case_momentum_handed_over, scenario=scenario, num_silent=num_silent
    )
    kept = momentum_behind(codec if world_size > 1 else "exact", BETAS[0])
    # A residual delivers 1 - kept of itself next, then (1 - kept) * kept, and so on.
    missing = still_missing([answer["saved"] for answer in answers], scenario)[0].reshape(80, 70)
    average = answers[0]["average"]
    comes = answers[0]["came"] + missing / (1 - kept)
    # BETAS[0] of it by the next step, and so on. Per step the sums of a worker and of an owner, the
    # product and its sum are rounded to 24 bits, as are the numbers of the dense steps before.
    largest = np.abs(average).max() / (1 - BETAS[0])
    bound = 4 * (num_silent + FREEZE) * largest * 2.0**-24 / (1 - kept)
    assert np.abs(comes - average * BETAS[0] / (1 - BETAS[0])).max() <= bound
