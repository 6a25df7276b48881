"""Task `convex`: least squares whose workers disagree, with the optimum known.

Sample i belongs to worker i mod 4, and every worker's targets come from different weights, so
that at the optimum the workers' gradients are large and cancel. Without error feedback, training
stops where the errors of the codec cancel, not the gradients. The whole problem is one batch: the
gradient has no noise, and the remaining gap to the optimum is due to the codec.
"""

from __future__ import annotations

import torch
from torch import nn

from gradferry_lab.workloads.task import Batch, Task

NUM_WORKERS = 4

_INPUTS = 64
_OUTPUTS = 256  # weights in four tiles, one for each of four owners
_SAMPLES = 512
_DATA_SEED = 0
_DISAGREEMENT = 0.05  # size of a worker's own weights against the shared ones


def linear_model() -> nn.Module:
    """Float (batch, 64) in, float (batch, 256) out; weights (256, 64), no bias.

    Weights start about as far from the optimum as zero weights, in random directions.
    """
    linear = nn.Linear(_INPUTS, _OUTPUTS, bias=False)
    nn.init.normal_(linear.weight, std=(_INPUTS * _OUTPUTS) ** -0.5)
    return linear


def load_convex() -> Task:
    """The problem is always the same; the seed changes only the initial weights."""
    problem = make_problem()
    return Task(
        name="convex",
        source=f"least squares, {_OUTPUTS * _INPUTS:,} weights, {_SAMPLES} samples, "
        f"{NUM_WORKERS} workers that disagree",
        metric="gap to the optimum (zero weights: 1)",
        global_batch=_SAMPLES,
        default_steps=2000,
        learning_rate=1e-3,
        sgd_learning_rate=1e-3,
        build_model=linear_model,
        draw=lambda generator: problem,
        validation=[gap_batch(problem)],
        loss=squared_error,
        score=squared_error,
        score_title="gap",
        lowest_loss=lowest_loss(problem),
    )


def make_problem() -> Batch:
    """Inputs (512, 64) and targets (512, 256) of all workers, float32.

    Targets are scaled so that the gap between zero weights and the optimum is 1.
    """
    generator = torch.Generator().manual_seed(_DATA_SEED)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = normal(_SAMPLES, _INPUTS)
    shared = normal(_INPUTS, _OUTPUTS)
    targets = inputs @ shared
    for worker in range(NUM_WORKERS):
        own = _DISAGREEMENT * normal(_INPUTS, _OUTPUTS)
        targets[worker::NUM_WORKERS] += inputs[worker::NUM_WORKERS] @ own
    gap = (inputs @ optimum((inputs, targets))).square().sum() / _SAMPLES
    return inputs.float(), (targets / gap.sqrt()).float()


def optimum(problem: Batch) -> torch.Tensor:
    """The weights (64, 256) of least squared error over all samples, float64."""
    inputs, targets = (part.double() for part in problem)
    weights: torch.Tensor = torch.linalg.solve(inputs.T @ inputs, inputs.T @ targets)
    return weights


def lowest_loss(problem: Batch) -> float:
    """The mean loss at the optimum: workers disagree, so it is not 0."""
    inputs, targets = (part.double() for part in problem)
    residual = inputs @ optimum(problem) - targets
    return float(residual.square().sum() / len(inputs))


def gap_batch(problem: Batch) -> Batch:
    """A batch whose mean loss is the mean loss of the problem less the lowest one.

    f(w) - f(w*) = |R w - R w*|^2 / samples for any R with R'R = X'X. This subtracts no large
    numbers, so it resolves gaps far below the fp32 precision of f.
    """
    inputs = problem[0].double()
    root = torch.linalg.cholesky(inputs.T @ inputs, upper=True)
    root *= (len(root) / len(inputs)) ** 0.5  # this batch has fewer predictions
    return root.float(), (root @ optimum(problem)).float()


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed over all elements; a prediction is a row."""
    return (outputs - targets).square().sum()
