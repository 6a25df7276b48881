"""Where the ranks of a benchmark run: on loopback, on hosts joined by a link, or under torchrun."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gradferry.core.nodes import Nodes
from gradferry.errors import ConfigError, PeerError

from gradferry_lab.flags import refuse, require_at_least
from gradferry_lab.ranks.hosts import DEVICE_VARIABLE, LOOPBACK, Where, found_hosts
from gradferry_lab.ranks.launch import Body, Emit, Outbox, run_ranks, torchrun_placement
from gradferry_lab.ranks.network import (
    DEVICE,
    Network,
    address,
    check_network,
    parse_link,
)

_PORT = 29500  # nobody else is on the hosts
_LAST_LINES = 40  # of the hosts' standard error, when they fail without a word
_MOST_RANKS = 256  # processes of this machine; `bench collective` has inputs for no more


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares --ranks, --link, --hosts and --ranks-per-host."""
    parser.add_argument(
        "--ranks",
        type=int,
        help="processes, one thread each (default: 2, or --hosts times --ranks-per-host); under "
        "torchrun its own ranks are taken",
    )
    parser.add_argument(
        "--link",
        default=LOOPBACK,
        metavar="RATE",
        help="100mbit, 1gbit, 2.5gbit, ...: network namespaces joined by a link of that rate in "
        "both directions; 'unshaped': by one without a limit (both as root); 'loopback': none. "
        "Under torchrun the network is what it is, and this only names it (default: %(default)s)",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        default=2,
        metavar="M",
        help="network namespaces with --link (default: 2)",
    )
    parser.add_argument(
        "--ranks-per-host",
        type=int,
        metavar="G",
        help="with --link: ranks on each host, which share its interface to the others as if it "
        "were their network card, and meet inside the host without it. Rank = host * G + local "
        "rank (default: 1, or --ranks over --hosts)",
    )


def check_ranks(arguments: argparse.Namespace) -> None:
    """Checks what add_rank_arguments has declared; fills in --ranks, and --ranks-per-host
    where this command makes hosts. Raises ConfigError.
    """
    placement = torchrun_placement()
    if placement:
        arguments.ranks = placement.num_ranks
        return
    if arguments.ranks_per_host is not None:
        require_at_least(1, arguments, "ranks_per_host")
    if arguments.link == LOOPBACK:
        refuse(arguments, ["hosts", "ranks_per_host"], "without --link")
        arguments.ranks = 2 if arguments.ranks is None else arguments.ranks
    else:
        parse_link(arguments.link)
        check_network(arguments.hosts)
        _share_ranks(arguments)
    require_at_least(1, arguments, "ranks")
    if arguments.ranks > _MOST_RANKS:
        raise ConfigError(
            f"{arguments.ranks} ranks: this machine runs at most {_MOST_RANKS} of them; ask for "
            f"fewer, or start the command under torchrun on several machines"
        )


def _share_ranks(arguments: argparse.Namespace) -> None:
    hosts, ranks, per_host = arguments.hosts, arguments.ranks, arguments.ranks_per_host
    if ranks is None:
        ranks = hosts * (per_host or 1)
    if ranks < 1 or ranks % hosts:
        raise ConfigError(f"--ranks {ranks} cannot be shared evenly by --hosts {hosts}")
    if per_host not in (None, ranks // hosts):
        raise ConfigError(
            f"--ranks {ranks} is not --hosts {hosts} times --ranks-per-host {per_host}: leave "
            f"--ranks out"
        )
    arguments.ranks, arguments.ranks_per_host = ranks, ranks // hosts


def run_everywhere(
    arguments: argparse.Namespace,
    body: Body,
    body_arguments: Sequence[Any],
    on_event: Emit,
    report: Callable[[Any, Where], int],
) -> int:
    """Runs `body` on every rank, then `report` where rank 0 is, with its value and where the ranks
    were.

    On a link, the whole command is started again under torchrun on every host, and rank 0
    reports from there. Returns the exit code. Raises as `run_ranks`, and PeerError when a host
    fails.
    """
    placement = torchrun_placement()
    if placement is None and arguments.link != LOOPBACK:
        with TemporaryDirectory(prefix="gradferry_") as folder:
            return _run_on_network(arguments, Outbox(Path(folder)))
    answer = run_ranks(_run_and_look, (body, *body_arguments), arguments.ranks, on_event)
    if placement and placement.rank != 0:
        return 0
    value, hosts = answer
    code = report(value, Where.on(arguments.link, hosts))
    outbox = Outbox.of_this_rank()
    if outbox is None:
        return code
    outbox.leave_exit_code(code)
    return 0  # to torchrun, which would take any other code for a crash


def _run_and_look(emit: Emit, body: Body, *arguments: Any) -> tuple[Any, Nodes]:
    return body(emit, *arguments), found_hosts()


def _run_on_network(arguments: argparse.Namespace, outbox: Outbox) -> int:
    """Standard error goes to a file, because torchrun prints much there when a rank fails."""
    commands = [_torchrun(arguments, host, outbox) for host in range(arguments.hosts)]
    with (outbox.folder / "stderr.log").open("w+") as log:
        with Network(parse_link(arguments.link), commands, log) as network:
            codes = network.wait()
        error, code = outbox.first_error(), outbox.exit_code()
        if error:
            raise error
        if code is None:
            log.seek(0)
            last_words = "".join(log.readlines()[-_LAST_LINES:])
            raise PeerError(f"the hosts ended with codes {codes}:\n{last_words}")
    return code


def _torchrun(arguments: argparse.Namespace, host: int, outbox: Outbox) -> list[str]:
    """This very command, as host number `host` of a torchrun job."""
    environment = {
        DEVICE_VARIABLE: DEVICE,
        Outbox.VARIABLE: str(outbox.folder),
        "OMP_NUM_THREADS": "1",
    }
    return [
        *("env", *(f"{name}={value}" for name, value in environment.items())),
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(arguments.hosts), "--node-rank", str(host)),
        *("--nproc-per-node", str(arguments.ranks_per_host)),
        *("--master-addr", address(1), "--master-port", str(_PORT)),
        *("-m", "gradferry", *arguments.command_line),
    ]
