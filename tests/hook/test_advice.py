"""Warnings about what does not go together: optimizers, rules, models that nothing compresses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gradferry
import pytest
import torch
from gradferry.reduction.advice import own_momenta
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from world import World


def warnings_of_steps(ddp: DistributedDataParallel, stepper: Any, word: str) -> list[str]:
    """Those with the word, from three steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            ddp(torch.ones(2, 40)).sum().backward()
            stepper.step()
    return [str(w.message) for w in caught if word in str(w.message)]


def case_warnings(codec: str, feedback: str, optimizer: str) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    gradferry.attach(ddp, codec, error_feedback=feedback)
    stepper = getattr(torch.optim, optimizer)(ddp.parameters(), lr=0.01)
    return warnings_of_steps(ddp, stepper, "error feedback")


@pytest.mark.parametrize(
    ("codec", "feedback", "optimizer", "warned"),
    [
        ("sign1", "auto", "AdamW", True),
        ("topk:ratio=0.01", "both", "Adam", True),
        ("rht:bits=2", "worker", "NAdam", True),
        ("sign1", "auto", "SGD", False),
        ("sign1", "owner", "AdamW", False),
        ("q4", "both", "AdamW", False),
    ],
)
def test_plain_adam_behind_a_coarse_codec_is_warned_about_once(
    world_of_2: World, codec: str, feedback: str, optimizer: str, warned: bool
) -> None:
    for texts in world_of_2.run(case_warnings, codec=codec, feedback=feedback, optimizer=optimizer):
        assert len(texts) == warned
        if warned:
            assert texts[0].startswith(f"{optimizer} trains worse behind {codec.split(':')[0]}")
            assert "gradferry.optim.momentum_mode(optimizer, state)" in texts[0]


def case_two_models() -> int:
    """Two watched models, one optimizer each: nothing breaks, each is warned about."""
    models = [DistributedDataParallel(nn.Linear(40, 40)) for _ in range(3)]
    for ddp in models:
        gradferry.attach(ddp, "sign1")
    steppers = [torch.optim.Adam(ddp.parameters()) for ddp in models]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ddp, stepper in [*zip(models, steppers, strict=True)] * 2:
            ddp(torch.ones(2, 40)).sum().backward()
            stepper.step()
    return sum("error feedback" in str(w.message) for w in caught)


def test_every_model_is_warned_about_once(world_of_2: World) -> None:
    assert world_of_2.run(case_two_models) == [3, 3]


def one_bit_adam(parameters: Any, state: Any) -> Any:
    return gradferry.optim.OneBitAdam(parameters, freeze_step=2, state=state)


def sgd(parameters: Any, state: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01)


def sgd_with_momentum(parameters: Any, state: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.8)


def adamw(parameters: Any, state: Any) -> Any:
    return torch.optim.AdamW(parameters)


def adamw_in_momentum_mode(parameters: Any, state: Any) -> Any:
    return gradferry.optim.momentum_mode(torch.optim.AdamW(parameters), state)


def nadam(parameters: Any, state: Any) -> Any:
    return torch.optim.NAdam(parameters, betas=(0.8, 0.9))


def rmsprop_with_momentum(parameters: Any, state: Any) -> Any:
    return torch.optim.RMSprop(parameters, momentum=0.5)


def sharded_adam(parameters: Any, state: Any) -> Any:
    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam)


def case_momentum_twice(make: Callable[..., Any], momentum: float | None) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    warmup = 2 if make is one_bit_adam else 0
    state = gradferry.attach(ddp, "q4", momentum=momentum, warmup_steps=warmup)
    return warnings_of_steps(ddp, make(ddp.parameters(), state), "twice")


@pytest.mark.parametrize(
    ("make", "momentum", "own"),
    [
        (sgd_with_momentum, 0.9, "SGD has momentum=0.8"),
        (adamw, 0.9, "AdamW has betas[0]=0.9"),
        (adamw_in_momentum_mode, 0.9, None),
        (nadam, 0.9, "NAdam has betas[0]=0.8"),
        (rmsprop_with_momentum, 0.9, "RMSprop has momentum=0.5"),
        (sharded_adam, 0.9, "Adam has betas[0]=0.9"),
        (sgd, 0.9, None),
        (one_bit_adam, 0.9, None),
        (sgd_with_momentum, None, None),
    ],
)
def test_momentum_on_both_sides_is_warned_about_once(
    world_of_2: World, make: Callable[..., Any], momentum: float | None, own: str | None
) -> None:
    for texts in world_of_2.run(case_momentum_twice, make=make, momentum=momentum):
        assert len(texts) == (own is not None), texts
        if own:
            assert texts[0].startswith(f"{own}, but behind attach(momentum=0.9)")
            assert "gradferry.optim.momentum_mode(optimizer, state)" in texts[0]


class Odd(torch.optim.Optimizer):
    """Keeps other things under the names of momenta."""

    takes_momentum = False

    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, []),
        ({"betas": 0.9, "momentum": "nesterov"}, []),
        ({"betas": None, "momentum": None}, []),
        ({"betas": (), "momentum": (0.9, 0.8)}, []),
        ({"betas": torch.tensor([0.9, 0.99])}, []),
        ({"betas": {"first": 0.9}, "momentum": torch.ones(3)}, []),
        ({"betas": (torch.tensor(0.5), torch.tensor(0.9))}, [("betas[0]", 0.5)]),
        ({"betas": [0.5], "momentum": True}, [("momentum", 1.0), ("betas[0]", 0.5)]),
        ({"betas": (0.0, 0.9), "momentum": 0}, []),
    ],
)
def test_momenta_of_any_optimizer_are_read(
    settings: dict[str, Any], found: list[tuple[str, float]]
) -> None:
    optimizer = Odd([nn.Parameter(torch.zeros(2))], settings)
    assert own_momenta(optimizer.param_groups[0]) == found


class Passes:
    """A training with a hook that delivers momentum; its methods are ways to take a step."""

    def __init__(self, make: Callable[..., Any], **options: Any) -> None:
        self.ddp = DistributedDataParallel(nn.Linear(40, 40))
        self.state = gradferry.attach(self.ddp, "q4", momentum=0.8, **options)
        self.optimizer = make(self.ddp.parameters(), lr=0.001)
        self.others = [torch.optim.SGD([p], lr=0.001) for p in self.ddp.parameters()]
        self.steps = 0

    def backward(self) -> torch.Tensor:
        loss = self.ddp(torch.ones(2, 40)).square().sum()
        loss.backward()
        return loss

    def one(self) -> None:
        self.backward()
        self.optimizer.step()

    def accumulated(self) -> None:
        self.backward()
        self.one()

    def accumulated_under_no_sync(self) -> None:
        with self.ddp.no_sync():
            self.backward()
        self.one()

    def sharpness_aware(self) -> None:
        """As SAM: the gradient that counts is that at the worst point nearby."""
        self.backward()
        with torch.no_grad():
            climbed = [p.grad.clone() for p in self.ddp.parameters()]
            for p, change in zip(self.ddp.parameters(), climbed, strict=True):
                p += change
        self.optimizer.zero_grad()
        self.backward()
        with torch.no_grad():
            for p, change in zip(self.ddp.parameters(), climbed, strict=True):
                p -= change
        self.optimizer.step()

    def dropped(self) -> None:
        """As a discriminator through which its generator's gradients pass."""
        self.backward()
        self.optimizer.zero_grad()
        self.one()

    def closure(self) -> None:
        def evaluate() -> torch.Tensor:
            self.optimizer.zero_grad()
            return self.backward()

        self.optimizer.step(evaluate)

    def several_optimizers(self) -> None:
        self.backward()
        for optimizer in self.others:
            optimizer.step()

    def loaded_once(self) -> None:
        if self.steps == 1:
            self.state.load_state_dict(self.state.state_dict() | {"steps": 500})
        self.steps += 1
        self.one()


def case_passes(
    step: str, make: Callable[..., Any], options: dict[str, Any]
) -> list[tuple[str, bool]]:
    """Warnings of five steps, and whether they name a line of this file."""
    training = Passes(make, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            getattr(training, step)()
    ours = [w for w in caught if "were synced" in str(w.message)]
    return [(str(w.message), w.filename == __file__) for w in ours]


SCALED = {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=1.0)}


@pytest.mark.parametrize(
    ("step", "make", "options", "warned"),
    [
        ("one", torch.optim.SGD, {}, None),
        ("accumulated", torch.optim.SGD, {}, "2 backward passes were synced since the last step "
         "of SGD"),
        ("accumulated_under_no_sync", torch.optim.SGD, {}, None),
        ("sharpness_aware", torch.optim.SGD, {}, "2 backward passes"),
        ("dropped", torch.optim.SGD, {}, "2 backward passes"),
        ("dropped", torch.optim.SGD, SCALED, None),  # it may skip steps
        ("closure", torch.optim.SGD, {}, None),
        ("closure", torch.optim.LBFGS, {}, "the last step of LBFGS"),
        ("several_optimizers", torch.optim.SGD, {}, None),
        ("loaded_once", torch.optim.SGD, {}, None),
    ],
)  # fmt: skip
def test_several_synced_passes_per_step_in_momentum_mode_are_warned_about_once(
    world_of_2: World,
    step: str,
    make: Callable[..., Any],
    options: dict[str, Any],
    warned: str | None,
) -> None:
    for found in world_of_2.run(case_passes, step=step, make=make, options=options):
        assert len(found) == (warned is not None), found
        for text, at_a_line_of_ours in found:
            assert warned in text
            assert "every synced pass moves the momentum on" in text
            assert "under no_sync()" in text
            assert at_a_line_of_ours


class Words(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32, dtype=dtype)
        self.encoder = nn.ModuleDict({"embedding": nn.Linear(32, 64, dtype=dtype)})


def norm() -> nn.Module:
    return nn.LayerNorm(4096)


def tiny() -> nn.Module:
    return nn.Linear(8, 8)


def doubles() -> nn.Module:
    return Words(torch.float64)


def case_attach_warnings(
    make: Callable[[], nn.Module], codec: str, rules: list[dict[str, Any]], native: bool = True
) -> list[tuple[str, bool]]:
    """What attach() warns of, and whether it names the line that attaches."""
    ddp = DistributedDataParallel(make())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if native:
            gradferry.attach(ddp, codec, rules=rules)
        else:
            gradferry.HookState(codec, ddp, rules=rules)
    ours = [w for w in caught if "compressed" in str(w.message) or "rules[" in str(w.message)]
    return [(str(w.message), w.filename == __file__) for w in ours]


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        ({"name": "*embedding*"}, None),  # as in the README
        ({"name": "embedding.*"}, None),
        ({"max_dims": 1}, None),
        ({"name": "*.embeding.*"}, ("'embedding.weight'", "'encoder.embedding.weight'", "whole")),
        ({"name": "encoder.embeddings.*"}, ("'encoder.embedding.weight'", "*embedding*")),
        ({"name": "zzzz"}, ("'zzzz'", "covers the whole name")),
        ({"name": "embedding.*", "min_dims": 3}, ("none has these dimensions", "'min_dims': 3")),
        ({"min_size": 10**9}, ("'min_size': 1000000000",)),
    ],
)
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_a_rule_without_a_parameter_is_warned_about(
    world_of_2: World, rule: dict[str, Any], parts: tuple[str, ...] | None, native: bool
) -> None:
    rules = [{"codec": "q8", **rule}, {"name": "*", "codec": "q4"}]
    for warned in world_of_2.run(
        case_attach_warnings, make=Words, codec="q4", rules=rules, native=native
    ):
        assert len(warned) == (parts is not None), warned
        for text, at_the_call in warned:
            assert at_the_call
            assert text.startswith("rules[0]={")
            for part in parts or ():
                assert part in text, text


@pytest.mark.parametrize(
    ("make", "codec", "rules", "expected"),
    [
        (doubles, "q4", [], "(3 of float64 or complex)"),
        (norm, "sign1", [], "(2 of at most 1 dimension)"),
        (
            tiny,
            "auto",
            [],
            "(1 of fewer than 1024 elements, 1 of at most 1 dimension)",
        ),
        (
            Words,
            "q4",
            [{"min_dims": 2, "codec": "exact"}],
            "(2 by your rules, 1 of at most 1 dimension)",
        ),
        (Words, "q4", [{"codec": "exact"}], None),
        (norm, "exact", [], None),
        (norm, "q4", [{"codec": "q4"}], None),
        (Words, "q4", [], None),
    ],
)
def test_a_model_that_nothing_compresses_is_warned_about(
    world_of_2: World,
    make: Callable[[], nn.Module],
    codec: str,
    rules: list[dict[str, Any]],
    expected: str | None,
) -> None:
    for warned in world_of_2.run(case_attach_warnings, make=make, codec=codec, rules=rules):
        assert len(warned) == (expected is not None), warned
        if expected:
            assert expected in warned[0][0], warned
            assert warned[0][1]


def test_a_world_of_one_compresses_nothing_anyway(worlds: Callable[[int], World]) -> None:
    assert worlds(1).run(case_attach_warnings, make=norm, codec="q4", rules=[]) == [[]]
