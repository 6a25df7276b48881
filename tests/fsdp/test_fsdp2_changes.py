"""What others change of an FSDP2 model after `gradferry.fsdp.attach`: parameters that are moved or
written to, facts that FSDP2 settles in the first pass, passes that are broken off.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gathering import ONLY_GATHERS, Watch, built, differing, masters, targets_of
from gathering import used_in_backward as used
from on_ranks import on_ranks
from outcomes import attempt
from sharding import Sharding, bits, in_order
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint
from world import World

TWO = Sharding(1, 2, whole=True)
EXACT = {"codec": "exact", "all_gather": "exact"}


def two(**options: Any) -> tuple[Any, Any]:
    model = TWO.model(TWO.mesh()["shard"])
    return model, gradferry.fsdp.attach(model, **{**EXACT, **options})


# --- moves ----------------------------------------------------------------------------------------

MOVES: dict[str, Callable[[Any], object]] = {
    "cpu": lambda model: model.cpu(),
    "to": lambda model: model.to("cpu"),
    "there and back": lambda model: model.double().float(),
    "state": lambda model: model.load_state_dict(model.state_dict()),
    "one block": lambda model: model.blocks[1].bfloat16().float(),
}


def case_moved(seed: int, compressed: bool) -> bytes:
    """Parameters after steps between which the model is moved and comes back."""
    rng = random.Random(seed)
    model = two()[0] if compressed else TWO.model(TWO.mesh()["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    for step in range(5):
        MOVES[rng.choice(list(MOVES))](model)
        TWO.backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return bits(model)


@pytest.mark.torch_core
@pytest.mark.parametrize("seed", range(2))
def test_a_model_that_is_moved_and_comes_back_goes_on(world_of_2: World, seed: int) -> None:
    ours, theirs = (
        world_of_2.run(case_moved, seed=seed, compressed=each) for each in (True, False)
    )
    assert ours == theirs


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@on_ranks(2)
def test_a_parameter_that_is_left_elsewhere_is_named(ranks: tuple[int, ...]) -> None:
    model, _ = two()
    TWO.backward(model, 0)
    if dist.get_rank() in ranks:
        model.blocks[1].bfloat16()
    outcomes = [attempt(lambda: TWO.backward(model, 1)) for _ in range(2)]
    assert outcomes[0].error == ("StateError" if dist.get_rank() in ranks else "PeerError")
    for outcome in outcomes:
        assert "'weight' is torch.bfloat16 on cpu, and was torch.float32 on cpu" in outcome.text


# --- what FSDP2 settles in the first pass ---------------------------------------------------------


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 48, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).abs().sum()


def case_gradients(kind: str, compressed: bool) -> list[tuple[str, np.ndarray]]:
    """Of two passes, with their dtypes, or the error of FSDP2: torch 2.11 has some for another
    grad_dtype than that of the gradients. `kind`: complex, or the grad_dtype that parameters get.
    """
    mesh = TWO.mesh()["shard"]
    if kind == "complex":
        model: Any = fully_shard(Complex(), mesh=mesh)
        batch: Any = torch.full((48,), 2.0 + dist.get_rank(), dtype=torch.complex64)
    else:
        model = Sharding(1, 2, dtype=torch.bfloat16, whole=True).model(mesh)
        batch = Sharding(1, 2, dtype=torch.bfloat16, whole=True).targets(0, 0, dist.get_rank())
        for parameter in model.parameters():
            parameter.grad_dtype = None if kind == "any" else getattr(torch, kind)
    if compressed:
        gradferry.fsdp.attach(model, "exact", all_gather="off")
    found = []
    for _ in range(2):
        model.zero_grad()
        try:
            model(batch).backward()
        except RuntimeError as error:
            return [(str(error), np.zeros(0))]
        grads = [p.grad.to_local() for p in in_order(model)]
        found += [
            (str(grad.dtype), torch.view_as_real(grad.to(torch.complex64)).numpy().copy())
            for grad in grads
        ]
    return found


@pytest.mark.torch_core
@pytest.mark.parametrize("kind", ["complex", "float32", "bfloat16", "any"])
def test_gradients_have_the_dtype_that_fsdp2_settles(world_of_2: World, kind: str) -> None:
    if kind != "complex" and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    ours, theirs = (
        world_of_2.run(case_gradients, kind=kind, compressed=each) for each in (True, False)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert [dtype for dtype, _ in one] == [dtype for dtype, _ in other]
        assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True))


FACTS: dict[str, Callable[[Any], object]] = {
    "reshard_after_forward of 'blocks.1'": lambda m: m.blocks[1].set_reshard_after_forward(False),
    "reshard_after_backward of 'blocks.0'": lambda m: m.blocks[0].set_reshard_after_backward(False),
    "unshard_in_backward of 'blocks.0'": lambda m: m.blocks[0].set_unshard_in_backward(False),
}


@pytest.mark.parametrize("fact", FACTS)
@on_ranks(2)
def test_ranks_that_would_call_other_collectives_are_named(fact: str) -> None:
    model, _ = two()
    if dist.get_rank() == 1:
        FACTS[fact](model)
    outcomes = [attempt(lambda: TWO.backward(model, 0)) for _ in range(2)]
    assert outcomes[0].error == "RankMismatchError"
    assert outcomes[1].error
    assert f"rank 1 differs from rank 0 in {fact}" in outcomes[0].text


# --- kept gathers ---------------------------------------------------------------------------------


def change(model: Any, parameters: list[Any], how: str) -> None:
    with torch.no_grad():
        if how == "data":
            for parameter in parameters:
                parameter.data.mul_(1.25)
        elif how == "foreach":
            torch._foreach_mul_(parameters, 1.25)
        elif how == "load":
            state = {name: 1.25 * value for name, value in model.state_dict().items()}
            model.load_state_dict(state)
        else:
            for parameter in parameters:
                parameter.mul_(1.25)


@pytest.mark.torch_core
@pytest.mark.parametrize("seed", range(3))
@on_ranks(4)
def test_kept_gathers_never_answer_for_parameters_that_were_changed(seed: int) -> None:
    """Drawn are the moment of changes, their kind, and evaluations in between."""
    rng = random.Random(seed)
    model = built()
    gradferry.fsdp.attach(model, all_gather="q4", keep_gathered=True, **ONLY_GATHERS)
    parameters = in_order(model)  # as optimizers have them

    def meddle() -> None:
        for _ in range(rng.randrange(3)):
            change(model, parameters, rng.choice(["data", "foreach", "load", "mul_"]))
            if rng.random() < 0.5:
                with torch.no_grad():
                    model(targets_of(model, torch.float32))

    for step in range(6):
        meddle()
        targets = targets_of(model, torch.float32)
        loss = model(targets)
        meddle()
        loss.backward()
        blocks = {name: each for name, each in used(targets).items() if "blocks" in name}
        assert differing(blocks, masters(model), "q4", torch.float32, {}) == [], (seed, step)


@pytest.mark.torch_core
@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(4)
def test_kept_gathers_answer_passes_that_checkpointing_repeats(reentrant: bool) -> None:
    model: Any = built()
    state = gradferry.fsdp.attach(model, all_gather="q8", keep_gathered=True, **ONLY_GATHERS)
    watch, wholes, sent = Watch(model), masters(model), []
    for _ in range(2):
        targets = targets_of(model, torch.float32)
        flag = torch.ones((), requires_grad=True)
        loss = sum(checkpoint(lambda f, b=b, t=targets[f"blocks.{i}"]: f * b(t), flag,
                              use_reentrant=reentrant)
                   for i, b in enumerate(model.blocks))  # fmt: skip
        sent.append(state.stats()["wire_bytes"])
        loss.backward()
        sent.append(state.stats()["wire_bytes"])
        assert not differing(watch.seen, wholes, "q8", torch.float32, {})
    assert 0 < sent[0] == sent[1] < sent[2] == sent[3]


# --- passes that are broken off, and gathers for nothing ------------------------------------------


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this torch does not recover"
)
@pytest.mark.parametrize("seed", range(3))
@on_ranks(2)
def test_a_state_can_be_saved_after_fsdp2s_own_recovery(seed: int) -> None:
    """From an exception in a drawn module."""
    rng = random.Random(seed)
    model, state = two(codec="q4", scatter_feedback="worker")

    def stop(_: torch.Tensor) -> None:
        raise ArithmeticError

    TWO.backward(model, 0)
    targets = TWO.targets(1, 0, dist.get_rank())
    part = targets[rng.choice(list(targets))]
    name = rng.choice(list(part))
    part[name] = part[name].requires_grad_()
    part[name].register_hook(stop)
    with pytest.raises(ArithmeticError):
        model(targets).backward()
    model.reset_iter_state()
    before = next(iter(state.state_dict().values()))["steps"]
    assert before in (1, 2)
    state.load_state_dict(state.state_dict())
    TWO.backward(model, 2)
    assert next(iter(state.state_dict().values()))["steps"] == before + 1


@pytest.mark.torch_core
@on_ranks(4)
def test_a_gather_that_nobody_has_used_is_of_no_later_pass() -> None:
    """A module that is gathered ahead and left out, within and before exact gathers."""
    model: Any = built("wide")
    state = gradferry.fsdp.attach(model, all_gather="q4", **ONLY_GATHERS)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    watch, wholes = Watch(model), masters(model)

    def forward(codec: str, leaves_out: bool) -> None:
        targets, watch.seen = targets_of(model, torch.float32), {}
        if leaves_out:
            targets["blocks.1"] = {}
        with torch.no_grad():
            model(targets)
        assert differing(watch.seen, wholes, codec, torch.float32, {}) == []

    forward("q4", leaves_out=True)
    with state.exact_gathers():
        forward("exact", leaves_out=False)
        forward("exact", leaves_out=True)
    forward("q4", leaves_out=False)
