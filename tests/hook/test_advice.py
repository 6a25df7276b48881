"""Warnings about what does not go together: optimizers, rules, models that nothing compresses."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gradferry
import pytest
import torch
from gradferry.averaging.advice import own_momenta, warn_about_messages
from gradferry.core.codec_spec import parse_codec
from gradferry.core.nodes import Nodes, flat
from gradferry.optim import OneBitAdam, momentum_mode
from on_ranks import on_ranks
from scenario import hooked
from stepping import warned
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

Optimizer = Callable[..., torch.optim.Optimizer]


def linear(codec: str, **options: Any) -> tuple[DistributedDataParallel, Any]:
    """A layer, and the state of its hook."""
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    return ddp, hooked(ddp, codec, **options)


@pytest.mark.parametrize(
    ("codec", "feedback", "optimizer", "warned_about"),
    [
        ("sign1", "auto", "AdamW", 2),
        ("rht:bits=2", "worker", "NAdam", 2),
        ("sign1", "auto", "SGD", 0),
        ("sign1", "owner", "AdamW", 0),
        ("q4", "both", "AdamW", 0),
    ],
)
@on_ranks()
def test_plain_adam_behind_a_coarse_codec_is_warned_about_once_per_model(
    codec: str, feedback: str, optimizer: str, warned_about: int
) -> None:
    """Two models take their steps in turns."""
    ddps = [linear(codec, error_feedback=feedback)[0] for _ in range(2)]
    steppers = [getattr(torch.optim, optimizer)(ddp.parameters(), lr=0.01) for ddp in ddps]
    with warned() as caught:
        for ddp, stepper in [*zip(ddps, steppers, strict=True)] * 3:
            ddp(torch.ones(2, 40)).sum().backward()
            stepper.step()
    texts = [str(w.message) for w in caught if "error feedback" in str(w.message)]
    assert len(texts) == warned_about
    for text in texts:
        assert text.startswith(f"{optimizer} trains worse behind {codec.split(':')[0]}")


# By name: how an optimizer is made, the hook's momentum, and what is said of the optimizer's own.
MOMENTA: dict[str, tuple[Optimizer, float | None, str | None]] = {
    "SGD": (lambda p, _: torch.optim.SGD(p, lr=0.01), 0.9, None),
    "SGD with momentum": (
        lambda p, _: torch.optim.SGD(p, lr=0.01, momentum=0.8), 0.9, "SGD has momentum=0.8",
    ),
    "SGD alone": (lambda p, _: torch.optim.SGD(p, lr=0.01, momentum=0.8), None, None),
    "AdamW in momentum mode": (
        lambda p, state: momentum_mode(torch.optim.AdamW(p), state), 0.9, None,
    ),
    "NAdam": (
        lambda p, _: torch.optim.NAdam(p, betas=(0.8, 0.9)), 0.9, "NAdam has betas[0]=0.8",
    ),
    "sharded Adam": (
        lambda p, _: ZeroRedundancyOptimizer(p, optimizer_class=torch.optim.Adam),
        0.9,
        "Adam has betas[0]=0.9",
    ),
    "OneBitAdam": (lambda p, state: OneBitAdam(p, freeze_step=2, state=state), 0.9, None),
}  # fmt: skip


@pytest.mark.parametrize("name", MOMENTA)
@on_ranks()
def test_momentum_on_both_sides_is_warned_about_once(name: str) -> None:
    make, momentum, own = MOMENTA[name]
    warmup = 2 if name == "OneBitAdam" else 0
    ddp, state = linear("q4", momentum=momentum, warmup_steps=warmup)
    stepper = make(ddp.parameters(), state)
    with warned() as caught:
        for _ in range(3):
            ddp(torch.ones(2, 40)).sum().backward()
            stepper.step()
    texts = [str(w.message) for w in caught if "twice" in str(w.message)]
    assert len(texts) == (own is not None), texts
    for text in texts:
        assert text.startswith(f"{own}, but behind attach(momentum=0.9)")
        assert "gradferry.optim.momentum_mode(optimizer, state)" in text


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
        ({"betas": (), "momentum": (0.9, 0.8)}, []),
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


class Words(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32, dtype=dtype)
        self.encoder = nn.ModuleDict({"embedding": nn.Linear(32, 64, dtype=dtype)})


def attach_warnings(
    make: Callable[[], nn.Module], codec: str, rules: list[dict[str, Any]], native: bool = True
) -> list[tuple[str, bool]]:
    """What attach() warns of, and whether it names the line that attaches."""
    ddp = DistributedDataParallel(make())
    with warned() as caught:
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
        ({"max_dims": 1}, None),
        ({"name": "*.embeding.*"}, ("'encoder.embedding.weight'", "whole", "'*.embeding.*'")),
        (
            {"name": "embedding.*", "min_dims": 3},
            ("none has these dimensions", "'min_dims': 3"),
        ),
    ],
)
@on_ranks()
def test_a_rule_without_a_parameter_is_warned_about(
    rule: dict[str, Any], parts: tuple[str, ...] | None
) -> None:
    rules = [{"codec": "q8", **rule}, {"name": "*", "codec": "q4"}]
    found = attach_warnings(Words, "q4", rules, native=parts is None or "whole" in parts)
    assert len(found) == (parts is not None), found
    for text, at_the_call in found:
        assert at_the_call
        assert text.startswith("rules[0]={")
        for part in parts or ():
            assert part in text, text


NORM = functools.partial(nn.LayerNorm, 4096)
TINY = functools.partial(nn.Linear, 8, 8)
DOUBLES = functools.partial(Words, torch.float64)


@pytest.mark.parametrize(
    ("make", "codec", "rules", "expected"),
    [
        (DOUBLES, "q4", [], True),
        (NORM, "sign1", [], True),
        (TINY, "auto", [], True),
        (Words, "q4", [{"min_dims": 2, "codec": "exact"}], True),
        (Words, "q4", [{"codec": "exact"}], False),
        (NORM, "exact", [], False),
        (NORM, "q4", [{"codec": "q4"}], False),
        (Words, "q4", [], False),
    ],
)
@on_ranks()
def test_a_model_that_nothing_compresses_is_warned_about(
    make: Any, codec: str, rules: list[dict[str, Any]], expected: bool
) -> None:
    found = attach_warnings(make, codec, rules)
    assert len(found) == expected, found
    for text, at_the_call in found:
        assert f"nothing is compressed by {codec!r}" in text
        assert at_the_call


@on_ranks(1)
def test_a_world_of_one_compresses_nothing_anyway() -> None:
    assert attach_warnings(NORM, "q4", []) == []


@pytest.mark.parametrize(
    ("ranks", "members", "text"),
    [
        (400, None, None),
        (2048, None, "about 1,712 bytes, .* bucket_cap_mb=120, or give nodes="),
        (2048, 8, "about 1,712 bytes, .* bucket_cap_mb=120$"),
    ],
)
def test_short_messages_are_warned_about(ranks: int, members: int | None, text: str | None) -> None:
    nodes = flat(ranks)
    if members:
        nodes = Nodes(tuple(tuple(range(r, r + members)) for r in range(0, ranks, members)))
    parameter = SimpleNamespace(num_elements=1 << 28, dtype=torch.float32, codec=parse_codec("q4"))
    running: Any = SimpleNamespace(
        parameters=[parameter],
        world_size=ranks,
        transport=SimpleNamespace(exchanges=True),
        exchange=SimpleNamespace(nodes=nodes),
        codec_asked_for="q4",
    )
    with warned() as caught:
        warn_about_messages(running, 25 << 20)
    assert bool(caught) == bool(text)
    assert text is None or re.search(text, str(caught[0].message))
