"""What attach has checked and changes later, and hooks that are not called while a model trains."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from scenario import hooked
from stepping import logged, texts
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SGD = torch.optim.SGD


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))


def inputs(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    return torch.randn(4, 40, generator=generator).to(dtype)


class Training:
    """Steps of one model. `forward` is called instead of the DistributedDataParallel."""

    def __init__(self, **ddp: Any) -> None:
        self.model = layers()
        self.ddp = DistributedDataParallel(self.model, **ddp)
        self.forward: Callable[..., torch.Tensor] = self.ddp
        self.steps = 0

    def train(self, steps: int, make: Callable[..., Any] = SGD) -> None:
        """With a new optimizer, over the parameters that the model has now."""
        optimizer = make(self.ddp.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            x = inputs(self.steps, next(self.model.parameters()).dtype)
            self.forward(x).square().mean().backward()
            optimizer.step()
            self.steps += 1


def attached(**options: Any) -> Training:
    training = Training()
    hooked(training.ddp, **options)
    return training


def assign(model: nn.Sequential) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def new_head(model: nn.Sequential) -> None:
    model[2] = nn.Linear(40, 40)


def add_layer(model: nn.Sequential) -> None:
    model.append(nn.Linear(40, 40))


def unfreeze(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)


def to_double(model: nn.Sequential) -> None:
    model.to(torch.float64)


def converted_and_back(model: nn.Sequential) -> None:
    """Autograd has made new nodes that accumulate gradients; DDP waits for the old ones."""
    model.to(torch.bfloat16).to(torch.float32)


# By what is done to the model: the parameter that is named, and what is said of it.
CHANGES = {
    assign: ("'0.weight'", "was replaced after attach"),
    new_head: ("'2.weight'", "was replaced after attach"),
    add_layer: ("'3.weight'", "was added, or unfrozen, after attach"),
    unfreeze: ("'0.weight'", "was added, or unfrozen, after attach"),
}


def changed(
    change: Callable[[nn.Sequential], None], every: int, on: tuple[int, ...] = (0, 1)
) -> tuple[Outcome, int]:
    """What training says after a change on some ranks, and after how many more steps."""
    training = Training(find_unused_parameters=change is new_head)
    if change is unfreeze:
        training.model[0].requires_grad_(False)
        training.ddp = training.forward = DistributedDataParallel(training.model)
    hooked(training.ddp, check_every=every)
    training.train(2)
    if dist.get_rank() in on:
        change(training.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # after three steps, where no bucket comes
        outcome = attempt(lambda: training.train(8))
    return outcome, training.steps - 2


@pytest.mark.torch_core
@pytest.mark.parametrize("change", CHANGES)
@on_ranks()
def test_check_names_the_parameter_that_is_not_that_of_attach(
    change: Callable[[nn.Sequential], None],
) -> None:
    for every in (1, 4) if change in (assign, add_layer) else (4,):
        outcome, steps = changed(change, every)
        assert outcome.error == "StateError", outcome.text
        name, what = CHANGES[change]
        assert outcome.text.startswith(f"parameter {name} {what}"), outcome.text
        assert "build a new DistributedDataParallel" in outcome.text
        # At the next bucket of a step that `every` divides, or, where none comes, in the third
        # silent step of an optimizer: the fourth of one that begins here.
        assert steps == (3 if change is assign else {1: 0, 4: 2}[every])


@on_ranks()
def test_change_on_one_rank_ends_the_others() -> None:
    outcome, steps = changed(add_layer, every=1, on=(0,))
    # Where one rank fails, the others get its text.
    assert outcome.error == ("StateError", "PeerError")[dist.get_rank()]
    assert steps == 0
    assert f"parameter {CHANGES[add_layer][0]}" in outcome.headline


@on_ranks()
def test_what_trains_as_before_is_no_change() -> None:
    """Changes that leave the ranks equal, or that were known; every one with check_every=1."""
    training = Training(find_unused_parameters=True)
    hooked(training.ddp, check_every=1)
    training.train(1)
    training.model[0].requires_grad_(False)  # DDP still reduces it
    training.train(3)
    training.model[0].requires_grad_(True)
    training.train(3)
    del training.model[0]  # the others train as before
    training.train(3)

    model = layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    training = Training.__new__(Training)
    training.model, training.steps = model, 0
    training.ddp = training.forward = DistributedDataParallel(model)
    model[0].bias.requires_grad_(True)
    hooked(training.ddp, check_every=1)
    training.train(1)
    model[2].bias = nn.Parameter(torch.zeros(40))
    training.train(3)

    # A layer that trained apart at attach, which warned, diverges: that is not compared.
    training = Training()
    training.model[0].requires_grad_(False)
    training.ddp = training.forward = DistributedDataParallel(training.model)
    unfreeze(training.model)
    with texts(__file__) as said:
        gradferry.attach(training.ddp, "q4", check_every=1)  # warns about this line
    training.train(3)
    assert len(said) == 1


@on_ranks()
def test_checks_follow_the_steps_of_a_loaded_state() -> None:
    """A state of earlier steps is loaded, or not. Both checks are due at a multiple of 4: after
    step 3 of the state at 4, after step 9 at 12.
    """
    for saved_first, steps in ((True, 1), (False, 3)):
        training = Training()
        state = hooked(training.ddp, check_every=4)
        training.train(3)
        saved = state.state_dict()
        training.train(6)
        if saved_first:
            state.load_state_dict(saved)
        add_layer(training.model)
        before = training.steps
        assert attempt(lambda t=training: t.train(8)).error == "StateError"
        assert training.steps - before == steps


@pytest.mark.torch_core
@pytest.mark.parametrize(
    "kind", [{}, {"codec": "off", "native": False}], ids=["native", "python, off"]
)
@on_ranks()
def test_hook_that_is_no_longer_called_is_warned_about_once(kind: dict[str, Any]) -> None:
    """From the third of its silent steps on; rank 0 logs it."""
    training = attached(**kind)
    optimizer = SGD(training.model.parameters(), lr=0.01)
    said = []
    with logged() as log:
        for steps in (4, 2, 1, 4):
            with texts(__file__) as found:
                training.train(steps, lambda *_, **__: optimizer)
            said.append(found)
            training.forward = training.model
    before, two, (text,), more = said
    assert before == two == more == []
    assert log == ([text] if dist.get_rank() == 0 else [])
    assert text.startswith("SGD ")
    assert "not averaged, and ranks drift apart" in text
    assert "forward pass through itself, not through ddp.module" in text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (assign, "parameter '0.weight' was replaced after attach"),
        (to_double, "while parameters have the dtype"),
        (converted_and_back, "while parameters have the dtype"),
    ],
)
@on_ranks()
def test_what_the_hook_is_not_called_for_is_named(change: Any, why: str) -> None:
    training = attached()
    training.train(2)
    change(training.model)
    with texts(__file__) as said:
        training.train(8)
    (text,) = said
    assert why in text


@pytest.mark.parametrize("everywhere", [True, False])
@on_ranks()
def test_optimizer_in_backward_ends_all_ranks(everywhere: bool) -> None:
    """It steps on the gradients of its rank, before they are averaged."""
    training = attached()
    optimizer = SGD(training.ddp.parameters(), lr=0.01)
    mine = everywhere or dist.get_rank() == 0
    if mine:
        training.model[2].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with training.ddp.no_sync():  # as in local SGD, where that is meant
        training.train(2, lambda *_, **__: optimizer)
    outcome = attempt(lambda: training.ddp(inputs(0)).sum().backward())
    assert outcome.error == ("StateError" if mine else "PeerError")
    assert "SGD steps inside the backward pass" in outcome.text
    assert "Call step() after backward()" in outcome.text


@on_ranks()
def test_state_without_its_hook_is_warned_about_once() -> None:
    training = Training()
    state = gradferry.HookState("q4", training.ddp)
    optimizer = SGD(training.ddp.parameters(), lr=0.01)
    with texts(__file__) as said:
        training.train(13, lambda *_, **__: optimizer)
    assert state.stats()["buckets"] == 0
    (text,) = said
    assert "ddp.register_comm_hook(state, gradferry.hook)" in text


@pytest.mark.torch_core
@on_ranks()
def test_steps_without_a_pass_that_are_meant_raise_no_alarm() -> None:
    """Trainings in which optimizers step more often than a hook is called, as they should. Others
    are in test_training_loops.py and, with sharded optimizers, in test_divided_models.py.
    """
    with texts(__file__) as said:
        generator, discriminator = attached(), attached()
        one, two = (SGD(each.ddp.parameters(), lr=0.01) for each in (generator, discriminator))
        for step in range(20):
            one.zero_grad()
            two.zero_grad()
            made = generator.ddp(inputs(step))
            if step % 10 == 9:
                discriminator.ddp(made).sum().backward()
                one.step()
            else:
                discriminator.ddp(made.detach()).sum().backward()
                two.step()
        # One optimizer for two models.
        models = attached(), attached()
        both = SGD([p for each in models for p in each.ddp.parameters()], lr=0.01)
        for step in range(20):
            both.zero_grad()
            models[step // 10].ddp(inputs(step)).sum().backward()
            both.step()
        # Four optimizers for one model.
        training = attached()
        parts = [SGD([p], lr=0.01) for p in training.ddp.parameters()]
        for step in range(5):
            training.ddp(inputs(step)).sum().backward()
            for part in parts:
                part.step()
        # Local SGD.
        training = attached()
        optimizer = SGD(training.ddp.parameters(), lr=0.01)
        for step in range(16):
            inside = step % 8 < 4
            with training.ddp.no_sync():
                training.ddp(inputs(step)).sum().backward()
                if inside:
                    optimizer.step()
            if not inside:
                optimizer.step()
        # Evaluations.
        for step in range(8):
            training.ddp(inputs(step)).sum().backward()
            with training.ddp.no_sync(), torch.no_grad():
                training.ddp(inputs(step))
            optimizer.step()
        training = attached()
        with training.ddp.join():
            training.train(2 + 6 * dist.get_rank())
    assert said == []


@on_ranks()
def test_model_that_was_replaced_and_is_kept_raises_no_alarm() -> None:
    with texts(__file__) as said:
        training = attached(check_every=5)
        training.train(2)
        assign(training.model)
        kept = training.ddp
        training.ddp = training.forward = DistributedDataParallel(training.model)
        hooked(training.ddp)
        with training.ddp.no_sync():
            training.train(4)  # as in local SGD
        training.train(7)
    assert said == []
    assert kept.module is training.model
