"""The convex task: the optimum is one, and the gap to it is measured where fp32 cannot subtract."""

from __future__ import annotations

import pytest
import torch
from gradferry_lab.workloads.convex import (
    NUM_WORKERS,
    gap_batch,
    load_convex,
    lowest_loss,
    make_problem,
    optimum,
    squared_error,
)


@pytest.fixture(scope="module")
def problem():
    return make_problem()


def mean_loss(batch, weights: torch.Tensor) -> float:
    inputs, targets = (part.double() for part in batch)
    return squared_error(inputs @ weights, targets).item() / len(inputs)


def test_optimum_has_no_gradient_but_workers_do(problem):
    inputs, targets = (part.double() for part in problem)
    errors = inputs @ optimum(problem) - targets
    gradients = [
        inputs[worker::NUM_WORKERS].T @ errors[worker::NUM_WORKERS] for worker in range(NUM_WORKERS)
    ]
    # Solved in fp64: condition number of X'X below 10, sums of 512 products.
    assert torch.stack(gradients).sum(0).norm() < 1e-9 * gradients[0].norm()
    at_zero = inputs.T @ targets / NUM_WORKERS
    for gradient in gradients:
        assert 0.01 < gradient.norm() / at_zero.norm() < 0.1


def test_gap_of_zero_weights_is_1(problem):
    assert mean_loss(
        gap_batch(problem), torch.zeros(64, 256, dtype=torch.float64)
    ) == pytest.approx(1, rel=1e-5)


def test_gap_batch_measures_the_loss_above_the_lowest(problem):
    # Both sides in fp64, from batches rounded to fp32 (2^-24 relative per element).
    generator = torch.Generator().manual_seed(1)
    for size in (1.0, 1e-2, 1e-4):
        direction = torch.randn(64, 256, generator=generator, dtype=torch.float64)
        weights = optimum(problem) + size / 128 * direction
        gap = mean_loss(problem, weights) - lowest_loss(problem)
        assert mean_loss(gap_batch(problem), weights) == pytest.approx(gap, rel=1e-3)


def test_gap_batch_sees_gaps_that_fp32_losses_cannot(problem):
    # A shift of 1e-7 of the weights: the loss changes by 1e-14, fp32 resolves 1e-10 of it.
    weights = (optimum(problem) * (1 + 1e-7)).double()
    assert mean_loss(gap_batch(problem), weights) == pytest.approx(1e-14, rel=0.5)


def test_seed_changes_where_training_starts_and_nothing_else():
    task = load_convex()
    starts = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = task.build_model()
        starts.append(model.linear.weight.detach().clone())
        # Random weights as large as the optimum, independent of it: the gap about doubles.
        assert task.mean_loss(model, task.validation[0]).item() == pytest.approx(2, rel=0.2)
    assert not torch.equal(*starts)
    drawn = [task.draw(torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
