"""Several synced backward passes per optimizer step, each of which uses other parameters, and
parameters that are frozen, unfrozen or replaced after DDP took those it reduces.

DDP hands over the .grad that is there, whether this pass made it or an earlier one. Where some rank
used the parameter it counts for the average; where none did nothing may change: not .grad, and no
residual."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from outcomes import attempt
from products import rows
from reference import narrow, widen
from residual_sums import reference_of
from scenario import ChosenGradients, Scenario, Weight, attach, hooked
from stepping import slot, warned
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (
    Weight("first", (90, 70)),
    Weight("second", (3, 4099)),
    Weight("bf16", (70, 50), torch.bfloat16),
    Weight("bias", (50,)),
)
STEPS = 8


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
            unused = [w.name for w, used in zip(WEIGHTS, one.used[rank], strict=True) if not used]
            targets = scenario.targets(step, rank, turn, unused)
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
    """The sum as torch accumulates it: in the gradient's dtype."""
    if old is None:
        return new
    dtype = WEIGHTS[index].real_dtype
    return narrow(widen(old, dtype) + widen(new, dtype), dtype)


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("codec", "views", "world"),
    rows(("q4", "sign1", "topk:ratio=0.05"), (False, True), ((2, True), (3, False), (3, True))),
)
def test_passes_that_use_other_parameters_equal_the_reference(
    worlds: Worlds, codec: str, views: bool, world: tuple[int, bool]
) -> None:
    """`world`: its size, and whether the hook is that of attach()."""
    world_size, native = world
    scenario = scenario_of(codec, world_size, views=views, native=native)
    answers = worlds(world_size).run(case_passes, scenario=scenario)
    for rank, wanted in enumerate(expected_passes(scenario)):
        assert len(answers[rank]) == len(wanted) > STEPS
        for number, (got, want) in enumerate(zip(answers[rank], wanted, strict=True)):
            for weight, one, other in zip(WEIGHTS, got, want, strict=True):
                where = f"rank {rank}, synced pass {number}, {weight.name}"
                assert (one is None) == (other is None), where
                assert one is None or one.tobytes() == other.tobytes(), where


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@on_ranks()
def test_what_no_rank_used_keeps_its_bits_and_is_no_infinity(views: bool, scaled: bool) -> None:
    """Around a pass that does not use `first`, whose .grad holds an infinity from elsewhere: that
    is no reason to raise, or to touch what is withheld.
    """
    scenario = scenario_of("topk:ratio=0.05", 2, views=views, native=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    model = ChosenGradients(scenario)
    ddp = DistributedDataParallel(model, **scenario.ddp)
    state = hooked(
        ddp,
        scenario.codec,
        grad_scaler=scaler,
        nonfinite="propagate" if scaled else "raise",
    )
    seen = []
    for turn in range(4):
        unused = ("bf16",) if turn < 2 else ("first", "bf16")
        targets = scenario.targets(0, dist.get_rank(), turn, unused)
        if turn == 3:
            with torch.no_grad():
                model.first.grad[7, 7] = math.inf
        loss = ddp(targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
        held = slot(state)["worker"][:6300] / (scaler.get_scale() if scaler else 1.0)
        seen.append({"residual": held, "grad": model.first.grad.clone()})
        if scaler is not None:
            scaler.update(new_scale=2.0 ** (turn + 3))
    assert seen[1]["residual"].abs().max() > 0.1
    # Residuals follow a scale that changes by powers of two, exactly.
    for later in seen[2:]:
        assert torch.equal(later["residual"], seen[1]["residual"])
    assert torch.equal(seen[2]["grad"], seen[1]["grad"])
    assert seen[3]["grad"][7, 7] == math.inf


def first_pass_after_attach(codec: str | None, views: bool, no_sync: bool) -> dict[str, Any]:
    """ "second" is used before attach only: in a synced pass, then perhaps under no_sync()."""
    scenario = scenario_of(codec or "exact", 2, views=views, native=True)
    model = ChosenGradients(scenario)
    ddp = DistributedDataParallel(model, **scenario.ddp)

    def backward(turn: int, *left_out: str) -> None:
        ddp(scenario.targets(0, dist.get_rank(), turn, left_out)).backward()

    backward(0)
    if no_sync:
        with ddp.no_sync():
            backward(1)
    before = model.second.grad.clone()
    state = attach(ddp, scenario) if codec else None
    backward(2, "second")
    held = slot(state)["worker"] if state else torch.zeros(0)
    # The 6300 elements of "first" come before, aligned to 16, those of "second".
    return {
        "before": before,
        "after": model.second.grad.clone(),
        "withheld": held[6304 : 6304 + 3 * 4099],
    }


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@on_ranks()
def test_use_before_attach_is_as_ddp_knows_it(views: bool) -> None:
    answer = first_pass_after_attach("sign1", views, no_sync=False)
    assert torch.equal(answer["after"], answer["before"])
    assert not answer["withheld"].any()
    plain, exact = (first_pass_after_attach(c, views, no_sync=True) for c in (None, "exact"))
    assert torch.equal(plain["after"], exact["after"])


class Branches(nn.Module):
    """Layers, of which a pass uses some; each is a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))

    def forward(self, x: torch.Tensor, used: list[int], nested: bool = False) -> torch.Tensor:
        for number in used:
            layer = self.layers[number]
            x = checkpoint(layer, x, use_reentrant=True) if nested else layer(x)
        return x


SKIPS = "skip_all_reduce_unused_params"
needs_skips = pytest.mark.skipif(
    SKIPS not in inspect.signature(DistributedDataParallel).parameters,
    reason="this torch hands over every bucket",
)


def branches(**options: bool) -> DistributedDataParallel:
    options["find_unused_parameters"] = True
    return DistributedDataParallel(Branches(), bucket_cap_mb=0.001, **options)


def train_branches(native: bool, *, skips: bool, reload: bool) -> list[tuple[Any, ...]]:
    """Steps, residuals and parameters after each of some steps, which use other layers."""
    ddp = branches(**{SKIPS: True} if skips else {})
    model = ddp.module
    state = hooked(ddp, native=native, error_feedback="both", check_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rng = np.random.default_rng(7)
    seen = []
    for number in range(12):
        used = [layer for layer in range(4) if rng.random() < 0.4] or [number % 4]
        generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(4, 40, generator=generator), used).square().mean().backward()
        optimizer.step()
        saved = state.state_dict()
        kept = {key: each.clone() for key, each in slot(state).items()}
        seen.append((saved["steps"], kept, [p.detach().clone() for p in model.parameters()]))
        if reload:
            state.load_state_dict(saved)
    return seen


@needs_skips
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_a_step_without_all_buckets_ends_with_its_pass(native: bool) -> None:
    """What DDP leaves out would be zeros, which nobody applies: all is as if they were sent."""
    every = train_branches(native, skips=False, reload=False)
    for reload in (False, True):
        some = train_branches(native, skips=True, reload=reload)
        for (steps, kept, parameters), (steps_of_all, kept_of_all, of_all) in zip(
            some, every, strict=True
        ):
            assert steps == steps_of_all
            assert all(torch.equal(kept[key], each) for key, each in kept_of_all.items())
            assert all(map(torch.equal, parameters, of_all))


@needs_skips
@on_ranks()
def test_passes_within_a_pass_end_no_step() -> None:
    """Reentrant checkpoints run a backward pass of their own for each layer."""
    options = {"find_unused_parameters": False, "static_graph": True, SKIPS: True}
    ddp = DistributedDataParallel(Branches(), bucket_cap_mb=0.001, **options)
    state = hooked(ddp)
    for step in range(5):
        ddp(torch.ones(2, 40, requires_grad=True), [0, 1, 3], nested=True).sum().backward()
        assert state.stats()["total_steps"] == step + 1


@needs_skips
@on_ranks()
def test_a_pass_that_was_abandoned_leaves_its_step_open() -> None:
    ddp = branches(**{SKIPS: True})
    state = hooked(ddp)
    for _ in range(2):
        ddp(torch.ones(2, 40), [0, 1, 2, 3]).sum().backward()

    def interrupt(_: object) -> None:
        raise ValueError("enough")

    ddp.module.layers[0].weight.register_hook(interrupt)
    with pytest.raises(ValueError, match="enough"):
        ddp(torch.ones(2, 40), [0, 1, 2, 3]).sum().backward()
    with pytest.raises(gradferry.StateError, match="in the middle of step 2"):
        state.state_dict()


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 40)
        self.second = nn.Linear(40, 40)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def step(ddp: DistributedDataParallel) -> list[torch.Tensor | None]:
    """Gradients are small multiples of 1/2: their average over two ranks is exact."""
    ddp.zero_grad()
    ddp(torch.full((2, 40), 1.0 + dist.get_rank())).sum().backward()
    return [p.grad for p in ddp.module.parameters()]


def frozen_steps(attached: bool, when: str) -> list[list[torch.Tensor | None]]:
    """Gradients of five steps; the first layer is frozen at attach, to step 3, or from 1 to 3."""
    model = TwoLayers()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    if when.startswith("before attach"):
        model.first.requires_grad_(False)
    state = hooked(ddp, "exact") if attached else None
    gradients = []
    for number in range(5):
        if when == "in training" and number == 1:
            model.first.requires_grad_(False)
        if when != "before attach" and number == 3:
            model.first.requires_grad_(True)
        gradients.append(step(ddp))
    if state is not None:
        state.load_state_dict(state.state_dict())
        assert state.stats()["steps"] == 5
    return gradients


@pytest.mark.parametrize("when", ["before attach", "before attach, to step 3", "in training"])
@on_ranks()
def test_frozen_layer_changes_nothing_for_the_others(when: str) -> None:
    plain, exact = (frozen_steps(attached, when) for attached in (False, True))
    for wanted, got in zip(plain, exact, strict=True):
        for one, other in zip(wanted, got, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


@on_ranks()
def test_unfrozen_layer_is_warned_about_and_left_to_itself() -> None:
    model = TwoLayers()
    model.first.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model.first.requires_grad_(True)
    with warned() as caught:
        state = hooked(ddp)
    step(ddp)
    gradients = step(ddp)
    state.load_state_dict(state.state_dict())
    (text,) = [str(w.message) for w in caught if "does not reduce" in str(w.message)]
    assert "the gradients of 'first.weight' and 1 more" in text
    assert "wrap the model after the last change" in text
    assert state.stats()["steps"] == 2
    # Two samples of 1 + rank, through 40 weights of 1/2.
    assert torch.equal(gradients[0], torch.full((40, 40), 2 * (1.0 + dist.get_rank()) * 20))
    assert torch.equal(gradients[3], torch.full((40,), 2.0))


@on_ranks()
def test_replaced_parameter_is_refused_on_all_ranks() -> None:
    model = TwoLayers()
    ddp = DistributedDataParallel(model)
    if dist.get_rank() == 1:
        model.first.weight = nn.Parameter(torch.zeros(40, 40))
    outcome = attempt(lambda: hooked(ddp))
    assert outcome.error == "ConfigError"
    told = "rank 1: DistributedDataParallel reduces a parameter of shape (40, 40)"
    assert told in outcome.text
