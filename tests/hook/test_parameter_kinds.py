"""Parameters of unusual shape or memory: gradients equal the reference's to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from scenario import ChosenGradients, Run, Scenario, Weight, assert_bit_equal, train
from world import World

Worlds = Callable[[int], World]

REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*REAL, torch.complex64, torch.complex128)


def check(worlds: Worlds, weights: tuple[Weight, ...], **options: object) -> None:
    scenario = Scenario(weights, error_feedback="both", **options)
    assert_bit_equal(worlds(2).run(train, scenario=scenario), scenario)


def named(dtype: torch.dtype, kind: str) -> str:
    return f"{str(dtype).removeprefix('torch.')}_{kind}"


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_scalars_and_parameters_without_elements_of_every_dtype(
    worlds: Worlds, native: bool
) -> None:
    shapes = {"scalar": (), "nothing": (0,), "no_columns": (3, 0), "matrix": (40, 30)}
    weights = tuple(Weight(named(d, k), shape, d) for d in DTYPES for k, shape in shapes.items())
    check(worlds, weights, native=native)
    # Buckets that hold nothing but a scalar, or no element at all.
    check(worlds, weights, native=native, steps=2, ddp={"bucket_cap_mb": 1e-6})


@pytest.mark.parametrize("codec", ["q4", "topk:ratio=0.2"])
def test_a_scalar_can_be_given_a_codec(worlds: Worlds, codec: str) -> None:
    weights = (Weight("scalar", ()), Weight("matrix", (40, 30)))
    check(worlds, weights, rules=(("*", codec),))


class Ignoring(ChosenGradients):
    """DDP leaves its last parameter to itself."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        # DDP knows a parameter of the outermost module by both names.
        name = scenario.weights[-1].name
        self._ddp_params_and_buffers_to_ignore = [name, f".{name}"]


def case_ignored(scenarios: list[Scenario]) -> list[dict[str, Any]]:
    return [steps_beside_an_ignored_one(scenario) for scenario in scenarios]


def steps_beside_an_ignored_one(scenario: Scenario) -> dict[str, Any]:
    with mock.patch("scenario.ChosenGradients", Ignoring):
        run = Run(scenario)
    gradients = [run.step(step) for step in range(scenario.steps)]
    run.state.load_state_dict(run.state.state_dict())
    return {"gradients": gradients, "hashes": [], "final_hash": ""}  # which ranks do not share


def test_ignored_parameter_keeps_its_own_gradient(worlds: Worlds) -> None:
    weights = (Weight("matrix", (40, 30)), Weight("bias", (50,)), Weight("ignored", (60, 50)))
    # Ranks compare their parameters after every second step.
    options = {"error_feedback": "both", "options": {"check_every": 2}}
    scenarios = [Scenario(weights, native=native, **options) for native in (True, False)]
    answers = worlds(2).run(case_ignored, scenarios=scenarios)
    for index, scenario in enumerate(scenarios):
        own = [answer[index] for answer in answers]
        for rank, answer in enumerate(own):
            for step, gradients in enumerate(answer["gradients"]):
                assert gradients.pop().tobytes() == scenario.gradient(step, 0, rank, 2).tobytes()
        assert_bit_equal(own, dataclasses.replace(scenario, weights=weights[:-1]))


def test_thousands_of_parameters(worlds: Worlds) -> None:
    # Every fiftieth is large enough to be compressed.
    weights = tuple(Weight(f"w{i}", (33, 32) if i % 50 == 0 else (1 + i % 7,)) for i in range(3000))
    check(worlds, weights, steps=1)


@dataclasses.dataclass(frozen=True)
class Strided(Weight):
    """A matrix whose parameter is not contiguous; its gradient lies in a bucket as DDP wants it.

    transposed: columns one after the other.
    sliced: with a gap after every element. DDP then lays out the gradient row by row.
    """

    transposed: bool = False
    sliced: bool = False

    @property
    def bucket_is_transposed(self) -> bool:
        return self.transposed and not self.sliced

    def from_flat(self, flat: np.ndarray) -> torch.Tensor:
        rows, columns = self.shape
        if self.bucket_is_transposed:
            values = Weight(self.name, (columns, rows), self.dtype).from_flat(flat).t()
        else:
            values = super().from_flat(flat)
        gap = 2 if self.sliced else 1
        if self.transposed:
            tensor = torch.zeros(columns, gap * rows, dtype=self.dtype)[:, ::gap].t()
        else:
            tensor = torch.zeros(rows, gap * columns, dtype=self.dtype)[:, ::gap]
        return tensor.copy_(values)

    def to_flat(self, tensor: torch.Tensor) -> np.ndarray:
        tensor = tensor.detach()
        if self.bucket_is_transposed:
            return Weight(self.name, self.shape[::-1], self.dtype).to_flat(tensor.t().contiguous())
        return super().to_flat(tensor.contiguous())


@pytest.mark.torch_core
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"]
)
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_strided_parameters_of_every_dtype(
    worlds: Worlds, native: bool, options: dict[str, bool]
) -> None:
    kinds = {
        "transposed": {"transposed": True},
        "sliced": {"sliced": True},
        "sliced_transposed": {"sliced": True, "transposed": True},
    }
    weights = tuple(
        Strided(named(dtype, kind), (45, 30), dtype, **how)
        for dtype in DTYPES
        for kind, how in kinds.items()
    )
    assert not any(w.from_flat(np.zeros(1350, np.float32)).is_contiguous() for w in weights[:3])
    check(worlds, weights, native=native, ddp={"bucket_cap_mb": 0.02, **options})
