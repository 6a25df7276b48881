"""The error of compressed means of recorded gradients: vNMSE, by codec, ranks and step.

`python benchmarks/aggregate_error.py --device cuda` trains a model without compression, on one
process. At some steps it takes the gradients of eight parts of a batch, as eight ranks have them,
and averages those of 2, 4 and 8 ranks as an exchange does. vNMSE is the squared error of that mean
over the squared norm of the mean in fp32, summed over all parameters. What was withheld in steps
before is not there: an exchange with error feedback makes up for this error later.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from gradferry.core.config import make_config
from gradferry.core.parameters import describe_parameters
from gradferry_lab.bench.aggregate_error import squared_error, squared_norm
from gradferry_lab.flags import add_json
from gradferry_lab.output.json_file import write_json
from gradferry_lab.ranks.place import on_device
from gradferry_lab.workloads import load_task
from gradferry_lab.workloads.optimizers import make_optimizer
from gradferry_lab.workloads.task import Batch, Task
from gradferry_lab.workloads.training import rate_at
from torch import nn

WORLD_SIZES = (2, 4, 8)
CODECS = ("q8", "q4", "rht:bits=4", "rht:bits=3", "rht:bits=2", "sign1", "topk:ratio=0.04")
STEPS = {"tiny_text": (20, 200, 450), "text_10m": (20, 200, 2000), "gpt2_small": (20, 300)}
Gradients = dict[str, torch.Tensor]  # by parameter: float32 (ranks, elements), on the CPU


def gradients_of_ranks(task: Task, model: nn.Module, batch: Batch) -> Gradients:
    """Gradients of the ranks of the largest world, each of its part of the batch."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for rank in range(WORLD_SIZES[-1]):
        model.zero_grad()
        part = tuple(each[rank :: WORLD_SIZES[-1]] for each in batch)
        task.mean_loss(model, (part[0], part[1])).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[name].append(parameter.grad.flatten().cpu())
    return {name: torch.stack(parts) for name, parts in found.items()}


def errors(model: nn.Module, gradients: Gradients) -> Iterator[dict[str, Any]]:
    """One row for every codec and world size."""
    named = [(name, parameter.detach().cpu()) for name, parameter in model.named_parameters()]
    norms = {w: sum(squared_norm(each[:w]) for each in gradients.values()) for w in WORLD_SIZES}
    for codec in CODECS:
        layout = describe_parameters(named, make_config(codec), exchanges=True)
        for ranks in WORLD_SIZES:
            error = sum(squared_error(gradients[p.name][:ranks], str(p.codec)) for p in layout)
            yield {"codec": codec, "ranks": ranks, "vnmse": error / norms[ranks]}


def record(name: str, device: str) -> Iterator[dict[str, Any]]:
    """Trains, and yields rows of the steps to be recorded."""
    task, steps = load_task(name), STEPS[name]
    torch.manual_seed(0)
    model = task.build_model().to(device)
    optimizer = make_optimizer("AdamW", task, model, None)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps[-1]))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps[-1] + 1):
        batch = on_device(torch.device(device), task.draw(generator))
        if step in steps:
            gradients = gradients_of_ranks(task, model, batch)
            for row in errors(model, gradients):
                yield {"task": name, "step": step, **row}
        optimizer.zero_grad()
        task.mean_loss(model, batch).backward()
        optimizer.step()
        schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=STEPS, default=["text_10m", "gpt2_small"])
    parser.add_argument("--device", default="cpu", help="where models are trained (default: cpu)")
    add_json(parser)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.tasks:
        for row in record(name, arguments.device):
            rows.append(row)
            print(
                f"{name}, step {row['step']}, {row['codec']}, {row['ranks']} ranks: vNMSE "
                f"{row['vnmse']:.3g}",
                flush=True,
            )
            if arguments.json is not None:
                write_json(arguments.json, rows, results_of="aggregate error")


if __name__ == "__main__":
    main()
