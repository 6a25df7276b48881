"""GradScalers that differ between ranks, or that nobody updates; and what exact_skip may take back
when several optimizers share one.
"""

from __future__ import annotations

import copy
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
from stepping import bits, slot
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
    hooked(ddp, grad_scaler=scaler, exact_skip=True)

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


# --- what exact_skip takes back -------------------------------------------------------------------


class Adversaries:
    """Discriminator and generator with an optimizer each and one GradScaler, as in PyTorch's guide
    to mixed precision.
    """

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.place, group = place, _ = placed(device)
        self.models = [nn.Linear(64, 64, bias=False).to(place) for _ in range(2)]
        self.ddps = [DistributedDataParallel(m, process_group=group) for m in self.models]
        self.scaler = torch.amp.GradScaler(
            place.type, init_scale=8.0, growth_interval=10**6, backoff_factor=0.5
        )
        self.states = [
            hooked(ddp, "sign1", grad_scaler=self.scaler, exact_skip=True) for ddp in self.ddps
        ]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.0) for m in self.models]
        self.given = torch.zeros(64, 64, dtype=torch.float64)  # to the discriminator, by this rank
        self.came = torch.zeros(64, 64, dtype=torch.float64)

    def step(self, number: int, *, overflows: bool) -> None:
        """Both step; the generator's pass, through the discriminator, overflows on rank 0."""
        generator, (judge, made) = self.models[1], self.ddps
        seed = torch.Generator().manual_seed(2 * number + dist.get_rank())
        noise = torch.randn(16, 64, generator=seed).to(self.place)
        self.optimizers[0].zero_grad()
        fake = generator(noise).detach()
        self.scaler.scale(judge(fake).square().sum()).backward()
        self.add(fake)
        self.scaler.step(self.optimizers[0])

        for optimizer in self.optimizers:
            optimizer.zero_grad()
        fake = made(noise)
        factor = math.inf if overflows and dist.get_rank() == 0 else 1.0
        self.scaler.scale(judge(fake).square().sum() * factor).backward()
        if not overflows:
            self.add(fake.detach())
        self.scaler.step(self.optimizers[1])
        self.scaler.update()

    def add(self, fake: torch.Tensor) -> None:
        """What the pass gave to the discriminator, and what came of it."""
        came = self.models[0].weight.grad
        alone = copy.deepcopy(self.models[0])  # without .grad
        alone(fake).square().sum().backward()
        self.given += alone.weight.grad.cpu().double()
        self.came += came.cpu().double() / self.scaler.get_scale()

    def withheld(self) -> torch.Tensor:
        """What the mean misses: the weight is one tile, with one owner."""
        saved = self.states[0].state_dict()
        mine = saved[f"slot_{dist.get_rank()}"]
        missing = mine["worker"].double() / dist.get_world_size()
        if mine["owner"].numel():
            missing += mine["owner"].double()
        missing = missing.view(64, 64) / saved["loss_scale"]
        dist.all_reduce(missing)
        return missing


@pytest.mark.parametrize("device", ["cpu", "streamed", "staged"])
@on_ranks()
def test_residuals_never_go_back_behind_a_step_that_was_applied(device: str) -> None:
    both = Adversaries(device)
    scales = []
    for number in range(8):
        both.step(number, overflows=number in (3, 6))
        scales.append(both.scaler.get_scale())
    assert scales == [8.0] * 3 + [4.0] * 3 + [2.0] * 2  # the overflows were seen
    given = both.given / dist.get_world_size()
    dist.all_reduce(given)
    lost = given - both.came - both.withheld()
    # 14 passes; each rounds a residual, the owner's mean and the sum a few times in fp32, to
    # 2^-24 of numbers that error feedback of one bit lets grow to some 2^5 gradients.
    assert lost.norm() / given.norm() < 14 * 8 * 2.0**-24 * 2**5


class Pair(nn.ParameterList):
    """Its gradients are the tensors that it is given."""

    def __call__(self, given: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * gradient).sum() for p, gradient in zip(self, given, strict=True))


class Halved:
    """A model of two parameters with an optimizer each, under one GradScaler and exact_skip."""

    def __init__(self, device: str) -> None:
        self.place, group = placed(device)
        self.scaler = torch.amp.GradScaler(self.place.type, init_scale=8.0)
        self.model = Pair(nn.Parameter(torch.zeros(50, 50)) for _ in range(2)).to(self.place)
        self.ddp = DistributedDataParallel(self.model, process_group=group)
        self.state = hooked(
            self.ddp, "sign1", grad_scaler=self.scaler, exact_skip=True, nodes="flat"
        )
        self.optimizers = [torch.optim.SGD([p], lr=0.5) for p in self.model]

    def backward(self, seed: int, bad: int | None = None) -> None:
        self.ddp.zero_grad()
        generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
        by = [torch.randn(50, 50, generator=generator) for _ in range(2)]
        if bad is not None:
            by[bad][0, 0] = math.inf
        self.scaler.scale(self.ddp([each.to(self.place) for each in by])).backward()

    def residuals(self) -> list[bytes]:
        """The worker residual, by parameter."""
        return bits(slot(self.state)["worker"].clone().chunk(2))


@pytest.mark.parametrize("bad", [None, 0, 1])
@pytest.mark.parametrize("device", ["cpu", "streamed"])
@on_ranks()
def test_the_first_optimizer_that_steps_ends_what_can_be_taken_back(
    device: str, bad: int | None
) -> None:
    """Residuals of neither parameter are those from before a step, after the next step began."""
    halved = Halved(device)
    halved.backward(0)
    for optimizer in halved.optimizers:
        halved.scaler.step(optimizer)
    halved.scaler.update(8.0)
    before = halved.residuals()
    halved.backward(1, bad)
    for optimizer in halved.optimizers:
        halved.scaler.step(optimizer)
    if bad is None:
        outcome = attempt(halved.state.skip_step)
        assert outcome.error == "StateError"
        assert "an optimizer has applied the gradients of the last step" in outcome.text
    halved.scaler.update(8.0)
    kept = [now == was for now, was in zip(halved.residuals(), before, strict=True)]
    assert kept == [False, False]


@on_ranks()
def test_a_fused_optimizer_that_skips_has_applied_nothing() -> None:
    """A GradScaler calls fused optimizers always: all skip, or none."""
    for bad in (None, 0):
        halved = Halved("cpu")
        optimizer = torch.optim.SGD(halved.model, lr=0.5, fused=True)
        halved.backward(0)
        halved.scaler.step(optimizer)
        halved.scaler.update(8.0)
        before = halved.residuals()
        values = [p.detach().clone() for p in halved.model]
        halved.backward(1, bad)
        halved.scaler.step(optimizer)
        moved = not all(map(torch.equal, halved.model, values))
        assert moved == (bad is None)
        halved.scaler.update(8.0)
        halved.backward(2)
        halved.state.skip_step()
        after = halved.residuals()
        kept = [now == was for now, was in zip(after, before, strict=True)]
        assert kept == [bad is not None] * 2


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
