"""Trainings whose steps are not one pass each, and gradients that no number holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

Attach = Callable[[nn.Module], DistributedDataParallel]


def layers(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, outputs))


def batches() -> torch.Generator:
    return torch.Generator().manual_seed(7 + dist.get_rank())


def mean_loss(ddp: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (ddp(inputs) - inputs.sin()).square().mean()


def sharpness_aware(attach: Attach) -> list[nn.Module]:
    """As SAM: steps with the gradient at the worst point nearby, which a first pass finds."""
    ddp, random = attach(layers(40)), batches()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for _ in range(6):
        inputs = torch.randn(8, 40, generator=random)
        mean_loss(ddp, inputs).backward()
        with torch.no_grad():
            climbed = [0.05 * p.grad for p in ddp.parameters()]
            torch._foreach_add_(list(ddp.parameters()), climbed)
        optimizer.zero_grad()
        mean_loss(ddp, inputs).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(ddp.parameters()), climbed)
        optimizer.step()
        optimizer.zero_grad()
    return [ddp]


def quasi_newton(attach: Attach) -> list[nn.Module]:
    """LBFGS, which runs several passes per step. All ranks see one loss, and so as many passes."""
    ddp, random = attach(layers(40)), batches()
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=4)
    inputs = torch.randn(8, 40, generator=random)

    def closure() -> float:
        optimizer.zero_grad()
        loss = mean_loss(ddp, inputs)
        loss.backward()
        dist.all_reduce(mean := loss.detach())
        return float(mean)

    for _ in range(3):
        optimizer.step(closure)
    return [ddp]


def adversarial(attach: Attach) -> list[nn.Module]:
    """A GAN, whose discriminator is frozen while the generator's gradients pass through it."""
    generator, judge, random = attach(layers(40)), attach(layers(1)), batches()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, judge)]
    for _ in range(4):
        real, noise = torch.randn(2, 8, 40, generator=random)
        judge.requires_grad_(True)
        judged = judge(torch.cat([real, generator(noise).detach()]))
        (judged[8:].mean() - judged[:8].mean()).backward()
        optimizers[1].step()
        judge.requires_grad_(False)
        (-judge(generator(noise)).mean()).backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [generator, judge]


def case_trained(train: Callable[[Attach], list[nn.Module]], codec: str | None) -> list[bytes]:
    import gradferry

    def attach(model: nn.Module) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model)
        if codec is not None:
            gradferry.attach(ddp, codec)
        return ddp

    torch.manual_seed(3)
    models = train(attach)
    assert all(p.isfinite().all() for model in models for p in model.parameters())
    return [p.detach().numpy().tobytes() for model in models for p in model.parameters()]


@pytest.mark.parametrize("train", [sharpness_aware, quasi_newton, adversarial])
def test_several_passes_per_step_train_as_without_gradferry(
    world_of_2: World, train: Callable[[Attach], list[nn.Module]]
) -> None:
    # The mean of two numbers has one rounding, wherever they are halved.
    plain = world_of_2.run(case_trained, train=train, codec=None)
    assert world_of_2.run(case_trained, train=train, codec="exact") == plain
    one, other = world_of_2.run(case_trained, train=train, codec="q4")
    assert one == other
    assert one != plain[0]


def case_endless_overflow(codec: str) -> dict[str, Any]:
    """Steps that all overflow, on one rank alone, and then one that does not."""
    import gradferry

    torch.manual_seed(3)
    ddp = DistributedDataParallel(nn.Linear(40, 64))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=10**6)
    state = gradferry.attach(ddp, codec, grad_scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = [p.detach().clone() for p in ddp.parameters()]
    for step in range(21):
        factor = math.inf if step < 20 and dist.get_rank() == step % 2 else 1.0
        optimizer.zero_grad()
        scaler.scale(ddp(torch.ones(2, 40)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 19:
            kept = all(map(torch.equal, before, ddp.parameters()))
    residuals = state.state_dict()[f"slot_{dist.get_rank()}"]
    return {
        "kept": kept,
        "scale": scaler.get_scale(),
        "finite": all(bool(residuals[kind].isfinite().all()) for kind in ("worker", "owner")),
        "moved": not any(map(torch.equal, before, ddp.parameters())),
        "end": [p.detach().numpy().tobytes() for p in ddp.parameters()],
    }


@pytest.mark.parametrize("codec", ["exact", "q4", "sign1"])
def test_endless_overflow_is_skipped_alike_and_ends(world_of_2: World, codec: str) -> None:
    one, other = world_of_2.run(case_endless_overflow, codec=codec)
    assert one == other
    assert one["kept"]
    assert one["scale"] == 2.0**-16
    assert one["finite"]
    assert one["moved"]


def case_half(codec: str) -> torch.Tensor:
    """A gradient of 40000 per element on both ranks, in fp16, which ends at 65504."""
    import gradferry

    ddp = DistributedDataParallel(nn.Linear(64, 64, bias=False, dtype=torch.float16))
    gradferry.attach(ddp, codec)
    (ddp(torch.eye(64, dtype=torch.float16)).sum() * 40000).backward()
    gradient = next(ddp.parameters()).grad
    assert gradient is not None
    return gradient


SCALE_ROUNDING = {"exact": 0.0, "q8": 2.0**-9, "sign1": 2.0**-9, "q4": 2.0**-4}  # bf16 and E4M3


@pytest.mark.parametrize("codec", SCALE_ROUNDING)
def test_sums_beyond_fp16_have_a_finite_mean(world_of_2: World, codec: str) -> None:
    # 40000 = 625 * 2^6 is an fp16 number. A codec returns the largest magnitude of a block, but for
    # the rounding of its scale, once in each of two encodings, and of the result: 2^4.
    tolerance = 2 * SCALE_ROUNDING[codec] * 40000 + 2**4
    for gradient in world_of_2.run(case_half, codec=codec):
        assert (gradient.double() - 40000).abs().max() <= tolerance
