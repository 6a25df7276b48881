"""Where the ranks of a benchmark run: on loopback, on hosts joined by a link, or under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gradferry.errors import ConfigError, PeerError
from gradferry.lab.flags import require_at_least_one
from gradferry.lab.ranks.launch import (
    Body,
    Emit,
    Outbox,
    gather_from_ranks,
    run_ranks,
    torchrun_placement,
)
from gradferry.lab.ranks.network import (
    DEVICE,
    Network,
    address,
    check_network,
    parse_link,
    sent_bytes,
)

LOOPBACK = "loopback"
_PORT = 29500  # nobody else is on the hosts
_DEVICE_VARIABLE = "GLOO_SOCKET_IFNAME"  # how gloo is told which interface to use
_LAST_LINES = 40  # of the hosts' standard error, when they fail without a word
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # tells machines apart
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares --ranks, --link and --hosts."""
    parser.add_argument(
        "--ranks",
        type=int,
        help="processes, one thread each (default: 2, or one per host); under torchrun its own "
        "ranks are taken",
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
        "--hosts", type=int, default=2, help="network namespaces with --link (default: 2)"
    )


def check_ranks(arguments: argparse.Namespace) -> None:
    """Checks what add_rank_arguments has declared; fills in --ranks. Raises ConfigError."""
    placement = torchrun_placement()
    if placement:
        arguments.ranks = placement.num_ranks
        return
    if arguments.link == LOOPBACK:
        arguments.ranks = 2 if arguments.ranks is None else arguments.ranks
    else:
        parse_link(arguments.link)
        check_network(arguments.hosts)
        arguments.ranks = arguments.hosts if arguments.ranks is None else arguments.ranks
        if arguments.ranks < 1 or arguments.ranks % arguments.hosts:
            raise ConfigError(
                f"--ranks {arguments.ranks} cannot be shared evenly by --hosts {arguments.hosts}"
            )
    require_at_least_one(arguments, "ranks")


def run_everywhere(
    arguments: argparse.Namespace,
    body: Body,
    body_arguments: Sequence[Any],
    on_event: Emit,
    report: Callable[[Any], int],
) -> int:
    """Runs `body` on every rank, then `report` with rank 0's value where that rank is.

    On a link, the whole command is started again under torchrun on every host, and rank 0
    reports from there. Returns the exit code. Raises as `run_ranks`, and PeerError when a host
    fails.
    """
    placement = torchrun_placement()
    if placement is None and arguments.link != LOOPBACK:
        with TemporaryDirectory(prefix="gradferry_") as folder:
            return _run_on_network(arguments, Outbox(Path(folder)))
    value = run_ranks(body, body_arguments, arguments.ranks, on_event)
    if placement and placement.rank != 0:
        return 0
    code = report(value)
    outbox = Outbox.of_this_rank()
    if outbox is None:
        return code
    outbox.leave_exit_code(code)
    return 0  # to torchrun, which would take any other code for a crash


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
        _DEVICE_VARIABLE: DEVICE,
        Outbox.VARIABLE: str(outbox.folder),
        "OMP_NUM_THREADS": "1",
    }
    return [
        *("env", *(f"{name}={value}" for name, value in environment.items())),
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(arguments.hosts), "--node-rank", str(host)),
        *("--nproc-per-node", str(arguments.ranks // arguments.hosts)),
        *("--master-addr", address(1), "--master-port", str(_PORT)),
        *("-m", "gradferry", *arguments.command_line),
    ]


class InterfaceCounter:
    """Bytes that this rank's network interface has sent, where the rank has one to itself."""

    def __init__(self) -> None:
        """Collective. `read` returns None if gloo was given no interface, or if ranks share a host
        and so its interface.
        """
        here = os.environ.get(_DEVICE_VARIABLE, "")
        machine, namespace = _BOOT_ID.read_text(), str(_NETWORK_NAMESPACE.readlink())
        mine = {"machine": machine, "namespace": namespace, "interface": here}
        everyone = gather_from_ranks(mine)
        alone = all(everyone.count(record) == 1 for record in everyone)
        self._device = here if alone and sent_bytes(here) is not None else None

    def read(self) -> int | None:
        """Bytes sent so far; None if the interface is not this rank's alone."""
        return None if self._device is None else sent_bytes(self._device)
