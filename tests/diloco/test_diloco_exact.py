"""`gradferry.DiLoCo` loses nothing: what was applied and what is withheld is what ranks moved."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gradferry.core import agreement
from gradferry.reducer import Reducer
from on_ranks import of_all, on_ranks
from torch import nn
from training_alone import (
    Plain,
    are_equal,
    bits_of,
    common,
    flat,
    make,
    move,
    movements,
    residuals,
    shift,
    summed,
)

OUTER_STEPS = 5
ALL = ("q4", "q8", "rht:bits=2", "sign1", "topk:ratio=0.05")


def withheld(reducer: Reducer) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the worker residuals and the sum of the owner residuals. Collective."""
    worker, owner = residuals(reducer.state_dict(), reducer._running.tiles())
    return summed(worker) / dist.get_world_size(), summed(owner)


# Movements are whole numbers of 2^-8 of at most 2^-2, and four ranks divide exactly. What a codec
# decodes is a scale of 8 bits or fewer times a small whole number, also with rht: every number
# below is exact in fp32, and the gap is 0.
@pytest.mark.parametrize(
    ("codec", "decay"),
    [*((codec, 1.0) for codec in ALL), ("q4", 0.5), ("sign1", 0.5), ("topk:ratio=0.05", 0.5)],
)
@on_ranks(4)
def test_applied_and_withheld_are_what_ranks_moved(codec: str, decay: float) -> None:
    model = Plain()
    optimizer, diloco = make(model, codec, sync_every=2, residual_decay=decay)
    begin = common(diloco)
    moved, faded = torch.zeros_like(begin), torch.zeros_like(begin)
    places = set()
    for period in range(OUTER_STEPS):
        if period:
            places.add(diloco._reducer.spare[f"slot_{dist.get_rank()}"]["worker"].data_ptr())
            faded += (1 - decay) * sum(withheld(diloco._reducer))
        for inner in range(2):
            given = movements(model, dist.get_rank(), period, inner)
            move(model, given)
            moved += summed(flat(given)) / 4
            optimizer.step()
        assert torch.equal(common(diloco), flat(model.parameters()))
    assert are_equal(of_all(bits_of(model)))
    worker, owner = withheld(diloco._reducer)
    assert diloco.stats()["outer_steps"] == OUTER_STEPS
    assert len(places) == 1  # residuals of before are copied to the same memory again
    assert diloco.stats()["reducer"]["packing_bytes"] == 0
    assert (worker + owner).abs().max() > 2.0**-12
    assert bool(faded.any()) == (decay != 1.0)
    gap = (begin - common(diloco)) + worker + owner + faded - moved
    assert gap.abs().max() == 0


@pytest.mark.parametrize("channels_last", [False, True])
@on_ranks(4)
def test_default_outer_optimizer_is_nesterov_of_the_paper(channels_last: bool) -> None:
    """In fp64, with dyadic means: p -= 0.7 * (g + 0.9 * m), where m = 0.9 * m + g.

    Also where the model and a state that is loaded have another order in memory, at which fused
    optimizers do not look.
    """
    model = Plain()
    images = {"memory_format": torch.channels_last}
    if channels_last:
        model.weight = nn.Parameter(torch.zeros(64, 4, 8, 8).contiguous(**images))
    optimizer, diloco = make(model, "exact", outer=None)
    expected = common(diloco)
    momentum = torch.zeros_like(expected)
    largest = 0.0
    for period in range(OUTER_STEPS):
        if channels_last and period == 2:
            saved = diloco.state_dict()
            kept = saved["outer"]["state"][0]
            kept["momentum_buffer"] = kept["momentum_buffer"].contiguous(**images)
            diloco.load_state_dict(saved)
        given = movements(model, dist.get_rank(), period)
        # The model's parameters are no dyadic numbers from the second period on.
        local = flat(model.parameters())
        pairs = zip(model.parameters(), given, strict=True)
        mean = summed(local - flat(p.detach() - change for p, change in pairs)) / 4
        move(model, given)
        momentum = 0.9 * momentum + mean
        expected -= 0.7 * (mean + 0.9 * momentum)
        optimizer.step()
        largest = max(largest, float(expected.abs().max()), float(momentum.abs().max()))
    # Per step, fp32 rounds the change, its mean, the momentum (twice), the sum of both (twice) and
    # the parameter (twice), each by 2^-24 of the largest number or less; the momentum keeps its
    # errors with a factor 0.9, which multiplies them by less than 10.
    tolerance = OUTER_STEPS * 8 * 10 * 2.0**-24 * largest
    assert (common(diloco) - expected).abs().max() <= tolerance


class OfAllKinds(nn.Module):
    """Parameters that are frozen, tied, or of other dtypes, shapes and orders in memory."""

    def __init__(self) -> None:
        super().__init__()
        image = torch.zeros(8, 16, 9, 7).contiguous(memory_format=torch.channels_last)
        self.image = nn.Parameter(image)
        self.tied = self.image
        self.frozen = nn.Parameter(torch.ones(40, 50), requires_grad=False)
        self.scalar = nn.Parameter(torch.zeros(()))
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.in_fp16 = nn.Parameter(torch.zeros(70, 64, dtype=torch.float16))
        self.in_fp64 = nn.Parameter(torch.zeros(33, 40, dtype=torch.float64))


@pytest.mark.parametrize("codec", ["exact", "off", "q4"])
@on_ranks(2)
def test_all_kinds_of_parameters_are_averaged(codec: str) -> None:
    model = OfAllKinds()
    shift(model, movements(model, dist.get_rank()))
    nn.init.ones_(model.frozen)
    optimizer, diloco = make(model, codec)
    assert diloco.state_dict()["global"].keys() == {
        *("image", "scalar", "nothing", "in_fp16", "in_fp64")
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(2):
        begin = common(diloco)
        assert torch.equal(begin, flat(trained))
        assert are_equal(of_all([p.flatten().tolist() for p in trained]))
        given = movements(model, dist.get_rank(), step)
        pairs = [
            pair for pair in zip(model.parameters(), given, strict=True) if pair[0].requires_grad
        ]
        moved = begin - flat(p.detach() - change.to(p.dtype) for p, change in pairs)
        assert moved.any()
        move(model, given)
        optimizer.step()
        # Whole numbers of 2^-8, and halves of them, are exact in fp16 up to 2^2.
        if codec != "q4":
            assert torch.equal(begin - common(diloco), summed(moved) / 2)
    assert (model.frozen == 1).all()


@on_ranks(4)
def test_global_parameters_of_bf16_keep_what_bf16_cannot_hold() -> None:
    """Each period one rank moves by the spacing of bf16 above 1, and the mean by a quarter."""
    model = Plain(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer, diloco = make(model, "exact")
    spacing = 2.0**-7
    for period in range(10):
        if dist.get_rank() == period % 4:
            move(model, [torch.full_like(p, -spacing) for p in model.parameters()])
        optimizer.step()
        expected = torch.full_like(common(diloco), 1.0 + (period + 1) * spacing / 4)
        assert torch.equal(common(diloco), expected)
        assert torch.equal(flat(model.parameters()), expected.bfloat16().double())
    before = common(diloco)
    assert not torch.equal(before, before.bfloat16().double())
    optimizer.step()  # a period without any movement
    assert torch.equal(common(diloco), before)
    assert diloco.stats()["outer_steps"] == 11


@on_ranks(2)
def test_printed_it_says_how_long_the_last_outer_step_took() -> None:
    _, diloco = make(Plain(), "q4", sync_every=2)
    assert "ms of training" not in str(diloco)
    diloco._outer_ms, diloco._period_ms = 30.0, 100.0
    assert "the last outer step took 30 ms, after 100 ms of training\n" in str(diloco)


@on_ranks(2)
def test_outer_step_waits_for_the_slowest_rank_once_before_and_once_after_an_average() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    optimizer, _ = make(model)
    gather = agreement._all_gather
    with mock.patch.object(agreement, "_all_gather", wraps=gather) as gathers:
        optimizer.step()
    assert gathers.call_count == 2


@on_ranks(2)
def test_changes_travel_in_small_chunks_of_which_more_are_in_flight() -> None:
    """The bytes in flight are those of a Reducer, which has large chunks."""
    _, diloco = make(Plain())
    reducer = Reducer([("changes", torch.zeros(64, 256))])
    found = {}
    for name, each in (("diloco", diloco._reducer), ("reducer", reducer)):
        running = each._running
        found[name] = running.config.record()["chunk_bytes"], running.engine.workspace()["slots"]
    assert found == {"diloco": (32768, 16), "reducer": (131072, 4)}
