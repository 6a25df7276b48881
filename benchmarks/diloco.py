"""DiLoCo on hosts behind a slow link: codecs against fp32, and against averages of every step.

`python benchmarks/diloco.py`, as root, trains the model of examples/diloco.py on three hosts
(network namespaces of this machine) joined at 50 Mb/s, with AdamW and with Muon inside, three seeds
each, under every codec; and with AdamW as often on the same bytes with an average of gradients in
every step. It prints the last loss of every training, and by codec its mean and spread, the median
time of an outer step, connections and first steps left out, and what the whole training took and
sent.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import gradferry
import torch
import torch.distributed as dist
from gradferry_lab.flags import add_json
from gradferry_lab.output.json_file import write_json
from gradferry_lab.ranks.network import DEVICE, Network, address, parse_link, sent_bytes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import diloco as example

PERIODS, PERIOD = 12, 50  # outer steps, and inner steps of each
CODECS = ["off", "q4", "rht:bits=2", "sign1", "topk:ratio=0.04,values=q4"]
OPTIMIZERS = ["AdamW", "Muon"]
OUTER_MOMENTUM = 0.5  # for so few outer steps: docs/guide/diloco.md


def inner_optimizers(name: str, model: nn.Sequential) -> list[torch.optim.Optimizer]:
    """AdamW of all; or Muon of the hidden matrix, and AdamW of the rest."""
    matrix = [model[2].weight] if name == "Muon" else []
    rest = [each for each in model.parameters() if not any(each is one for one in matrix)]
    adamw = torch.optim.AdamW(rest, lr=1e-3)
    return [adamw, torch.optim.Muon(matrix, lr=0.02, weight_decay=0.01)] if matrix else [adamw]


def train_here(how: dict[str, Any]) -> None:
    """One rank of a training. Rank 0 prints its result."""
    dist.init_process_group("gloo")
    model = example.build_model(how["seed"])
    text = example.source_code()
    held_out = len(text) - example.VALIDATION - example.CONTEXT
    validation = example.examples(text, torch.arange(held_out, held_out + example.VALIDATION))
    generator = torch.Generator().manual_seed(1000 * how["seed"] + dist.get_rank())
    optimizers = inner_optimizers(how["optimizer"], model)
    trained: nn.Module = model
    diloco = None
    if how["synchronous"]:
        trained = ddp = DistributedDataParallel(model)
        gradferry.attach(ddp, how["codec"])
    else:
        diloco = gradferry.DiLoCo(
            model,
            optimizers,
            PERIOD,
            how["codec"],
            outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=OUTER_MOMENTUM, nesterov=True),
        )
    begin, sent, outer_ms = time.monotonic(), sent_bytes(DEVICE) or 0, []
    for step in range(1, PERIODS * PERIOD + 1):
        begins = torch.randint(held_out - example.CONTEXT, (64,), generator=generator)
        context, following = example.examples(text, begins)
        model.zero_grad()
        cross_entropy(trained(context), following).backward()
        if diloco is not None and step % PERIOD == 0:
            dist.barrier()  # only so that outer_ms has no time that slower ranks train
        for each in optimizers:
            each.step()
        if diloco is not None and step % PERIOD == 0:
            outer_ms.append(diloco.stats()["outer_ms"])
    if diloco is not None:
        diloco.finish()
    result = {"seconds": time.monotonic() - begin, "outer_ms": outer_ms[1:]}
    result["bytes"] = (sent_bytes(DEVICE) or 0) - sent
    with torch.no_grad():
        result["loss"] = cross_entropy(model(validation[0]), validation[1]).item()
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
            "MASTER_PORT=29400",
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


def trainings(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What to train, without seeds."""
    for optimizer in arguments.optimizers:
        for codec in arguments.codecs:
            yield {"optimizer": optimizer, "codec": codec, "synchronous": False}
    for codec in arguments.synchronous:
        yield {"optimizer": "AdamW", "codec": codec, "synchronous": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--link", default="50mbit")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--synchronous", nargs="*", default=["q4"], help="codecs of gradients")
    parser.add_argument("--rank-of", type=json.loads, help=argparse.SUPPRESS)
    add_json(parser)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        train_here(arguments.rank_of)
        return
    rows = [
        {**how, "hosts": arguments.hosts, "link": arguments.link} for how in trainings(arguments)
    ]
    results: list[list[dict[str, Any]]] = [[] for _ in rows]
    for seed in range(arguments.seeds):
        for row, found in zip(rows, results, strict=True):
            found.append(train({**row, "seed": seed}, arguments.hosts, arguments.link))
            row["losses"] = [each["loss"] for each in found]
            row["loss"] = mean(row["losses"])
            row["spread"] = stdev(row["losses"]) if seed else 0.0
            times = [ms for each in found for ms in each["outer_ms"]]
            row["outer_step_ms"] = median(times) if times else None
            row["seconds"] = median(each["seconds"] for each in found)
            row["bytes"] = found[0]["bytes"]
            print(f"seed {seed}: {json.dumps(row)}", flush=True)
            if arguments.json is not None:
                write_json(arguments.json, rows, results_of="diloco")


if __name__ == "__main__":
    main()
