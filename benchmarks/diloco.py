"""DiLoCo under every codec, between hosts that a slow link joins, against averages of every step.

`python benchmarks/diloco.py`, as root, trains the model of examples/diloco.py with AdamW on three
hosts (network namespaces of this machine) joined at 50 Mb/s, three seeds under every codec, and as
often on the same bytes with an average of gradients in every step. It prints the last loss of every
training, and by codec its mean and spread, the median time of an outer step, connections and first
steps left out, and what the whole training took and sent.

`--task text_10m` measures outer steps of a larger model, of 10.9 million parameters: two inner
steps before each of three, which say nothing of the loss. `--task published_30m` measures those of
the 30.8 million parameters for which github.com/Adnan082/diloco-measured gives utilisations.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import gradferry
import torch
import torch.distributed as dist
from gradferry_lab.flags import add_json
from gradferry_lab.output.json_file import write_json
from gradferry_lab.ranks.network import DEVICE, Network, address, parse_link, sent_bytes
from gradferry_lab.workloads import load_task
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import diloco as example

CODECS = ["off", "q4", "rht:bits=2", "sign1", "topk:ratio=0.04,values=q4"]
OUTER_MOMENTUM = 0.5  # for so few outer steps: docs/guide/diloco.md
_STORE_PORT = 29400  # of hosts that exist for one training


@dataclass(frozen=True)
class Work:
    """A model and this rank's data.

    Attributes:
        loss: of the next batch, by the model as it may have been wrapped.
        periods: outer steps.
        period: inner steps of each.
        validate: the last loss; None where so few steps say nothing.
    """

    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]
    periods: int
    period: int
    validate: Callable[[], float] | None


def tiny(seed: int) -> Work:
    """What examples/diloco.py trains."""
    model, text = example.build_model(seed), example.source_code()
    held_out = len(text) - example.VALIDATION - example.CONTEXT
    validation = example.examples(text, torch.arange(held_out, held_out + example.VALIDATION))
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())

    def loss(trained: nn.Module) -> torch.Tensor:
        begins = torch.randint(held_out - example.CONTEXT, (64,), generator=generator)
        context, following = example.examples(text, begins)
        return cross_entropy(trained(context), following)

    def validate() -> float:
        with torch.no_grad():
            return cross_entropy(model(validation[0]), validation[1]).item()

    return Work(model, loss, periods=12, period=50, validate=validate)


def text_10m(seed: int) -> Work:
    """The laboratory's model of this name, on each rank's share of its batches."""
    task = load_task("text_10m")
    torch.manual_seed(seed)
    model, rank, world_size = task.build_model(), dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)

    def loss(trained: nn.Module) -> torch.Tensor:
        inputs, targets = task.draw(generator)
        return task.mean_loss(trained, (inputs[rank::world_size], targets[rank::world_size]))

    return Work(model, loss, periods=3, period=2, validate=None)


def published_30m(seed: int) -> Work:
    """The parameters of github.com/Adnan082/diloco-measured, with gradients at random."""
    layer = [(256, 256)] * 4 + [(768, 256)] * 3 + [(256,)] * 2
    shapes = [(50257, 256)] * 2 + 6 * layer + [(256,)]
    torch.manual_seed(seed)
    model = nn.ParameterList(0.02 * torch.randn(shape) for shape in shapes)

    def loss(trained: nn.Module) -> torch.Tensor:
        return torch.stack([(p * torch.randn_like(p)).sum() for p in trained.parameters()]).sum()

    return Work(model, loss, periods=3, period=1, validate=None)


TASKS = {"tiny": tiny, "text_10m": text_10m, "published_30m": published_30m}


class OuterClock:
    """Times outer steps, which begin when the slowest rank has taken its inner step.

    Made of the inner optimizer before a DiLoCo of it is: the hooks of an optimizer run in the order
    in which they came.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.is_due = False  # the step to come ends a period
        self.ms: list[float] = []
        self._begin = 0.0
        inner.register_step_post_hook(self._begins)

    def _begins(self, *_: object) -> None:
        if self.is_due:
            dist.barrier()
            self._begin = time.monotonic()

    def ends(self) -> None:
        """To be called after every step."""
        if self.is_due:
            self.ms.append(1e3 * (time.monotonic() - self._begin))


def outer_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The same one under all codecs."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=OUTER_MOMENTUM, nesterov=True, fused=True)


def train_here(how: dict[str, Any]) -> None:
    """One rank of a training. Rank 0 prints its result."""
    dist.init_process_group("gloo")
    work = TASKS[how["task"]](how["seed"])
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-3)
    clock = OuterClock(optimizer)
    trained: nn.Module = work.model
    diloco = None
    if how["synchronous"]:
        trained = ddp = DistributedDataParallel(work.model)
        gradferry.attach(ddp, how["codec"])
    else:
        diloco = gradferry.DiLoCo(
            work.model, optimizer, work.period, how["codec"], outer=outer_optimizer
        )
    begin, sent = time.monotonic(), sent_bytes(DEVICE) or 0
    for step in range(1, work.periods * work.period + 1):
        work.model.zero_grad()
        work.loss(trained).backward()
        clock.is_due = diloco is not None and step % work.period == 0
        optimizer.step()
        clock.ends()
    if diloco is not None:
        diloco.finish()
    result = {
        "seconds": time.monotonic() - begin,
        "outer_ms": clock.ms[1:],
        "bytes": (sent_bytes(DEVICE) or 0) - sent,
        "loss": work.validate() if work.validate is not None else None,
    }
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def train(how: dict[str, Any], hosts: int, link: str) -> dict[str, Any]:
    """The result of rank 0, with one rank on each host."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        environment = [
            f"WORLD_SIZE={hosts}",
            f"MASTER_ADDR={address(1)}",
            f"MASTER_PORT={_STORE_PORT}",
            f"GLOO_SOCKET_IFNAME={DEVICE}",
            "OMP_NUM_THREADS=1",
        ]
        rank_of = [sys.executable, __file__, "--rank-of", json.dumps(how)]
        commands = [["env", *environment, f"RANK={rank}", *rank_of] for rank in range(hosts)]
        commands[0] = ["sh", "-c", f'exec "$@" >{printed}', "sh", *commands[0]]
        with Network(parse_link(link), commands) as network:
            if any(network.wait()):
                raise SystemExit(f"a rank failed with {how}")
        result: dict[str, Any] = json.loads(printed.read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="tiny")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--link", default="50mbit")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    parser.add_argument("--synchronous", nargs="*", metavar="CODEC", help="codecs of gradients")
    parser.add_argument("--rank-of", type=json.loads, help=argparse.SUPPRESS)
    add_json(parser)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        train_here(arguments.rank_of)
        return
    every_step = arguments.synchronous
    if every_step is None:
        every_step = ["q4"] if arguments.task == "tiny" else []
    rows: list[dict[str, Any]] = [
        {"task": arguments.task, "optimizer": "AdamW", "codec": codec, "synchronous": synchronous,
         "hosts": arguments.hosts, "link": arguments.link}
        for synchronous, codecs in ((False, arguments.codecs), (True, every_step))
        for codec in codecs
    ]  # fmt: skip
    results: list[list[dict[str, Any]]] = [[] for _ in rows]
    for seed in range(arguments.seeds):
        for row, found in zip(rows, results, strict=True):
            found.append(train({**row, "seed": seed}, arguments.hosts, arguments.link))
            losses = [each["loss"] for each in found if each["loss"] is not None]
            row["losses"] = losses
            row["loss"] = mean(losses) if losses else None
            row["spread"] = (stdev(losses) if seed else 0.0) if losses else None
            times = [ms for each in found for ms in each["outer_ms"]]
            row["outer_step_ms"] = median(times) if times else None
            row["seconds"] = median(each["seconds"] for each in found)
            row["bytes"] = found[0]["bytes"]
            print(f"seed {seed}: {json.dumps(row)}", flush=True)
            if arguments.json is not None:
                write_json(arguments.json, rows, results_of="diloco")


if __name__ == "__main__":
    main()
