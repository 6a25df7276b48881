"""Training loops as users have them, and unusual ones. With `exact` they train to the bit as with
plain DDP.

With two ranks, (a + b) / 2 is what plain DDP computes as a / 2 + b / 2: halving is exact, and a sum
of two does not depend on order.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gradferry.errors import GradferryWarning
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from products import rows
from scenario import Run, Scenario, Weight, assert_bit_equal, hooked
from stepping import bits
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from world import World

TOKENS, WIDTH, CONTEXT = 40, 32, 12
Attach = Callable[[DistributedDataParallel], Any]


class LanguageModel(nn.Module):
    """One block; the embedding and the head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.embedding.weight = self.head.weight

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = self.embedding(tokens)
        q, k, v = self.attention(self.norm(hidden)).chunk(3, dim=-1)
        hidden = hidden + self.project(scaled_dot_product_attention(q, k, v, is_causal=True))
        scores = self.head(hidden)
        if targets is None:
            return scores[:, -1:], None
        return scores, cross_entropy(scores.flatten(0, 1), targets.flatten())


def like_nanogpt(attach: Attach) -> list[float]:
    """Batches from one tensor, accumulation by DDP's own flag, a loss scale, clipped gradients, a
    rate by hand, and an evaluation now and then. A loss of one rank overflows.
    """
    model = LanguageModel()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    ddp = DistributedDataParallel(model)
    attach(ddp, grad_scaler=scaler)
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(TOKENS, (CONTEXT + 1,), generator=generator).repeat(9)
    generator.manual_seed(dist.get_rank())

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - CONTEXT - 1, (4,), generator=generator).tolist()
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]

    losses = []
    x, y = batch()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 + math.cos(math.pi * step / STEPS)) / 2
        if step % 2 == 0:
            ddp.eval()
            with torch.no_grad():
                losses.append(ddp(*batch())[1].item())
            ddp.train()
        for part in range(3):
            ddp.require_backward_grad_sync = part == 2
            with torch.autocast("cpu", torch.bfloat16):
                loss = ddp(x, y)[1] / 3
            x, y = batch()
            overflows = (step, part, dist.get_rank()) == (3, 1, 1)
            scaler.scale(loss * math.inf if overflows else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses += [loss.item(), scaler.get_scale()]
    assert losses[-1] == 2.0**7  # all ranks have skipped the step
    return losses


def layers(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, outputs))


def adversarial(attach: Attach) -> list[float]:
    """A GAN, whose discriminator is frozen while the generator's gradients pass through it."""
    attach(generator := DistributedDataParallel(layers(40)))
    attach(judge := DistributedDataParallel(layers(1)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, judge)]
    random = torch.Generator().manual_seed(7 + dist.get_rank())
    losses = []
    for _ in range(4):
        real, noise = torch.randn(2, 8, 40, generator=random)
        judge.requires_grad_(True)
        judged = judge(torch.cat([real, generator(noise).detach()]))
        loss = judged[8:].mean() - judged[:8].mean()
        loss.backward()
        optimizers[1].step()
        judge.requires_grad_(False)
        (-judge(generator(noise)).mean()).backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.item())
        generator.load_state_dict(generator.state_dict())  # with DDP's own prefix
    return losses


STEPS = 6
LOOPS = {like_nanogpt: [STEPS], adversarial: [4, 4]}  # averages of every model


@dataclasses.dataclass
class Attached:
    """Attaches a codec, or none, and keeps what it attached to."""

    codec: str | None
    models: list[DistributedDataParallel] = dataclasses.field(default_factory=list)
    states: list[Any] = dataclasses.field(default_factory=list)

    def __call__(self, ddp: DistributedDataParallel, **options: Any) -> None:
        self.models.append(ddp)
        if self.codec is not None:
            self.states.append(hooked(ddp, self.codec, **options))


def case_loop(loop: Callable[[Attach], list[float]]) -> dict[str, Any]:
    answers = {}
    for codec in (None, "exact", "off", "q4"):
        torch.manual_seed(3)
        attach = Attached(codec)
        with warnings.catch_warnings():
            warnings.simplefilter("error", GradferryWarning)
            losses = loop(attach)
        answers[str(codec)] = {
            "losses": losses,
            "parameters": [bits(model.parameters()) for model in attach.models],
            "steps": [state.stats()["steps"] for state in attach.states],
        }
    return answers


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_trains_as_with_plain_ddp(world_of_2: World, loop: Any) -> None:
    first, second = world_of_2.run(case_loop, loop=loop)
    for answer in (first, second):
        for codec in ("exact", "off"):
            assert answer[codec]["losses"] == answer["None"]["losses"]
            assert answer[codec]["parameters"] == answer["None"]["parameters"]
            assert answer[codec]["steps"] == answer["q4"]["steps"] == LOOPS[loop]
    # A codec that is lossy trains otherwise, but on all ranks alike.
    assert first["q4"]["parameters"] == second["q4"]["parameters"]
    assert first["q4"]["losses"] != first["exact"]["losses"]


# --- every form of forward and backward pass ------------------------------------------------------

SIDE = 33


class Layers(nn.Module):
    """Layers with something curved between them, each under a checkpoint if there are such."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE)) for _ in range(3)
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, last = self.layers
        x = self._through(first, x)
        torch._dynamo.graph_break()
        x = self._through(second, x)
        torch._dynamo.graph_break()
        return self._through(last, x)

    def _through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return layer(x)
        # The layer's parameters are no arguments: their gradients come in the backward pass inside
        # the backward pass.
        return checkpoint(layer, x, use_reentrant=self.use_reentrant)


def plain(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def of_parameters_alone(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward(inputs=[*model.parameters()])


def gradient_penalty(model: nn.Module, x: torch.Tensor) -> None:
    y = model(x).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    (y + slope.square().sum()).backward()


def cleared(parameter: nn.Parameter) -> None:
    parameter.grad.zero_()


def with_hooks(change: Callable[[nn.Parameter], object]) -> Callable[[nn.Module, Any], None]:
    """On each gradient, when it has been accumulated."""

    def backward(model: nn.Module, x: torch.Tensor) -> None:
        hooks = [p.register_post_accumulate_grad_hook(change) for p in model.parameters()]
        plain(model, x)
        for hook in hooks:
            hook.remove()

    return backward


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager")


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@dataclasses.dataclass
class Way:
    backward: Callable[[nn.Module, Any], None] = plain
    use_reentrant: bool | None = None
    options: dict[str, bool] = dataclasses.field(default_factory=dict)  # of DDP
    before: Callable[[nn.Module], nn.Module] = lambda module: module  # what DDP gets
    after: Callable[[nn.Module], nn.Module] = lambda module: module  # what is called


STATIC, VIEWS = {"static_graph": True}, {"gradient_as_bucket_view": True}
WAYS = {
    "inputs=": Way(of_parameters_alone),
    "gradient penalty": Way(gradient_penalty),
    "penalty into views": Way(gradient_penalty, options=VIEWS),
    "reentrant": Way(use_reentrant=True),
    "reentrant in a static graph": Way(use_reentrant=True, options=STATIC),
    "not reentrant": Way(use_reentrant=False),
    "not reentrant in a static graph": Way(use_reentrant=False, options=STATIC),
    "None in a hook": Way(with_hooks(lambda p: setattr(p, "grad", None))),
    "zero_() in a hook": Way(with_hooks(cleared)),
    "compiled before DDP": Way(before=compiled),
    "compiled after DDP": Way(after=compiled),
    "compiled in place before DDP": Way(before=compiled_in_place),
    "compiled in place after DDP": Way(after=compiled_in_place),
}


@pytest.mark.parametrize(("way", "native"), rows(list(WAYS), (True, False)))
@on_ranks()
def test_every_form_of_a_pass_leaves_the_gradients_of_plain_ddp(way: str, native: bool) -> None:
    how = WAYS[way]
    torch._dynamo.reset()
    counters.clear()
    model = Layers(how.use_reentrant)
    # torch.compile cuts its graphs at buckets, of which the first must be the smallest.
    options = {"bucket_cap_mb": 25 if "compiled" in way else 0.01, **how.options}
    bare = DistributedDataParallel(copy.deepcopy(model), **options)
    ddp = DistributedDataParallel(how.before(model), **options)
    state = hooked(ddp, "exact", native=native)
    called = how.after(ddp)
    generator = torch.Generator().manual_seed(2 + dist.get_rank())
    for step in range(3):
        x = torch.randn(4, SIDE, generator=generator)
        for each in bare, called:
            each.zero_grad()
            how.backward(each, x.clone().requires_grad_())
        for one, other in zip(bare.parameters(), ddp.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad), step
    assert state.stats()["steps"] == 3
    assert (counters["stats"]["unique_graphs"] >= 3) == ("compiled" in way)
    torch._dynamo.reset()


# --- without an engine, and by hand --------------------------------------------------------------


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize(
    ("codec", "environment", "why"),
    [
        ("q4", {"GRADFERRY_DISABLE": "1"}, "GRADFERRY_DISABLE=1"),
        ("auto", {"GRADFERRY_DISABLE": "1"}, "GRADFERRY_DISABLE=1"),
        ("off", {}, "codec 'off'"),
    ],
    ids=["disabled", "auto disabled", "off"],
)
@on_ranks()
def test_hook_that_passes_through_gives_what_plain_ddp_gives(
    codec: str, environment: dict[str, str], why: str, native: bool
) -> None:
    """On the same buckets."""
    scenario = Scenario(WEIGHTS, native=native, codec=codec, ddp={"bucket_cap_mb": 0.02})
    with mock.patch.dict(os.environ, environment):
        run = Run(scenario)
    with mock.patch("scenario.attach"):
        plain = Run(scenario)
    for step in range(scenario.steps):
        for one, other in zip(run.step(step), plain.step(step), strict=True):
            assert one.tobytes() == other.tobytes()
    stats = run.state.stats()
    assert stats["wire_bytes"] == 0 or not environment
    if codec == "auto":
        assert stats["choice"] == {"codec": "off", "exchange": "flat", "reason": why}
    assert f"passes through ({why})" in str(run.state)


WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("wide", (3, 4099)))


# --- join() --------------------------------------------------------------------------------------

TWO = Scenario((Weight("first", (40, 40)), Weight("second", (50, 30))), error_feedback="both")


def case_thrown(scenario: Scenario) -> tuple[Outcome, dict[str, Any]]:
    """All ranks leave join() when the first has no more input, and go on together."""
    run, gradients = Run(scenario), []

    def until_the_end() -> None:
        with run.ddp.join(throw_on_early_termination=True):
            for step in range(2 + run.rank):
                gradients.append(run.step(step))

    outcome = attempt(until_the_end)
    gradients += [run.step(step) for step in range(2, scenario.steps)]
    return outcome, run.answer(gradients)


@pytest.mark.parametrize("passes", [1, 2])
def test_training_goes_on_after_an_early_termination(world_of_2: World, passes: int) -> None:
    scenario = dataclasses.replace(TWO, passes=passes)
    (ended, one), (told, other) = world_of_2.run(case_thrown, scenario=scenario)
    assert ended.error == told.error == "RuntimeError"
    assert ended.text.startswith("Rank 0 exhausted all inputs")
    assert told.text.startswith("Detected at least one rank that exhausted inputs")
    assert_bit_equal([one, other], scenario)
