"""Parameters of unusual shape or memory, and the order in which residuals and momentum lie."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import torch
from gradferry import _native
from gradferry.errors import GradferryWarning
from on_ranks import on_ranks
from outcomes import attempt
from scenario import ChosenGradients, Run, Scenario, Weight, assert_bit_equal, hooked, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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
    check(worlds, weights, native=native, steps=2)
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
    answers = []
    for scenario in scenarios:
        with mock.patch("scenario.ChosenGradients", Ignoring), warnings.catch_warnings():
            warnings.simplefilter("error", GradferryWarning)
            run = Run(scenario)
        gradients = [run.step(step) for step in range(scenario.steps)]
        run.state.load_state_dict(run.state.state_dict())
        # Ranks do not share the ignored parameter, so that hashes of all differ.
        answers.append({"gradients": gradients, "hashes": [], "final_hash": ""})
    return answers


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


@pytest.mark.parametrize("number", [700, pytest.param(3000, marks=pytest.mark.slow)])
def test_hundreds_and_thousands_of_parameters(worlds: Worlds, number: int) -> None:
    # Every fiftieth is large enough to be compressed.
    shapes = ((33, 32) if i % 50 == 0 else (1 + i % 7,) for i in range(number))
    weights = tuple(Weight(f"w{i}", shape) for i, shape in enumerate(shapes))
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
    ("native", "views"), [(True, True), (False, False)], ids=["native-views", "python-copies"]
)
def test_strided_parameters_of_every_dtype(worlds: Worlds, native: bool, views: bool) -> None:
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
    ddp = {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": views}
    assert not any(w.from_flat(np.zeros(1350, np.float32)).is_contiguous() for w in weights[:3])
    check(worlds, weights, native=native, steps=3, ddp=ddp)


LAYOUTS = {
    "plain": lambda: torch.zeros(48, 40),
    "columns with gaps": lambda: torch.zeros(2000).as_strided((48, 40), (1, 50)),
    "expanded and cloned": lambda: torch.zeros(1, 40).expand(48, 40).clone(),
    "transposed": lambda: torch.zeros(40, 48).t(),
    "strided": lambda: torch.zeros(48, 80)[:, ::2],
    "strided and transposed": lambda: torch.zeros(40, 96)[:, ::2].t(),
    "channels last": lambda: torch.zeros(16, 8, 3, 5).to(memory_format=torch.channels_last),
    "3d": lambda: torch.zeros(8, 4, 3, 5, 4).to(memory_format=torch.channels_last_3d),
    "complex": lambda: torch.zeros(40, 48, dtype=torch.complex64).t(),
}


class OneParameter(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        """The gradient of the parameter is `target`."""
        product = self.weight * target.conj()
        return product.real.sum() if product.is_complex() else product.sum()


def counting(like: torch.Tensor) -> torch.Tensor:
    """0, 1, 2, ... in row-major order: every element has its own number."""
    return torch.arange(like.numel()).view(like.shape).to(like.dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks()
def test_momentum_is_handed_over_to_its_own_elements(layout: str) -> None:
    model = OneParameter(LAYOUTS[layout]())
    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, "exact", momentum=0.5, warmup_steps=1)
    optimizer = gradferry.optim.OneBitAdam(
        ddp.parameters(), lr=0.0, betas=(0.5, 0.999), freeze_step=1, state=state
    )
    target = counting(model.weight)
    for scale in (1, 0):
        optimizer.zero_grad()
        ddp(target * scale).backward()
        optimizer.step()
    # Half of a gradient is its momentum, and half of that is left by the next step: exact.
    assert torch.equal(model.weight.grad, target / 4)


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("when", "options", "error"),
    [
        ("before DDP", {}, None),
        ("before DDP", {"gradient_as_bucket_view": True}, None),
        ("before attach", {}, "ConfigError"),
        ("before attach", {"gradient_as_bucket_view": True}, "ConfigError"),
        ("before attach", {"find_unused_parameters": True}, "ConfigError"),
        ("before step 0", {}, "StateError"),
        ("before step 1", {}, "StateError"),  # between the buckets' first making and their second
        ("before step 2", {"static_graph": True}, "StateError"),
    ],
)
@on_ranks()
def test_a_memory_format_that_changes_under_ddp_is_refused(
    when: str, options: dict[str, Any], error: str | None
) -> None:
    """By the next step, or by attach."""
    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 3))
    inputs = torch.ones(1, 8, 4, 4)
    convert = functools.partial(model.to, memory_format=torch.channels_last)
    if when == "before DDP":
        convert()
    ddp = DistributedDataParallel(model, **options)
    if when == "before attach":
        convert()
    outcome = attempt(lambda: hooked(ddp))
    for step in range(0 if outcome.error else 3):
        if when == f"before step {step}":
            convert()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of DDP: gradients in another order than its buckets
            outcome = attempt(lambda: ddp(inputs).sum().backward())
        if outcome.error:
            break
    assert outcome.error == error, outcome
    if error:
        # The other convolution's weight has 1 x 1 elements: its order stays as it was.
        assert "the memory format of parameter '1.weight' has changed since" in outcome.text
        assert "a new" in outcome.text


@pytest.mark.torch_core
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks()
def test_buckets_have_the_order_that_is_told(layout: str) -> None:
    """A bucket holds the gradient in the order that bucket_strides() gives."""
    model = OneParameter(LAYOUTS[layout]())
    ddp = DistributedDataParallel(model)
    seen: list[torch.Tensor] = []

    def hook(state, bucket):  # DDP takes no postponed annotations
        seen.append(bucket.buffer().clone())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    target = counting(model.weight)
    ddp(target).backward()
    flat = seen[0].view(-1)
    if target.is_complex() and not flat.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    strides = _native.bucket_strides(model.weight)
    assert torch.equal(flat.as_strided(target.shape, strides), target), strides
