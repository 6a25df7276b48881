"""What a `gradferry.Reducer` withholds: its sum, saved and resized states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from reducing import given, make_reducer, reduce, same
from residual_sums import advance, assert_goes_on, reference_of, resize, still_missing, worker_mean
from scenario import Scenario
from test_reducer import PLAIN, TWO_BY_TWO
from world import World

Worlds = Callable[[int], World]


# --- states ---------------------------------------------------------------------------------------


def case_go_on(
    scenario: Scenario, saved: list[dict[str, Any]] | None, steps: range
) -> dict[str, Any]:
    from gradferry.checkpoint import merge

    reducer = make_reducer(scenario)
    if saved is not None:
        resized = saved[0]["world_size"] != scenario.world_size
        mine = merge(saved) if resized else saved[dist.get_rank()]
        reducer.load_state_dict(mine, on_resize="mean" if resized else "strict")
    loaded = reducer.state_dict()
    return {
        "loaded": loaded,
        "gradients": reduce(scenario, reducer, steps),
        "saved": reducer.state_dict(),
    }


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "warmup_steps": 3}], ids=["plain", "momentum"]
)
def test_state_goes_on_bit_identically_in_a_new_reducer(
    world_of_2: World, options: dict[str, Any]
) -> None:
    scenario = dataclasses.replace(PLAIN, codec="sign1", options=options)
    whole = world_of_2.run(case_go_on, scenario=scenario, saved=None, steps=range(4))
    first = world_of_2.run(case_go_on, scenario=scenario, saved=None, steps=range(2))
    saved = [answer["saved"] for answer in first]
    second = world_of_2.run(case_go_on, scenario=scenario, saved=saved, steps=range(2, 4))
    for one, two, both in zip(first, second, whole, strict=True):
        assert same(one["saved"], two["loaded"])
        assert same(two["saved"], both["saved"])
        for got, want in zip(
            [*one["gradients"], *two["gradients"]], both["gradients"], strict=True
        ):
            assert all(g.tobytes() == w.tobytes() for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize(("size", "nodes"), [(3, None), (4, TWO_BY_TWO)], ids=["3-2", "2x2-2"])
def test_resized_state_keeps_what_is_missing(
    worlds: Worlds, size: int, nodes: tuple[tuple[int, ...], ...] | None
) -> None:
    before = dataclasses.replace(PLAIN, world_size=size, nodes=nodes)
    answers = worlds(size).run(case_go_on, scenario=before, saved=None, steps=range(3))
    saved = [answer["saved"] for answer in answers]
    engine = reference_of(before)
    advance(engine, before, range(3))
    resumed = worlds(2).run(case_go_on, scenario=PLAIN, saved=saved, steps=range(3, 5))
    missing = np.concatenate(still_missing(saved, before))
    kept = np.concatenate(still_missing([answer["loaded"] for answer in resumed], PLAIN))
    assert np.abs(missing).max() > 0.1
    # The mean of the workers' is rounded to fp32 once; the owners' move as they are.
    largest = np.abs(np.concatenate(worker_mean(saved, before))).max()
    assert np.abs(kept - missing).max() <= largest * 2.0**-24
    assert_goes_on(resumed, resize(engine, PLAIN), PLAIN, range(3, 5))


# --- calls that are tiny or scaled -------------------------------------------------------


def case_zeros() -> dict[str, Any]:
    """Calls with zeros, then with the smallest normal numbers."""
    reducer = make_reducer(PLAIN)
    reduce(PLAIN, reducer, range(1))
    before = reducer.state_dict()
    zeros = [torch.zeros_like(tensor) for tensor in given(PLAIN, 0)]
    reducer.all_reduce(zeros)
    after = reducer.state_dict()
    slot = f"slot_{dist.get_rank()}"
    withheld = []
    for _ in range(6):
        tiny = [torch.full_like(t, torch.finfo(t.dtype).tiny) for t in zeros]
        state = reducer.state_dict()[slot]
        withheld.append([float(state[kind].abs().max()) for kind in ("worker", "owner")])
        reducer.all_reduce(tiny)
    return {
        "same": same(before, {**after, "steps": before["steps"]}),
        "zeros": not any(tensor.any() for tensor in zeros),
        "withheld": withheld,
    }


def test_zeros_deliver_nothing_and_tiny_numbers_what_is_withheld(world_of_2: World) -> None:
    answers = world_of_2.run(case_zeros)
    assert all(answer["same"] and answer["zeros"] for answer in answers)
    # q4 errs by at most half of a 7th of the largest number of a block, and 1/16 more by rounding
    # its scale, in both encodes; the owner encodes what a worker sent and its own residual. So of
    # worker w and owner o remain less than w / 13 and (1.1 w + o) / 13.
    worker, owner = np.max([answer["withheld"] for answer in answers], axis=0).T
    assert worker[0] > 0.01
    assert owner[0] > 0.01
    assert (worker[1:] + owner[1:] <= (worker + owner)[:-1] / 5).all()


def case_loss_scale() -> list[bool]:
    """Residuals follow the scale, exactly where it changes by powers of two."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plain = make_reducer(PLAIN)
    scaled = make_reducer(PLAIN, grad_scaler=scaler)
    equal = []
    for step, scale in enumerate((2.0**10, 2.0**12, 2.0**3)):
        scaler.update(new_scale=scale)
        tensors, multiplied = given(PLAIN, step), [t * scale for t in given(PLAIN, step)]
        plain.all_reduce(tensors)
        scaled.all_reduce(multiplied)
        equal.append(
            all(torch.equal(a * scale, b) for a, b in zip(tensors, multiplied, strict=True))
        )
    return equal


def test_residuals_follow_the_loss_scale(world_of_2: World) -> None:
    assert world_of_2.run(case_loss_scale) == [[True] * 3] * 2
