"""Parameters whose memory is not row-major: in which order residuals and momentum lie."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from outcomes import Outcome, attempt
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World


def plain() -> torch.Tensor:
    return torch.zeros(48, 40)


def transposed() -> torch.Tensor:
    return torch.zeros(40, 48).t()


def strided() -> torch.Tensor:
    return torch.zeros(48, 80)[:, ::2]


def strided_and_transposed() -> torch.Tensor:
    return torch.zeros(40, 96)[:, ::2].t()


def channels_last() -> torch.Tensor:
    return torch.zeros(16, 8, 3, 5).to(memory_format=torch.channels_last)


def complex_transposed() -> torch.Tensor:
    return torch.zeros(40, 48, dtype=torch.complex64).t()


def columns_with_gaps() -> torch.Tensor:
    return torch.zeros(2000).as_strided((48, 40), (1, 50))


def channels_last_3d() -> torch.Tensor:
    return torch.zeros(8, 4, 3, 5, 4).to(memory_format=torch.channels_last_3d)


def expanded_and_cloned() -> torch.Tensor:
    return torch.zeros(1, 40).expand(48, 40).clone()


LAYOUTS = (
    plain,
    columns_with_gaps,
    channels_last_3d,
    expanded_and_cloned,
    transposed,
    strided,
    strided_and_transposed,
    channels_last,
    complex_transposed,
)


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


def case_momentum() -> dict[str, bool]:
    """By layout, whether the momentum that comes after the freeze is each element's own."""
    return {make.__name__: momentum_is_handed_over(make) for make in LAYOUTS}


def momentum_is_handed_over(make: Callable[[], torch.Tensor]) -> bool:
    import gradferry

    model = OneParameter(make())
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
    return torch.equal(model.weight.grad, target / 4)


def test_momentum_is_handed_over_to_its_own_elements(world_of_2: World) -> None:
    for same in world_of_2.run(case_momentum):
        assert all(same.values()), same


def converted(module: nn.Module) -> nn.Module:
    return module.to(memory_format=torch.channels_last)


def case_converted(when: str, options: dict[str, Any]) -> Outcome:
    """A model that gets another memory format at some time; what the next step, or attach, does."""
    import gradferry

    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 3))
    inputs = torch.ones(1, 8, 4, 4)
    if when == "before DDP":
        converted(model)
    ddp = DistributedDataParallel(model, **options)
    if when == "before attach":
        converted(model)
    attached = attempt(lambda: gradferry.attach(ddp, "q4"))
    if attached.error:
        return attached
    for step in range(3):
        if when == f"before step {step}":
            converted(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of DDP: gradients in another order than its buckets
            outcome = attempt(lambda: ddp(inputs).sum().backward())
        if outcome.error:
            break
    return outcome


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
def test_a_memory_format_that_changes_under_ddp_is_refused(
    world_of_2: World, when: str, options: dict[str, Any], error: str | None
) -> None:
    for outcome in world_of_2.run(case_converted, when=when, options=options):
        assert outcome.error == error, outcome
        if error:
            # The other convolution's weight has 1 x 1 elements: its order stays as it was.
            assert "the memory format of parameter '1.weight' has changed since" in outcome.text
            assert "a new" in outcome.text


def case_order_of_buckets() -> dict[str, tuple[bool, list[int]]]:
    """By layout, whether a bucket holds the gradient in the order that bucket_strides() gives."""
    return {make.__name__: order_of_bucket(make) for make in LAYOUTS}


def order_of_bucket(make: Callable[[], torch.Tensor]) -> tuple[bool, list[int]]:
    from gradferry import _native

    model = OneParameter(make())
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
    return torch.equal(flat.as_strided(target.shape, strides), target), strides


@pytest.mark.torch_core
def test_buckets_have_the_order_that_is_told(world_of_2: World) -> None:
    for answer in world_of_2.run(case_order_of_buckets):
        for layout, (same, strides) in answer.items():
            assert same, (layout, strides)
