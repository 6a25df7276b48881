"""Hosts for one command: network namespaces of this machine, joined by a link of a chosen rate.

Every host is an unnamed network and process namespace, and lives as long as the process that was
started in it. However this process ends, the kernel then ends all processes of the hosts and
removes their interfaces and links: there is nothing to clean up.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

from gradferry.errors import ConfigError, PeerError

DEVICE = "link0"  # every host's interface to the others
UNSHAPED = "unshaped"
_SUBNET = "10.251.0"  # known to the hosts alone
_MOST_HOSTS = 32
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_BURST_SECONDS = 1e-3  # what a link lets through at once after a pause
_QUEUE = "50ms"  # how long a link holds packets back before it drops them
_COUNTERS = Path("/proc/self/net/dev")
_LEAST_BURST = 2 * 1514
_TOOLS = {"iproute2": ("ip", "tc"), "util-linux": ("nsenter", "setpriv", "unshare")}
# Namespaces have no name: those of `ip netns add` would outlive a crash or a kill. These end with
# their processes.
_NEW_HOST = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"),
)
# Says that the namespaces are there, waits for the link, then becomes the command.
_WAIT_FOR_LINK = 'echo >&0 && read -r _ && exec "$@" </dev/null'
_LAST_WORDS_S = 10.0  # after one host has failed, how long the others may go on


def parse_rate(flag: str, text: str, others: str = "") -> float:
    """Bits per second of the option `flag`: `100mbit`, `2.5gbit`, `1Gb/s`. Raises ConfigError.

    others: what may be written instead, for its message.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?([kKmMgG])(bit|bit/s|b/s|bps)", text)
    if not match or float(match[1]) == 0:
        raise ConfigError(f"{flag} {text!r} is no rate; write 100mbit, 1gbit or 2.5gbit{others}")
    return float(match[1]) * _UNITS[match[2].lower()]


def parse_link(text: str) -> float | None:
    """Bits per second of a link between hosts; None: `unshaped`. Raises ConfigError."""
    others = ", 'unshaped' for a link without a limit, or 'loopback' for none"
    return None if text == UNSHAPED else parse_rate("--link", text, others)


def sent_bytes(device: str) -> int | None:
    """Bytes that an interface of this network namespace has sent; None if it has no such one."""
    for line in _COUNTERS.read_text(encoding="ascii").splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == device:
            return int(counters.split()[8])
    return None


def check_network(num_hosts: int) -> None:
    """Raises ConfigError if this process is not allowed, or not able, to make that many hosts."""
    if not 2 <= num_hosts <= _MOST_HOSTS:
        raise ConfigError(f"--hosts {num_hosts}: a network has from 2 to {_MOST_HOSTS} hosts")
    for package, tool in ((package, tool) for package, tools in _TOOLS.items() for tool in tools):
        if shutil.which(tool) is None:
            raise ConfigError(
                f"--link needs the command '{tool}': install {package} (Debian: apt install "
                f"{package}), or use --link loopback"
            )
    allowed = subprocess.run([*_NEW_HOST, "true"], capture_output=True, text=True)
    if allowed.returncode != 0:
        who = "root" if os.geteuid() == 0 else "an ordinary user"
        raise ConfigError(
            f"--link makes network namespaces, which {who} may not do here "
            f"({allowed.stderr.strip()}); run as root with the capabilities SYS_ADMIN and "
            f"NET_ADMIN (docker: --privileged), or use --link loopback"
        )


class Network:
    """Hosts 10.251.0.1, .2, ... joined by a link. A context manager: leaving it ends them.

    A cable (a veth pair) joins two hosts; more hosts have one cable each to a switch. A cable has
    the link's rate in each direction at the same time.
    """

    def __init__(
        self, rate: float | None, commands: Sequence[Sequence[str]], stderr: IO[str] | None = None
    ) -> None:
        """Makes one host per command; the commands start once all hosts are joined.

        rate: of `parse_link`.
        stderr: where their standard error goes; None: where this process's goes.

        Raises ConfigError as check_network does, PeerError when a tool fails.
        """
        check_network(len(commands))
        self._rate = rate
        self._stderr = stderr
        self._all: list[_Host] = []
        try:
            self._hosts = [self._new_host(command) for command in commands]
            self._join()
            for number, host in enumerate(self._hosts, 1):
                host.run("ip", "link", "set", "lo", "up")
                host.run("ip", "address", "add", f"{address(number)}/24", "dev", DEVICE)
                self._bring_up(host, DEVICE)
            for host in self._hosts:
                host.start_command()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> list[int]:
        """Waits for the commands and returns their exit codes; ends all soon after one fails."""
        running = {os.pidfd_open(host.process.pid): host for host in self._hosts}
        failed = False
        while running:
            ended = wait(list(running), _LAST_WORDS_S if failed else None)
            if not ended:
                self.close()
            for end in ended or list(running):
                assert isinstance(end, int)
                failed |= running.pop(end).process.wait() != 0
                os.close(end)
        return [host.process.wait() for host in self._hosts]

    def close(self) -> None:
        """Ends every process of the hosts, and with them hosts and links."""
        for host in self._all:
            host.close()

    def _new_host(self, command: Sequence[str] = ()) -> _Host:
        host = _Host(command, self._stderr)
        self._all.append(host)
        host.wait_until_made()
        return host

    def _join(self) -> None:
        if len(self._hosts) == 2:
            one, other = self._hosts
            _connect(one, DEVICE, other, DEVICE)
            return
        switch = self._new_host()
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        for number, host in enumerate(self._hosts, 1):
            port = f"port{number}"
            _connect(host, DEVICE, switch, port)
            switch.run("ip", "link", "set", port, "master", "switch")
            self._bring_up(switch, port)

    def _bring_up(self, host: _Host, device: str) -> None:
        if self._rate is not None:
            burst = max(_LEAST_BURST, round(self._rate / 8 * _BURST_SECONDS))
            shape = ("rate", f"{self._rate:.0f}bit", "burst", str(burst), "latency", _QUEUE)
            host.run("tc", "qdisc", "add", "dev", device, "root", "tbf", *shape)
        host.run("ip", "link", "set", device, "up")


def address(number: int) -> str:
    """The address of the host with that number, counted from 1."""
    return f"{_SUBNET}.{number}"


class _Host:
    """The namespaces of one host and the command that runs there, as their first process."""

    def __init__(self, command: Sequence[str], stderr: IO[str] | None) -> None:
        self._door, far_end = socket.socketpair()
        self.process = subprocess.Popen(
            [*_NEW_HOST, "sh", "-c", _WAIT_FOR_LINK, "sh", *command],
            stdin=far_end.fileno(),
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the hosts
        )
        far_end.close()

    def wait_until_made(self) -> None:
        if not self._door.recv(1):
            raise PeerError(f"'{' '.join(_NEW_HOST)}' ended with code {self.process.wait()}")

    def start_command(self) -> None:
        self._door.sendall(b"\n")

    def run(self, *command: str) -> None:
        """Runs a command in the host's network namespace."""
        _run("nsenter", "--target", str(self.process.pid), "--net", *command)

    def close(self) -> None:
        # The command dies with `unshare`. It is the host's first process, and the kernel lets it
        # end only when all others of the host have ended.
        family = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):
            firsts = [os.pidfd_open(int(pid)) for pid in family.read_text().split()]
            self.process.kill()
            for first in firsts:
                wait([first])
                os.close(first)
        self.process.kill()
        self.process.wait()
        self._door.close()


def _connect(one: _Host, device: str, other: _Host, far_device: str) -> None:
    near = ("name", device, "netns", str(one.process.pid))
    far = ("name", far_device, "netns", str(other.process.pid))
    _run("ip", "link", "add", *near, "type", "veth", "peer", *far)


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise PeerError(f"'{' '.join(command)}' failed: {ended.stderr.strip()}")
