"""doctor: tries hooks on copies of a model, and says in one sentence which to use."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry.core.codec_spec import parse_codec
from gradferry.ddp.trial import (
    COUNTED_STEPS,
    SETTLING_STEPS,
    Candidate,
    Interval,
    Outcome,
)
from gradferry.diagnosis import TORCH_DTYPES, Diagnosis, Step, advise, examine
from gradferry.errors import ConfigError
from on_ranks import on_ranks
from stepping import bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def outcomes(ms: dict[str, Any]) -> list[Outcome]:
    """By "hook" or "hook exchange"; the time of five steps, or those of each."""
    found = []
    for name, value in ms.items():
        hook, _, exchange = name.partition(" ")
        backend = hook in TORCH_DTYPES
        bits = 8.0 * TORCH_DTYPES[hook].itemsize if backend else parse_codec(hook).bits()
        candidate = Candidate(hook, bits, exchange or None, needs_memory=not backend)
        steps = value if isinstance(value, tuple) else (value,) * 5
        found.append(Outcome(candidate, (tuple(1e-3 * ms for ms in steps),)))
    return found


# What a verdict begins with and, after "...", what else it says. A step without communication takes
# 90 ms.
@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (
            {"torch:fp32": 100.2, "torch:bf16": 100.1, "q4": 100.3},
            "Do not compress: ...torch:fp32 takes 100.2 ms...90.0 ms...the fastest codec, q4 100.3",
        ),
        (
            {"torch:fp32": 150, "torch:bf16": 120, "q4": 130},
            "Use torch:bf16: ...1.25 times as long.",
        ),
        ({"torch:fp32": 900, "torch:bf16": 500, "q8": 171, "q4": 170}, "Use q8: ...5.26 times"),
        (
            {"torch:fp32": 900, "q4 flat": 300, "q4 two-level": 150},
            "Use q4 (two-level): it takes 150.0 ms per step...attach with nodes=2.",
        ),
        # Where steps leave the order open nothing is compressed.
        (
            {"torch:fp32": 300, "q8": (90, 95, 100, 105, 110), "q4": (80, 100, 110, 120, 140)},
            "Use q8: ...3.00 (2.73..3.33) times as long",
        ),
        (
            {"torch:fp32": (90, 95, 100, 105, 130), "q8": 95, "q4": (80, 85, 90, 95, 140)},
            "Do not compress: ...q4 90.0 (80.0..140.0) ms",
        ),
        # The fastest hook needs momentum mode. An outer step is a twentieth of 40 inner ones.
        (
            {"torch:fp32": 900, "q4": 180, "sign1": 110},
            "Use q4: ...5.00 times as long; none of these keeps up...from sync_every=40 on.",
        ),
    ],
)
def test_the_verdict_is_one_sentence_and_names_what_it_rests_on(ms: Any, said: str) -> None:
    verdict = advise(outcomes(ms), 0.09, {"two-level": 2})
    first, *others = said.split("...")
    # Numbers like (2.14..3.75) have two dots alone.
    assert verdict.startswith(first)
    places = [verdict.index(other) for other in others]
    assert places == sorted(places)
    assert verdict.endswith(".")
    assert ("keeps up" in verdict) == ("keeps up" in said)


def test_the_text_has_the_verdict_first_and_every_hook() -> None:
    steps = (
        Step("sign1", None, 0.1, Interval(8, 7, 9), 5, 1000, is_advised=False),
        Step("q4", "two-level", 0.2, Interval(4, 3.5, 4.25), 5, 4000, is_advised=True),
        Step("torch:fp32", None, 0.8, Interval(1, 1, 1), 2, 32000, is_advised=True),
    )
    found = Diagnosis("Use q4.", steps, 0.09, 4, 2, 1000, "cpu")
    lines = str(found).splitlines()
    assert max(map(len, lines[:7])) <= 80
    assert lines[:7] == [
        "Use q4.",
        "",
        "hook                  ms per step       times faster  bytes per step",
        "sign1 *                     100.0  8.00 (7.00..9.00)           1,000",
        "q4 (two-level)              200.0  4.00 (3.50..4.25)           4,000",
        "torch:fp32        800.0 (2 steps)               1.00          32,000",
        "no communication             90.0               8.89               0",
    ]
    for part in ("4 ranks, 1,000 elements in 2 parameters on cpu", "(2 steps): ", "*: "):
        assert part in "\n".join(lines[7:])


def diagnosis(**changes: Any) -> list[str]:
    steps = (Step("torch:fp32", None, 0.8, Interval(1, 1, 1), 5, 32000, is_advised=True),)
    given = {"device": "cpu", **changes}
    return str(Diagnosis("A verdict.", steps, 0.09, 4, 2, 1000, **given)).splitlines()


def test_doubts_come_right_after_the_verdict() -> None:
    assert diagnosis()[:2] == ["A verdict.", ""]
    verdict, one_host, empty, *_ = diagnosis(on_one_host=True)
    assert (verdict, empty) == ("A verdict.", "")
    assert "share one host" in one_host
    assert "`gradferry doctor --link 1gbit`" in one_host
    _, one_host, *_ = diagnosis(device="cuda", on_one_host=True)
    assert "--link" not in one_host  # namespaces have no GPU of their own


@on_ranks()
def test_doctor_looks_at_a_model_that_is_there() -> None:
    class Loss(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    model = Loss(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))
    before = bits(model.parameters())
    wrapped = nn.Module()
    wrapped._orig_mod = DistributedDataParallel(model, bucket_cap_mb=0.1)  # as by torch.compile
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        found = gradferry.doctor(wrapped, lambda: (torch.randn(4, 300),), hooks=["q4"], show=False)
    # On a machine that is busy its steps take longer.
    assert re.match(r"On one host, (use q4|do not compress|too short to tell): ", found.verdict)
    assert sorted(step.hook for step in found.steps) == ["q4", "torch:fp32"]
    assert bits(model.parameters()) == before


@on_ranks()
def test_copies_keep_settings_and_buffers() -> None:
    """Whatever buffers ranks have of their own."""
    model = nn.Linear(300, 1)
    model.register_buffer("own", torch.full((dist.get_rank() + 1,), float(dist.get_rank())))
    ddp = DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)
    ddp.broadcast_buffers = False
    steps, copies = [], []

    def make_step(copied: DistributedDataParallel) -> Callable[[], None]:
        copies.append(copied)
        return lambda: steps.append(copied(torch.ones(4, 300)).sum().backward())

    examine(ddp, make_step, ["torch:fp32"], lambda text: None)
    assert len(steps) >= 2 * (2 + SETTLING_STEPS + COUNTED_STEPS)
    assert len(copies) == 2
    for copied in copies:
        assert not copied.broadcast_buffers
        assert copied.gradient_as_bucket_view
        assert torch.equal(copied.module.own, model.own)


@on_ranks()
def test_doctor_says_what_a_batch_must_be() -> None:
    ddp = DistributedDataParallel(nn.Linear(300, 1))
    x = torch.randn(4, 300)
    for batch_fn, part in (
        (lambda: x, "(x,)"),
        (lambda: None, "None"),
        (lambda: (x,), "the model returned Tensor"),
        (x, "must be a function"),
    ):
        with pytest.raises(ConfigError, match=f"(?s)batch_fn.*{re.escape(part)}"):
            gradferry.doctor(ddp, batch_fn, hooks=["q4"], show=False)
