"""Would another error feedback serve Muon better? Trainings of tiny_text against fp32, same seeds.

    python benchmarks/ef21_muon.py --json benchmarks/results/ef21_muon.json

One process plays four ranks: it takes the gradient of each rank's part of a batch, and hands the
mean of what arrives to the lab's Muon (torch's for matrices of blocks, AdamW for all else). Behind
the hook that mean is compressed again; here it is not. What arrives of a rank, by `way`:

    residual   C(g + e), and e keeps the error: the error feedback of the hook
    gradient   EF21: the estimate h, which C(g - h) updates
    momentum   EF21-Muon (arXiv 2510.00643): the estimate of Muon's momentum, which the rank keeps

C is the codec that the library gives each parameter. Forty minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from statistics import fmean
from typing import Any

import torch
from gradferry import tensor
from gradferry.core.config import make_config
from gradferry.core.parameters import describe_parameters
from gradferry.errors import ConfigError
from gradferry_lab.converge.suite import FULL, NUM_RANKS, RULER
from gradferry_lab.flags import add_json
from gradferry_lab.output.json_file import require_replaceable, write_json
from gradferry_lab.workloads import load_task
from gradferry_lab.workloads.optimizers import make_optimizer
from gradferry_lab.workloads.task import Task
from gradferry_lab.workloads.training import rate_at
from torch import nn

RESULTS_OF = "ef21 muon"
TASK = "tiny_text"
STEPS = next(contest.steps for contest in FULL.contests if contest.task == TASK)
WAYS = ("residual", "momentum", "gradient")
# The first is the baseline.
TRAININGS = (
    (RULER, "gradient"),
    *((codec, way) for way in WAYS for codec in ("rht:bits=2", "q4")),
)
# What the arithmetic of EF21 alone does: of the first seed.
WITHOUT_CODEC = (("exact", "gradient"), ("exact", "momentum"))


class Sender:
    """What one rank keeps of one parameter. `momentum`: Muon's, which the rank keeps; 0: none."""

    def __init__(self, parameter: nn.Parameter, codec: str, way: str, momentum: float) -> None:
        self._codec, self._way, self._momentum = codec, way, momentum
        self._kept = torch.zeros_like(parameter, requires_grad=False)
        self._average = torch.zeros_like(self._kept)

    def arrives(self, gradient: torch.Tensor, seed: int, step: int) -> torch.Tensor:
        """What the other ranks have of this gradient."""
        if self._way == "residual":
            asked = gradient + self._kept
            sent = self._sent(asked, seed, step)
            self._kept = asked - sent
            return sent
        if self._momentum:  # Nesterov's, as torch's Muon has it
            self._average.lerp_(gradient, 1 - self._momentum)
            gradient = gradient.lerp(self._average, self._momentum)
        self._kept += self._sent(gradient - self._kept, seed, step)
        return self._kept

    def _sent(self, dense: torch.Tensor, seed: int, step: int) -> torch.Tensor:
        message = tensor.encode(dense, self._codec, seed=seed, step=step)
        return tensor.decode(message, self._codec, shape=dense.shape, dtype=dense.dtype)


def senders(
    model: nn.Module, optimizer: torch.optim.Optimizer, codec: str, way: str
) -> list[list[Sender]]:
    """By parameter and rank. With the way `momentum`, the optimizer's Muon has none from now on."""
    momenta: dict[nn.Parameter, float] = {}
    for group in optimizer.param_groups:
        if way == "momentum" and group.get("nesterov"):
            momenta |= dict.fromkeys(group["params"], group["momentum"])
            group.update(momentum=0.0, nesterov=False)
    named = list(model.named_parameters())
    layout = describe_parameters(named, make_config(codec), exchanges=True)
    return [
        [Sender(each, str(own.codec), way, momenta.get(each, 0.0)) for _ in range(NUM_RANKS)]
        for (_, each), own in zip(named, layout, strict=True)
    ]


def train(task: Task, codec: str, way: str, seed: int, steps: int) -> float:
    """The validation loss after the last step. RULER has the mean of the gradients themselves."""
    torch.manual_seed(seed)
    model = task.build_model()
    optimizer = make_optimizer("Muon", task, model, None)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    generator = torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    ranks = [] if codec == RULER else senders(model, optimizer, codec, way)
    for step in range(steps):
        inputs, targets = task.draw(generator)
        means = [torch.zeros_like(each, requires_grad=False) for each in parameters]
        for rank in range(NUM_RANKS):
            optimizer.zero_grad()
            task.mean_loss(model, (inputs[rank::NUM_RANKS], targets[rank::NUM_RANKS])).backward()
            for number, each in enumerate(parameters):
                assert each.grad is not None
                arrived = each.grad
                if ranks:
                    arrived = ranks[number][rank].arrives(arrived, NUM_RANKS * seed + rank, step)
                means[number].add_(arrived, alpha=1 / NUM_RANKS)
        for mean, each in zip(means, parameters, strict=True):
            each.grad = mean
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        return fmean(task.mean_loss(model, batch).item() for batch in task.validation)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    add_json(parser)
    arguments = parser.parse_args()
    try:
        if arguments.json is not None:
            require_replaceable(arguments.json, RESULTS_OF)
    except ConfigError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    task, rows = load_task(TASK), []
    for seed in range(arguments.seeds):
        base = 0.0
        for codec, way in TRAININGS if seed else (*TRAININGS, *WITHOUT_CODEC):
            loss = train(task, codec, way, seed, arguments.steps)
            base = base or loss
            row: dict[str, Any] = {"task": TASK, "codec": codec, "way": way, "seed": seed}
            row |= {"steps": arguments.steps, "final_loss": loss, "fp32_loss": base}
            rows.append(row)
            print(json.dumps(row), flush=True)
            if arguments.json is not None:
                write_json(arguments.json, rows, results_of=RESULTS_OF)


if __name__ == "__main__":
    main()
