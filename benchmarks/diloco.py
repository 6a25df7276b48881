"""DiLoCo on hosts behind a slow link: codecs against fp32, against averages of every step, and
against torchft's own DiLoCo.

`python benchmarks/diloco.py`, as root, trains the model of examples/diloco.py on three hosts
(network namespaces of this machine) joined at 50 Mb/s, with AdamW and with Muon inside, three seeds
each, under every codec; and with AdamW as often on the same bytes with an average of gradients in
every step. It prints the last loss of every training, and by codec its mean and spread, the median
time of an outer step, connections and first steps left out, and what the whole training took and
sent.

`--codecs torchft torchft:q4`, where torchft is installed, trains the same with AdamW under
torchft's DiLoCo, with fp32 and with averages through a codec; beside rank 0 there is a lighthouse.
`--task text_10m` measures outer steps of a larger model, of 10.9 million parameters: two inner
steps before each of three, which say nothing of the loss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from importlib import util
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import gradferry
import torch
import torch.distributed as dist
from gradferry.errors import ConfigError
from gradferry_lab.flags import add_json
from gradferry_lab.output.json_file import require_replaceable, write_json
from gradferry_lab.ranks.network import DEVICE, Network, address, parse_link, sent_bytes
from gradferry_lab.workloads import load_task
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import diloco as example

RESULTS_OF = "diloco"
CODECS = ["off", "q4", "rht:bits=2", "sign1", "topk:ratio=0.04,values=q4"]
OPTIMIZERS = ["AdamW", "Muon"]
OUTER_MOMENTUM = 0.5  # for so few outer steps: docs/guide/diloco.md
TORCHFT = "torchft"  # as a codec: torchft's own averages; before ":" those of a codec in its DiLoCo
_STORE_PORT, _LIGHTHOUSE_PORT = 29400, 29510  # of hosts that exist for one training
_PATIENCE = timedelta(minutes=10)  # longer than any outer step here


# --- what is trained -----------------------------------------------------------------------------


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


TASKS = {"tiny": tiny, "text_10m": text_10m}


def inner_optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW of all; or Muon of the hidden matrix of the example's model, and AdamW of the rest."""
    matrix = [model.get_parameter("2.weight")] if name == "Muon" else []
    rest = [each for each in model.parameters() if not any(each is one for one in matrix)]
    adamw = torch.optim.AdamW(rest, lr=1e-3)
    return [adamw, torch.optim.Muon(matrix, lr=0.02, weight_decay=0.01)] if matrix else [adamw]


def outer_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The same one of all contestants."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=OUTER_MOMENTUM, nesterov=True, fused=True)


# --- one rank ------------------------------------------------------------------------------------


class OuterClock:
    """Times outer steps, which begin when the slowest rank has taken its inner step.

    Made of the optimizer that steps last, before a DiLoCo of it is: the hooks of an optimizer run
    in the order in which they came.
    """

    def __init__(self, last: torch.optim.Optimizer) -> None:
        self.is_due = False  # the step to come ends a period
        self.ms: list[float] = []
        self._begin = 0.0
        last.register_step_post_hook(self._begins)

    def _begins(self, *_: object) -> None:
        if self.is_due:
            dist.barrier()
            self._begin = time.monotonic()

    def ends(self) -> None:
        """To be called after every step."""
        if self.is_due:
            self.ms.append(1e3 * (time.monotonic() - self._begin))


def begin_torchft(codec: str, work: Work, inner: torch.optim.Optimizer, ends: ExitStack) -> Any:
    """Puts the model under torchft's DiLoCo, with this rank as a replica, until `ends`. Returns
    its manager.
    """
    import torchft
    from torchft.local_sgd import DiLoCo

    host, model = address(dist.get_rank() + 1), work.model
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_PATIENCE),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=dist.get_world_size(),
        use_async_quorum=False,
        timeout=_PATIENCE,
        quorum_timeout=_PATIENCE,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{address(1)}:{_LIGHTHOUSE_PORT}",
        replica_id=f"replica_{dist.get_rank()}",
        hostname=host,
        init_sync=False,  # all begin with the parameters of one seed
    )
    ends.callback(lambda _: manager.shutdown(), store)  # which lives until then
    diloco = DiLoCo(manager, [model], inner, outer_optimizer(model.parameters()), work.period)
    if codec:
        from gradferry.integrations.torchft import compress

        compress(diloco, codec)
    ends.enter_context(diloco)
    return manager


def train_here(how: dict[str, Any]) -> None:
    """One rank of a training. Rank 0 prints its result."""
    dist.init_process_group("gloo")
    work = TASKS[how["task"]](how["seed"])
    optimizers = inner_optimizers(how["optimizer"], work.model)
    clock = OuterClock(optimizers[-1])
    name, _, codec = how["codec"].partition(":")
    with ExitStack() as ends:
        trained: nn.Module = work.model
        diloco = manager = None
        if how["synchronous"]:
            trained = ddp = DistributedDataParallel(work.model)
            gradferry.attach(ddp, how["codec"])
        elif name == TORCHFT:
            manager = begin_torchft(codec, work, optimizers[0], ends)
        else:
            diloco = gradferry.DiLoCo(
                work.model, optimizers, work.period, how["codec"], outer=outer_optimizer
            )
        begin, sent = time.monotonic(), sent_bytes(DEVICE) or 0
        for step in range(1, work.periods * work.period + 1):
            work.model.zero_grad()
            work.loss(trained).backward()
            clock.is_due = not how["synchronous"] and step % work.period == 0
            for each in optimizers:
                each.step()
            clock.ends()
        if diloco is not None:
            diloco.finish()
        if manager is not None and manager.current_step() != work.periods:
            raise SystemExit(f"torchft has committed {manager.current_step()} outer steps")
        result = {"seconds": time.monotonic() - begin, "outer_ms": clock.ms[1:]}
        result["bytes"] = (sent_bytes(DEVICE) or 0) - sent
        result["loss"] = work.validate() if work.validate is not None else None
        if dist.get_rank() == 0:
            print(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()


def serve_lighthouse(hosts: int, command: list[str]) -> int:
    """Runs the command of a rank beside a lighthouse of torchft. Returns its exit code."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind=f"[::]:{_LIGHTHOUSE_PORT}", min_replicas=hosts)
    try:
        return subprocess.run(command).returncode
    finally:
        lighthouse.shutdown()


# --- all of them ---------------------------------------------------------------------------------


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
            f"RUST_LOG={os.environ.get('RUST_LOG', 'warn')}",  # torchft says much of every step
        ]
        rank_of = [sys.executable, __file__, "--rank-of", json.dumps(how)]
        commands = [["env", *environment, f"RANK={rank}", *rank_of] for rank in range(hosts)]
        if of_torchft(how["codec"]):
            commands[0] = [*commands[0], "--lighthouse"]
        commands[0] = ["sh", "-c", f'exec "$@" >{printed}', "sh", *commands[0]]
        with Network(parse_link(link), commands) as network:
            if any(network.wait()):
                raise SystemExit(f"a rank failed with {how}")
        result: dict[str, Any] = json.loads(printed.read_text())
    return result


def of_torchft(codec: str) -> bool:
    return codec.partition(":")[0] == TORCHFT


def trainings(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What to train, without seeds."""
    of = {"task": arguments.task}
    for optimizer in arguments.optimizers:
        for codec in arguments.codecs:
            # torchft's DiLoCo has one inner optimizer, and with Muon there are two.
            if optimizer == "AdamW" or not of_torchft(codec):
                yield {**of, "optimizer": optimizer, "codec": codec, "synchronous": False}
    for codec in arguments.synchronous:
        yield {**of, "optimizer": "AdamW", "codec": codec, "synchronous": True}


def check(arguments: argparse.Namespace) -> None:
    """Fills in what depends on the task. Raises ConfigError for what cannot be trained or
    written.
    """
    is_tiny = arguments.task == "tiny"
    torchft = [codec for codec in arguments.codecs if of_torchft(codec)]
    if arguments.optimizers is None:
        arguments.optimizers = OPTIMIZERS if is_tiny else ["AdamW"]
    if arguments.synchronous is None:
        arguments.synchronous = ["q4"] if is_tiny else []
    if "Muon" in arguments.optimizers and not is_tiny:
        raise ConfigError("--optimizers Muon is for the task tiny; give --optimizers AdamW")
    if torchft and "AdamW" not in arguments.optimizers:
        raise ConfigError("torchft's DiLoCo has one inner optimizer; give --optimizers AdamW")
    if torchft and util.find_spec("torchft") is None:
        raise ConfigError(
            f"--codecs {' '.join(torchft)}: torchft is not installed here: "
            'pip install "gradferry[torchft]"'
        )
    if arguments.json is not None:
        require_replaceable(arguments.json, RESULTS_OF)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="tiny")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--link", default="50mbit")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument(
        "--codecs", nargs="+", default=CODECS, help="also torchft, and torchft:CODEC"
    )
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS)
    parser.add_argument("--synchronous", nargs="*", metavar="CODEC", help="codecs of gradients")
    parser.add_argument("--rank-of", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", action="store_true", help=argparse.SUPPRESS)
    add_json(parser)
    arguments = parser.parse_args()
    if arguments.lighthouse:
        command = [each for each in sys.argv if each != "--lighthouse"]
        sys.exit(serve_lighthouse(int(os.environ["WORLD_SIZE"]), [sys.executable, *command]))
    if arguments.rank_of is not None:
        train_here(arguments.rank_of)
        return
    try:
        check(arguments)
    except ConfigError as error:
        parser.error(str(error))
    rows = [
        {**how, "hosts": arguments.hosts, "link": arguments.link} for how in trainings(arguments)
    ]
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
                write_json(arguments.json, rows, results_of=RESULTS_OF)


if __name__ == "__main__":
    main()
