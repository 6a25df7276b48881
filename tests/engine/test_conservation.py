"""Nothing is lost: what was applied plus what is withheld is what the gradients add up to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from residual_sums import still_missing
from scenario import ChosenGradients, Scenario, Weight, attach
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]

STEPS = 1000
FEW_STEPS = 150
MOST_PASSES = 3
WEIGHTS = (Weight("square", (40, 40)), Weight("tail", (33, 125)), Weight("bias", (50,)))
CODECS = ("q4", "sign1", "topk:ratio=0.05", "rht:bits=2")
LARGEST = 64.0  # no number that is rounded is larger; checked


def first_end(world_size: int, steps: int) -> int:
    """The step at which the first rank has no more input; the last one has `steps`."""
    return steps - 40 * (world_size - 1)


class Story:
    """What happens in each step, drawn from its number alone, so that every rank knows it all."""

    def __init__(self, step: int, world_size: int, steps: int) -> None:
        rng = np.random.default_rng([step, world_size])
        self.kind = str(rng.choice(["plain"] * 6 + ["infinite", "frozen"]))
        self.passes = int(rng.choice([1, 1, 1, 2, MOST_PASSES]))
        # A rank that has ended joins in with zeros: it has no infinity to give. To a second synced
        # pass it would not bring what the first gave it, as DDP's own average would miss, so steps
        # have one.
        ended = step >= first_end(world_size, steps)
        self.victim = world_size - 1 if ended else step % world_size
        # Which passes are not under no_sync(); the last never is.
        self.synced = rng.random(self.passes) < (0.0 if ended else 0.5)
        self.synced[-1] = True
        # By pass a weight may be unused on some ranks or on all; "bias" always takes part.
        self.used = rng.random((self.passes, world_size, len(WEIGHTS))) < 0.8
        self.used &= rng.random((self.passes, 1, len(WEIGHTS))) < 0.8
        self.used[..., -1] = True
        if self.kind == "frozen":
            self.used[..., 0] = False
        self.poisoned = int(rng.integers(self.passes))

    def is_infinite(self, turn: int, rank: int) -> bool:
        return self.kind == "infinite" and (turn, rank) == (self.poisoned, self.victim)


def gradient_of(step: int, turn: int, rank: int, index: int) -> np.ndarray:
    rng = np.random.default_rng([step, turn, rank, index])
    n = WEIGHTS[index].num_elements
    return (rng.standard_normal(n) * np.exp2(rng.integers(-6, 1, n))).astype(np.float32)


Members = tuple[tuple[int, ...], ...]
UNEVEN: Members = ((0, 2), (1,))
TWO_BY_TWO: Members = ((0, 1), (2, 3))


def scenario_of(
    codec: str, world_size: int, warmup: str | None = None, nodes: Members | None = None
) -> Scenario:
    views = (CODECS.index(codec) + world_size) % 2 == 0
    return Scenario(
        WEIGHTS,
        world_size,
        codec=codec,
        error_feedback="both",
        options=warming_up(warmup) if warmup else {},
        ddp={
            "find_unused_parameters": True,
            "bucket_cap_mb": 0.01,
            "gradient_as_bucket_view": views,
        },
        nodes=nodes,
    )


def warming_up(warmup: str) -> dict[str, Any]:
    return {"warmup": warmup, "warmup_steps": FEW_STEPS}  # of its passes, of which a step has some


def case_eventful_steps(scenario: Scenario, steps_of_rank: list[int]) -> dict[str, Any]:
    """What this rank saw: sums of its own gradients, and of what it applied."""
    rank, size = dist.get_rank(), scenario.world_size
    model = ChosenGradients(scenario)
    ddp = DistributedDataParallel(model, **scenario.ddp)
    state = attach(ddp, scenario)
    parameters = list(model.parameters())
    given = [np.zeros(w.num_elements) for w in WEIGHTS]
    applied = [np.zeros(w.num_elements) for w in WEIGHTS]
    largest = 0.0
    with ddp.join():
        for step in range(steps_of_rank[rank]):
            story = Story(step, size, max(steps_of_rank))
            ddp.zero_grad()
            parameters[0].requires_grad_(story.kind != "frozen")
            for turn in range(story.passes):
                targets = {
                    w.name: w.from_flat(gradient_of(step, turn, rank, i))
                    for i, w in enumerate(WEIGHTS)
                    if story.used[turn, rank, i]
                }
                if story.is_infinite(turn, rank):
                    targets["bias"][3] = math.inf
                with contextlib.nullcontext() if story.synced[turn] else ddp.no_sync():
                    ddp(targets).backward()
            # Whether the step is applied or skipped, what came was sent, wherever it is finite.
            for index, p in enumerate(parameters):
                came = (
                    np.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1).double().numpy()
                )
                finite = np.isfinite(came)
                assert finite.all() or (story.kind == "infinite" and (~finite).sum() == 1)
                applied[index][finite] += came[finite]
                largest = max(largest, np.abs(came[finite]).max())
                for turn in np.flatnonzero(story.used[:, rank, index]):
                    given[index][finite] += gradient_of(step, turn, rank, index)[finite]
    saved = state.state_dict()
    largest = max(largest, 0.0, *(float(t.abs().max()) for t in values_of(saved)))
    return {"given": given, "applied": applied, "saved": saved, "largest": largest}


def values_of(saved: dict) -> Iterator[torch.Tensor]:
    for key, slot in saved.items():
        if key.startswith("slot_"):
            yield from (slot[name] for name in ("worker", "owner") if slot[name].numel())


@pytest.mark.parametrize(
    ("codec", "world_size", "steps", "warmup", "nodes"),
    [
        ("q4", 2, FEW_STEPS, None, None),
        ("sign1", 3, FEW_STEPS, None, None),
        ("topk:ratio=0.05", 3, FEW_STEPS, "sign1", None),
        ("sign1", 3, FEW_STEPS, None, UNEVEN),
        ("topk:ratio=0.05", 4, FEW_STEPS, None, TWO_BY_TWO),
        *(
            pytest.param(codec, size, STEPS, None, None, marks=pytest.mark.slow)
            for codec in CODECS
            for size in (2, 3)
        ),
    ],
)
def test_eventful_steps_lose_nothing(
    worlds: Worlds,
    codec: str,
    world_size: int,
    steps: int,
    warmup: str | None,
    nodes: Members | None,
) -> None:
    # Ranks end at different steps, and the last ones train on beside their zeros. Every rank sees
    # what is applied until it ends; the last rank sees all of it.
    steps_of_rank = [first_end(world_size, steps) + 40 * rank for rank in range(world_size)]
    scenario = scenario_of(codec, world_size, warmup, nodes)
    answers = worlds(world_size).run(
        case_eventful_steps, scenario=scenario, steps_of_rank=steps_of_rank, seconds=400
    )
    assert max(answer["largest"] for answer in answers) < LARGEST / 2
    missing = still_missing([answer["saved"] for answer in answers], scenario)
    # Per pass, one rounding of every rank's .grad, of its v, of its v - D, of the sum over ranks,
    # then of the mean, of 1 / W, of the owner's v and of its v - D: each of a number below LARGEST.
    # With two levels a node's sum and its product with m / W are rounded instead of v of its ranks.
    passes = sum(Story(step, world_size, steps).passes for step in range(steps))
    bound = passes * (4 * world_size + 4) * LARGEST * 2.0**-24
    for index, weight in enumerate(WEIGHTS):
        given = np.mean([answer["given"][index] for answer in answers], axis=0)
        applied = answers[-1]["applied"][index]
        lost = np.abs(given - applied - missing[index]).max()
        assert lost <= bound, weight.name
        assert np.abs(given).max() > 10 * math.sqrt(steps / STEPS)
    # One skipped step counted as applied, or one withheld tile forgotten, is far above the bound.
    assert np.abs(missing[0]).max() > 4 * bound or codec == "q4"


def case_learning_rate_from_and_to_zero(codec: str) -> dict[str, Any]:
    """Residuals along a schedule that begins and ends at a rate of 0."""
    import gradferry

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, codec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
    steps = 120
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            math.sin(math.pi * max(0, min(step, steps) - 20) / (steps - 40))
            if 20 <= step <= steps - 20
            else 0.0
        ),
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    slot, norms, losses, start = f"slot_{dist.get_rank()}", [], [], None
    for step in range(steps):
        x = torch.randn(32, 32, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step < 20:
            start = start or [p.detach().clone() for p in model.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
        norms.append(float(state.state_dict()[slot]["worker"].norm()))
        losses.append(loss.item())
    return {"norms": norms, "losses": losses}


@pytest.mark.parametrize("codec", ["sign1", "topk:ratio=0.05"])
def test_residual_stays_small_while_the_learning_rate_is_zero(
    world_of_2: World, codec: str
) -> None:
    for answer in world_of_2.run(case_learning_rate_from_and_to_zero, codec=codec):
        norms, losses = answer["norms"], answer["losses"]
        # A compressor that keeps a part of every tile forgets geometrically: at a rate of 0 the
        # residual saturates instead of growing with the number of steps.
        assert max(norms) < 100
        assert norms[19] < 3 * norms[9]
        assert norms[-1] < 3 * norms[-10]
        assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])
