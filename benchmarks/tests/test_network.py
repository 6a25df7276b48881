"""Hosts made of namespaces: their links, and that nothing of them is left whatever happens."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from gradferry.errors import PeerError
from gradferry_lab.ranks import network
from gradferry_lab.ranks.network import (
    DEVICE,
    Network,
    address,
    parse_link,
    sent_bytes,
)

pytestmark = pytest.mark.usefixtures("namespaces_allowed")

MEGABYTE = 1_000_000
# Each host but the first sends a megabyte to every host before it; each writes down how long the
# slowest of what it got took, and what its interface has sent.
TALK = textwrap.dedent(
    """
    import pathlib, socket, sys, time
    me, hosts, folder, size = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    address = "10.251.0.{}".format
    server = socket.create_server((address(me), 4000), backlog=hosts)
    # A FIFO is opened by both or by none: nobody calls before the other listens, to be refused by
    # one packet after the other.
    for other in range(1, me):
        open(pathlib.Path(folder, f"{other}-{me}")).close()
        peer = socket.create_connection((address(other), 4000))
        peer.sendall(bytes(size))
        peer.shutdown(socket.SHUT_WR)
        assert not peer.recv(1)  # the other has read it all
    started = time.monotonic()
    for other in range(me + 1, hosts + 1):
        open(pathlib.Path(folder, f"{me}-{other}"), "w").close()
    for _ in range(hosts - me):
        peer, _ = server.accept()
        got = len(peer.recv(1))
        while part := peer.recv(1 << 16):
            got += len(part)
        peer.close()
        assert got == size
    seconds = time.monotonic() - started
    counters = open("/proc/self/net/dev").read()
    pathlib.Path(folder, str(me)).write_text(f"{seconds} {counters}")
    """
)


def talk(
    link: str, hosts: int, size: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[float, int]]:
    """Seconds from when others were let send to each host until it had all; bytes that it sent."""
    for pair in itertools.combinations(range(1, hosts + 1), 2):
        os.mkfifo(folder / "{}-{}".format(*pair))
    commands = [
        [sys.executable, "-c", TALK, str(host), str(hosts), str(folder), str(size)]
        for host in range(1, hosts + 1)
    ]
    with Network(parse_link(link), commands) as joined:
        assert joined.wait() == [0] * hosts
    results = []
    for host in range(1, hosts + 1):
        seconds, _, counters = (folder / str(host)).read_text().partition(" ")
        monkeypatch.setattr(network, "_COUNTERS", folder / "counters")
        (folder / "counters").write_text(counters)
        results.append((float(seconds), sent_bytes(DEVICE)))
    return results


def test_two_hosts_talk_at_the_rate_of_their_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (seconds, acknowledged), (_, sent) = talk("10mbit", 2, MEGABYTE, tmp_path, monkeypatch)
    # tbf lets through at most the rate and, once, its burst: 10 Mb/s * 1 ms = 1250 bytes, or two
    # packets of 1514.
    assert seconds >= (MEGABYTE - 2 * 1514) * 8 / 10e6
    # Counted once, not twice: with headers at least, and with what TCP sends again because a busy
    # machine acknowledges late.
    assert MEGABYTE < sent < 1.5 * MEGABYTE
    assert acknowledged < 0.1 * MEGABYTE


def test_three_hosts_reach_each_other_through_a_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [number for _, number in talk("unshaped", 3, MEGABYTE, tmp_path, monkeypatch)]
    for host, megabytes in enumerate([0, 1, 2]):
        assert megabytes * MEGABYTE <= sent[host] < (megabytes + 0.2) * MEGABYTE


# Two processes of one host, one of which sends the other so many bytes, to the host's own address.
SIBLINGS = textwrap.dedent(
    """
    import os, pathlib, socket, sys
    me, folder, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    socket.setdefaulttimeout(30)
    server = socket.create_server((f"10.251.0.{me}", 4000))
    child = os.fork()
    if child == 0:
        socket.create_connection(server.getsockname()).sendall(bytes(size))
        os._exit(0)
    peer, _ = server.accept()
    got = 0
    while part := peer.recv(1 << 16):
        got += len(part)
    assert got == size
    assert os.waitpid(child, 0)[1] == 0
    pathlib.Path(folder, str(me)).write_text(open("/proc/self/net/dev").read())
    # Its end of the link goes with the other host: opened by both, or by none.
    open(pathlib.Path(folder, "both"), "r" if me == 1 else "w").close()
    """
)


def test_processes_of_one_host_do_not_meet_over_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = [
        [sys.executable, "-c", SIBLINGS, str(host), str(tmp_path), str(MEGABYTE)] for host in (1, 2)
    ]
    os.mkfifo(tmp_path / "both")
    with Network(parse_link("10mbit"), commands) as joined:
        assert joined.wait() == [0, 0]
    for host in (1, 2):
        monkeypatch.setattr(network, "_COUNTERS", tmp_path / str(host))
        assert sent_bytes("lo") > MEGABYTE
        assert sent_bytes(DEVICE) < 0.01 * MEGABYTE  # what the kernel says on a new link


def test_one_host_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_LAST_WORDS_S", 0.1)
    with Network(parse_link("unshaped"), [["false"], ["sleep", "1000"]]) as joined:
        codes = joined.wait()
    assert codes[0] == 1
    assert codes[1] != 0


class Hosts:
    """The processes on whose command line a marker stands alone, and their namespaces."""

    def __init__(self, marker: str) -> None:
        self.ends: list[int] = []
        self.namespaces: set[str] = set()
        for entry in process_entries():
            with contextlib.suppress(OSError):  # ended meanwhile, or not ours
                if marker.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    self.namespaces.add(str((entry / "ns/net").readlink()))
                    self.ends.append(os.pidfd_open(int(entry.name)))

    def assert_gone(self, seconds: float) -> None:
        """Every process has ended, or does so in time, and nobody is in their namespaces."""
        for end in self.ends:
            assert select.select([end], [], [], seconds)[0], "a process outlives its network"
            os.close(end)
        alive = set()
        for entry in process_entries():
            with contextlib.suppress(OSError):
                alive.add(str((entry / "ns/net").readlink()))
        assert not (self.namespaces - OWN_NAMESPACE) & alive


def process_entries() -> list[Path]:
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]


OWN_NAMESPACE = {str(Path("/proc/self/ns/net").readlink())}


# Both hosts run a shell that has a child of its own, so that there is someone to forget.
OWNER = textwrap.dedent(
    """
    import sys
    from gradferry_lab.ranks.network import Network, parse_link
    command = ["sh", "-c", "sleep $1 & echo up; wait", "sh", sys.argv[1]]
    with Network(parse_link("unshaped"), [command, command]) as joined:
        joined.wait()
    """
)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_nothing_is_left_of_a_network_whose_owner_is_ended(how: signal.Signals) -> None:
    seconds = str(100_000 + os.getpid())  # a marker that no other process has
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, seconds], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        for _ in range(2):
            assert owner.stdout.readline() == b"up\n", owner.stderr.read()
        hosts = Hosts(seconds)
        assert len(hosts.namespaces - OWN_NAMESPACE) == 2
        assert len(hosts.ends) >= 4
        owner.send_signal(how)
        assert owner.wait(30) != 0
    finally:
        owner.kill()
        owner.communicate()
    hosts.assert_gone(60)


def test_close_returns_when_every_process_has_ended() -> None:
    seconds = str(200_000 + os.getpid())
    with Network(parse_link("unshaped"), [["sleep", seconds]] * 2):
        hosts = Hosts(seconds)
        assert len(hosts.namespaces - OWN_NAMESPACE) == 2
    hosts.assert_gone(0)


def test_a_tool_that_fails_is_named_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = str(300_000 + os.getpid())
    found = []
    run = network._run

    def look_and_run(*command: str) -> None:
        if "tbf" in command:
            found.append(Hosts(seconds))
        run(*command)

    monkeypatch.setattr(network, "_run", look_and_run)
    monkeypatch.setattr(network, "_QUEUE", "never")
    with pytest.raises(PeerError, match="tc qdisc add dev link0 root tbf"):
        Network(parse_link("1gbit"), [["sleep", seconds]] * 2)
    (hosts,) = found
    assert len(hosts.namespaces - OWN_NAMESPACE) == 2
    hosts.assert_gone(0)


def test_counter_of_an_interface_that_is_not_there() -> None:
    assert sent_bytes(DEVICE) is None
    assert sent_bytes("lo") is not None
    assert address(2) == "10.251.0.2"
