"""Loss scaling: residuals follow the scale, and skipped steps are the same on all ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from outcomes import Outcome, attempt
from scenario import ChosenGradients, Scenario, Weight
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("wide", (3, 4099)))
CODECS = ("q8", "q4", "sign1", "topk:ratio=0.05", "rht:bits=2")


def residuals(state: Any) -> torch.Tensor:
    slot = state.state_dict()[f"slot_{dist.get_rank()}"]
    return torch.cat([slot["worker"], slot["owner"]])


def case_scaled(codec: str, options: dict[str, Any], scales: list[float]) -> list[list[np.ndarray]]:
    """Gradients of every step, unscaled. The GradScaler's scale is set before each."""
    import gradferry

    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
    model = ChosenGradients(Scenario(WEIGHTS))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    gradferry.attach(ddp, codec, error_feedback="both", grad_scaler=scaler, **options)
    seen = []
    for step, scale in enumerate(scales):
        if step:
            scaler.update(new_scale=scale)
        ddp.zero_grad()
        scenario = Scenario(WEIGHTS, seed=step)
        targets = {
            w.name: w.from_flat(scenario.gradient(0, 0, dist.get_rank(), i))
            for i, w in enumerate(WEIGHTS)
        }
        scaler.scale(ddp(targets)).backward()
        seen.append([p.grad.div(scale).numpy().copy() for p in model.parameters()])
    return seen


@pytest.mark.torch_core
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=["plain", "momentum"])
@pytest.mark.parametrize("codec", CODECS)
def test_power_of_two_scales_change_no_bit(
    world_of_2: World, codec: str, options: dict[str, Any]
) -> None:
    # No block scale, mean or sum comes near the ends of the range, so all of them just shift.
    constant = world_of_2.run(case_scaled, codec=codec, options=options, scales=[1.0] * 6)
    changing = [2.0**16, 2.0**16, 2.0**15, 2.0**3, 2.0**20, 2.0**20]
    scaled = world_of_2.run(case_scaled, codec=codec, options=options, scales=changing)
    for one, other in zip(constant, scaled, strict=True):
        for step, (left, right) in enumerate(zip(one, other, strict=True)):
            for a, b in zip(left, right, strict=True):
                assert a.tobytes() == b.tobytes(), step


def case_residual_after_rescaling(codec: str, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Residuals before and after a step in which nothing but the scale changes."""
    import gradferry

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = ChosenGradients(Scenario(WEIGHTS))
    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, codec, error_feedback="both", grad_scaler=scaler)
    scenario = Scenario(WEIGHTS)
    for step in range(2):
        ddp.zero_grad()
        targets = {
            w.name: w.from_flat(scenario.gradient(0, 0, dist.get_rank(), i) * (1 - step))
            for i, w in enumerate(WEIGHTS)
        }
        if step:
            before = residuals(state)
            scaler.update(new_scale=8.0 * factor)
        scaler.scale(ddp(targets)).backward()
    return before, residuals(state)


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0, 0.1])
def test_residual_is_rescaled_exactly_for_powers_of_two_and_rounded_once_else(
    world_of_2: World, factor: float
) -> None:
    for before, after in world_of_2.run(
        case_residual_after_rescaling, codec="topk:ratio=0.05", factor=factor
    ):
        gain = np.float32(8.0 * factor) / np.float32(8.0)
        assert before.abs().max() > 1
        # fl(gain * residual): one rounding, and none for a power of two.
        assert (before.numpy() * gain).tobytes() == after.numpy().tobytes()


class Halves(nn.Module):
    """A small classifier in fp16, as gradients travel under mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 40)).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.half()).float()


def case_fp16_loop(codec: str, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """fp32 master weights behind an fp16 model; one rank's gradient is infinite now and then."""
    import gradferry

    torch.manual_seed(2)
    rank, model = dist.get_rank(), Halves()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=10)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    state = gradferry.attach(ddp, codec, grad_scaler=scaler, **options)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05, momentum=0.0 if "momentum" in options else 0.9)
    generator = torch.Generator().manual_seed(rank)
    trace, losses, finite = [], [], True
    for step in range(steps):
        ddp.zero_grad()
        x = torch.randn(16, 32, generator=generator)
        loss = cross_entropy(ddp(x), x[:, :40].argmax(1))
        # Once in a while another rank's loss overflows, in a part of the model or in all of it.
        factor = math.inf if step % 23 == 7 and rank == (step // 23) % 3 else 1.0
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
        digest = hashlib.blake2b(digest_size=8)
        for master in masters:
            digest.update(master.detach().numpy().tobytes())
        skipped = torch.equal(before, masters[0].detach())
        trace.append((scaler.get_scale(), skipped, digest.hexdigest()))
    return {"trace": trace, "losses": losses, "finite": finite}


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("q4", {"error_feedback": "both"}),
        ("topk:ratio=0.05", {"exact_skip": True}),
        ("sign1", {"momentum": 0.9}),
    ],
)
def test_fp16_training_skips_and_scales_alike_on_all_ranks(
    worlds: Worlds, codec: str, options: dict[str, Any]
) -> None:
    steps = 200
    answers = worlds(3).run(case_fp16_loop, codec=codec, options=options, steps=steps, seconds=300)
    assert answers[0]["trace"] == answers[1]["trace"] == answers[2]["trace"]
    assert all(answer["finite"] for answer in answers)
    scales = [scale for scale, _, _ in answers[0]["trace"]]
    skips = [step for step, (_, skipped, _) in enumerate(answers[0]["trace"]) if skipped]
    assert set(range(7, steps, 23)) <= set(skips)
    assert len(skips) < steps / 4
    assert len(set(scales)) > 3
    losses = np.mean([answer["losses"] for answer in answers], axis=0)
    assert losses[-20:].mean() < 0.9 * losses[:20].mean()


def case_skips(codec: str, options: dict[str, Any], poison: bool) -> dict[str, torch.Tensor]:
    """Residuals around a step that is skipped, and what that step gave and was given."""
    import gradferry

    weights = WEIGHTS[:2]
    model = ChosenGradients(Scenario(weights))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = gradferry.attach(ddp, codec, **options)
    for step in range(4):
        ddp.zero_grad()
        scenario = Scenario(weights, seed=step)
        targets = {
            w.name: w.from_flat(scenario.gradient(0, 0, dist.get_rank(), i))
            for i, w in enumerate(weights)
        }
        if step == 3:
            before = state.state_dict()
            if poison and dist.get_rank() == 0:
                targets["bias"][0] = math.inf
        ddp(targets).backward()
        if step < 3:
            optimizer.step()
    if not poison and options.get("exact_skip"):
        state.skip_step()
    rank = dist.get_rank()
    return {
        "before": before[f"slot_{rank}"],
        "after": state.state_dict()[f"slot_{rank}"],
        "given": targets["first"].reshape(-1),
        "got": model.first.grad.reshape(-1),
    }


@pytest.mark.parametrize("poison", [True, False], ids=["infinite", "by_hand"])
@pytest.mark.parametrize(
    "options", [{"error_feedback": "both"}, {"momentum": 0.9}], ids=["plain", "momentum"]
)
@pytest.mark.parametrize("codec", ["sign1", "topk:ratio=0.05", "q4"])
def test_exact_skip_leaves_residuals_as_they_were(
    world_of_2: World, codec: str, options: dict[str, Any], poison: bool
) -> None:
    options = {**options, "exact_skip": True}
    for answer in world_of_2.run(case_skips, codec=codec, options=options, poison=poison):
        for name in ("worker", "owner"):
            assert torch.equal(answer["before"][name], answer["after"][name])


class Passes:
    """Optimizer steps of several synced backward passes each."""

    def __init__(self, options: dict[str, Any], device: str = "cpu") -> None:
        import gradferry

        self.weights = WEIGHTS[:2]
        place, group = torch.device("cpu"), None
        if device != "cpu":
            import fake_device

            place, group = fake_device.DEVICE, fake_device.group(device)
        self.place = place
        self.scaler = torch.amp.GradScaler(place.type, init_scale=8.0)
        self.model = ChosenGradients(Scenario(self.weights)).to(place)
        self.ddp = DistributedDataParallel(self.model, process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.state = gradferry.attach(
            self.ddp, "sign1", exact_skip=True, grad_scaler=self.scaler, **options
        )

    def backward(self, step: int, turn: int, *, poison: bool = False) -> None:
        scenario = Scenario(self.weights, seed=step)
        targets = {
            w.name: w.from_flat(scenario.gradient(0, turn, dist.get_rank(), i)).to(self.place)
            for i, w in enumerate(self.weights)
        }
        if poison and dist.get_rank() == 0:
            targets["bias"][0] = math.inf
        self.scaler.scale(self.ddp(targets)).backward()

    def step(self, step: int, passes: int = 2) -> None:
        self.model.zero_grad()
        for turn in range(passes):
            self.backward(step, turn)
        self.end()

    def end(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def residuals(self) -> torch.Tensor:
        """Unscaled; the scales are powers of two."""
        return residuals(self.state) / self.state.state_dict()["loss_scale"]


def case_skipped_passes(
    options: dict[str, Any], poisoned: int | None, *, looked_at: bool, device: str = "cpu"
) -> list[bool]:
    """Which of the steps after two left the residuals as they were: the third is skipped."""
    passes, kept = Passes(options, device), []
    for step in range(5):
        before = passes.residuals() if step else None
        if step != 2:
            passes.step(step, passes=1 + step % 3)
        else:
            passes.model.zero_grad()
            for turn in range(3):
                # Gradients accumulate, so what comes after an infinity holds it, too; zeroed in
                # between it does not.
                passes.backward(step, turn, poison=turn == poisoned)
                passes.model.zero_grad()
                if looked_at:
                    passes.residuals()
            if poisoned is None:
                passes.state.skip_step()
            passes.scaler.update(new_scale=passes.scaler.get_scale() / 2)
        if before is not None:
            kept.append(torch.equal(before, passes.residuals()))
    return kept


@pytest.mark.parametrize("looked_at", [False, True], ids=["", "looked_at"])
@pytest.mark.parametrize("poisoned", [0, 1, 2, None], ids=["first", "second", "last", "by_hand"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=["plain", "momentum"])
def test_exact_skip_takes_all_passes_of_a_step_back(
    world_of_2: World, options: dict[str, Any], poisoned: int | None, looked_at: bool
) -> None:
    # The others: the steps before and after move residuals, and are not taken back with it.
    arguments = {"options": options, "poisoned": poisoned, "looked_at": looked_at}
    for kept in world_of_2.run(case_skipped_passes, **arguments):
        assert kept == [False, True, False, False]


def case_skip_without_scaler(how: str) -> list[Outcome]:
    """Two passes, something between them, and skip_step()."""
    import gradferry

    model = DistributedDataParallel(nn.Linear(40, 40))
    parameters = list(model.parameters())
    fused = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    others = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    state = gradferry.attach(model, "q4", exact_skip=True)
    for turn in range(2):
        model(torch.ones(2, 40)).sum().backward()
        if turn == 1:
            break
        if how == "fused":
            fused.step()
        elif how == "in_place":
            with torch.no_grad():
                parameters[0].sub_(parameters[0].grad)
        elif how == "skipped":
            state.skip_step()
        elif how == "loaded":
            state.load_state_dict(state.state_dict())
        elif how == "other_model":
            others.step()
    return [attempt(state.skip_step), attempt(state.skip_step)]


@pytest.mark.parametrize(
    ("how", "known"),
    [
        ("fused", True),
        ("in_place", True),
        ("skipped", True),
        ("loaded", True),
        ("nothing", False),
        ("other_model", False),
    ],
)
def test_without_a_scaler_skip_step_refuses_to_guess(
    world_of_2: World, how: str, known: bool
) -> None:
    for first, second in world_of_2.run(case_skip_without_scaler, how=how):
        assert [first.error, second.error] == ([None] * 2 if known else ["StateError"] * 2)
        if not known:
            assert "had no optimizer step between them" in first.text
            assert "grad_scaler=" in first.text


def test_without_exact_skip_a_skipped_step_moves_residuals_by_what_came_less_what_was_given(
    world_of_2: World,
) -> None:
    options = {"error_feedback": "both"}
    answers = world_of_2.run(case_skips, codec="topk:ratio=0.05", options=options, poison=True)

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


def case_refusals() -> list[Outcome]:
    import gradferry

    outcomes = []
    model = DistributedDataParallel(nn.Linear(40, 40))
    state = gradferry.attach(model, "q4")
    model(torch.ones(2, 40)).sum().backward()
    outcomes.append(attempt(state.skip_step))
    outcomes.append(attempt(lambda: state.scale_residuals(math.nan)))

    scaler = torch.amp.GradScaler("cpu")
    model = DistributedDataParallel(nn.Linear(40, 40))
    gradferry.attach(model, "q4", grad_scaler=scaler)
    scaler.update(new_scale=math.inf)
    loss = model(torch.ones(2, 40)).sum()
    outcomes.append(attempt(loss.backward))

    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = DistributedDataParallel(nn.Linear(40, 40))
    gradferry.attach(model, "q4", grad_scaler=scaler)
    loss = model(torch.ones(2, 40)).sum()
    outcomes.append(attempt(scaler.scale(loss).backward))
    return outcomes


def test_wrong_scales_and_skips_are_refused(world_of_2: World) -> None:
    for outcomes in world_of_2.run(case_refusals):
        assert [o.error for o in outcomes] == ["StateError", "ConfigError", "StateError", None]
        assert "only with exact_skip=True" in outcomes[0].text
        assert "factor=nan must be a number that is finite" in outcomes[1].text
        assert "the GradScaler's scale is inf" in outcomes[2].text


def case_scale_residuals(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    import gradferry

    model = ChosenGradients(Scenario(WEIGHTS))
    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, "topk:ratio=0.05")
    scenario = Scenario(WEIGHTS)
    targets = {
        w.name: w.from_flat(scenario.gradient(0, 0, dist.get_rank(), i))
        for i, w in enumerate(WEIGHTS)
    }
    ddp(targets).backward()
    before = residuals(state)
    state.scale_residuals(factor)
    return before, residuals(state)


@pytest.mark.parametrize("factor", [0.0, 0.25, 3.0])
def test_residuals_can_be_scaled_by_hand(world_of_2: World, factor: float) -> None:
    for before, after in world_of_2.run(case_scale_residuals, factor=factor):
        assert before.abs().max() > 1
        assert (before.numpy() * np.float32(factor) == after.numpy()).all()
