"""Gradients that leave the hook equal the reference's to the bit, with every codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch.distributed as dist
from mixed import MIXED, NAMES
from on_ranks import on_ranks
from reference import TILE_ELEMENTS, find_codec
from scenario import Scenario, Weight, assert_bit_equal, expected_gradients, train
from world import World

Worlds = Callable[[int], World]
LARGEST = np.finfo(np.float32).max

WEIGHTS = (
    Weight("embedding", (70, 64)),
    Weight("just_compressed", (32, 32)),
    Weight("wide", (3, 4099)),
    Weight("bias", (67,)),
)


def check(worlds: Worlds, scenario: Scenario, **changes: object) -> None:
    scenario = dataclasses.replace(scenario, **changes)
    assert_bit_equal(worlds(scenario.world_size).run(train, scenario=scenario), scenario)


def test_one_rank_alone_keeps_its_gradients(worlds: Worlds) -> None:
    check(worlds, MIXED, world_size=1)


@pytest.mark.parametrize("feedback", ["none", "worker", "owner", "both", "auto"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_equal_reference_with_a_codec_per_parameter(
    worlds: Worlds, world_size: int, feedback: str
) -> None:
    check(worlds, MIXED, world_size=world_size, error_feedback=feedback, seed=2**63 + 11)


def test_tiles_without_gradient_send_nothing_and_keep_residuals(worlds: Worlds) -> None:
    everywhere = tuple(f"{name}_fp32" for name in NAMES)
    here = tuple(f"{name}_{kind}" for name in NAMES for kind in ("bf16", "one"))
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.05}
    check(worlds, MIXED, unused={0: everywhere + here, 1: everywhere}, ddp=options)
    # Every tile is empty on some ranks in some steps, and on all in steps 1 and 3.
    empty = ((0, 0), (1, 0), (1, 1), (2, 1), (3, 0), (3, 1))
    check(worlds, MIXED, empty=empty, steps=5)


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_gradients_equal_reference_with_uneven_inputs(worlds: Worlds, native: bool) -> None:
    check(worlds, MIXED, world_size=3, steps_by_rank=(2, 4, 1), native=native)


@pytest.mark.parametrize(
    ("poison", "world_size"), [(float("nan"), 2), (float("inf"), 3), (float("-inf"), 2)]
)
def test_non_finite_gradient_of_one_rank_reaches_all_as_the_reference_says(
    worlds: Worlds, poison: float, world_size: int
) -> None:
    kinds = ((1, 0, "fp32"), (2, 1, "bf16"), (1, 0, "one"), (2, world_size - 1, "fp16"))
    places = {(step, rank, f"{n}_{kind}"): poison for n in NAMES for step, rank, kind in kinds}
    check(worlds, MIXED, world_size=world_size, poison=places, steps=4)


@dataclasses.dataclass(frozen=True)
class Huge(Scenario):
    """Gradients of float32 up to the end of its range, on rank 0 and in even steps the larger ones.

    Sums overflow, and so do residuals: two bits per element may return the opposite of a large one.
    Odd steps leave room for what residuals bring.
    """

    def gradient(self, step: int, turn: int, rank: int, index: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, step, turn, rank, index])
        blocks = -(-self.weights[index].num_elements // 128)
        scale = np.exp2(-rng.integers(0, 2, (blocks, 1)) - 2.0 * rank - 4 * (step % 2)) * LARGEST
        values = rng.choice([-1, 1], (blocks, 128)) * rng.uniform(0.9, 1, (blocks, 128)) * scale
        return values.reshape(-1)[: self.weights[index].num_elements].astype(np.float32)


def test_overflowing_sums_and_residuals_equal_reference(worlds: Worlds) -> None:
    weights = tuple(Weight(f"{name}_huge", (90, 131)) for name in NAMES)
    scenario = Huge(weights, rules=MIXED.rules, codec="exact", error_feedback="both", steps=3)
    values = scenario.gradient(0, 0, 0, NAMES.index("rht2"))[None, :TILE_ELEMENTS]
    codec = find_codec("rht:bits=2")
    # The finite part of such a residual is kept, and the rest is left out.
    with np.errstate(over="ignore"):
        withheld = values - codec.decode(codec.encode(values, "float32"), 4096, "float32")
    assert 0 < np.isfinite(withheld).sum() < 4096
    check(worlds, scenario)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_accumulated_gradients_equal_reference(worlds: Worlds, views: bool) -> None:
    check(worlds, MIXED, passes=3, ddp={**MIXED.ddp, "gradient_as_bucket_view": views})


@pytest.mark.parametrize("codec", ["rht:bits=4", "rht:bits=3", "rht:bits=2"])
@on_ranks()
def test_rht_gradients_depend_on_the_seed(codec: str) -> None:
    scenario = Scenario(WEIGHTS, 2, codec=codec, steps=2)
    first, second = (
        train(dataclasses.replace(scenario, options={"seed": seed}))["gradients"][0][0].tobytes()
        for seed in (0, 2**32)
    )
    assert first != second
    assert first == expected_gradients(scenario)[0][dist.get_rank()][0].tobytes()
