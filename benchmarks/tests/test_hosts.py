"""Where ranks are: on this machine, on hosts made of namespaces, and what leaves a host."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from gradferry.core.nodes import Nodes
from gradferry.errors import ConfigError, PeerError
from gradferry_lab.flags import Parser
from gradferry_lab.ranks import hosts, network
from gradferry_lab.ranks.everywhere import add_rank_arguments, check_ranks
from gradferry_lab.ranks.hosts import InterfaceCounter, Where, busiest_host
from gradferry_lab.ranks.network import DEVICE, Network, check_network, parse_link, sent_bytes


def test_link_is_a_rate_or_refused() -> None:
    rates: dict[str, float | None] = {"100mbit": 1e8, "2.5gbit": 2.5e9, ".5gbit": 5e8}
    rates |= {"64kbit": 64e3, "1Gb/s": 1e9, "1 gbit": 1e9, "1gbps": 1e9, "unshaped": None}
    assert {text: parse_link(text) for text in rates} == rates
    for text in ("1", "fast", "1GB/s", "-1gbit", "0mbit", "1 g", "1.2.3gbit"):
        with pytest.raises(ConfigError, match=r"100mbit.*'unshaped'.*or 'loopback'"):
            parse_link(text)


def test_who_may_not_make_namespaces_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(network, "_NEW_HOST", ("sh", "-c", "echo not permitted >&2; exit 1"))
    with pytest.raises(ConfigError, match=r"not permitted.*--link loopback"):
        check_network(2)


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("", 2),
        ("--ranks 3", 3),
        ("--link 1gbit", 2),
        ("--link 1gbit --hosts 32 --ranks-per-host 8", 256),
        ("--link 1gbit --ranks 3", "--ranks"),
        ("--link 1gbit --ranks-per-host 0", "--ranks-per-host: 0 must be at least 1"),
        ("--ranks-per-host 2", "--ranks-per-host means nothing without --link"),
        ("--link 1gbit --ranks-per-host 2 --ranks 6", "--ranks 6 is not --hosts 2 times"),
        ("--link 1gbit --hosts 32 --ranks-per-host 9", "288 ranks: .*at most 256.*torchrun"),
    ],
)
def test_ranks_follow_from_hosts_or_cannot_be_had(
    line: str, ranks: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradferry_lab.ranks.everywhere.check_network", lambda hosts: None)
    parser = Parser()
    add_rank_arguments(parser)
    arguments = parser.parse_args(line.split())
    if isinstance(ranks, int):
        check_ranks(arguments)
        assert arguments.ranks == ranks
    else:
        with pytest.raises(ConfigError, match=ranks):
            check_ranks(arguments)


def test_the_busiest_host_is_the_one_whose_ranks_send_most_together() -> None:
    nodes = Nodes(((0, 2), (1,)))
    assert busiest_host(nodes, [3, 5, 3]) == (0, 6)
    assert busiest_host(nodes, [1, 5, 1]) == (1, 5)
    assert Where.on("1gbit", nodes) == Where("1gbit", 3, 2, None)
    assert Where.on("loopback", Nodes(((0, 1), (2, 3)))) == Where("network", 4, 2, 2)


def test_no_rank_reads_while_another_of_its_host_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    card = {"name": "eth0", "counted": True}
    monkeypatch.setattr(hosts, "sent_bytes", lambda _: done.append("read") or len(done))
    monkeypatch.setattr(hosts, "gather_from_ranks", lambda mine: [card] * 4)
    monkeypatch.setattr(hosts.dist, "barrier", lambda: done.append("barrier"))
    interface = InterfaceCounter(Nodes(((0, 1), (2, 3))))
    done.clear()
    interface.begin()
    done.append("send")
    interface.end()
    assert done == ["barrier", "read", "barrier", "send", "barrier", "read"]


# Host 2 sends a megabyte to host 1, which writes down how long it took.
TALK = textwrap.dedent(
    """
    import pathlib, socket, sys, time
    me, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    if me == 2:
        open(folder / "ready").close()  # a FIFO: opened by both or by none
        peer = socket.create_connection(("10.251.0.1", 4000))
        peer.sendall(bytes(1_000_000))
        peer.shutdown(socket.SHUT_WR)
        assert not peer.recv(1)  # the other has read it all
    else:
        server = socket.create_server(("10.251.0.1", 4000))
        started = time.monotonic()
        open(folder / "ready", "w").close()
        peer, _ = server.accept()
        while peer.recv(1 << 16):
            pass
        peer.close()
        (folder / "seconds").write_text(str(time.monotonic() - started))
    (folder / str(me)).write_text(open("/proc/self/net/dev").read())
    """
)


@pytest.mark.usefixtures("namespaces_allowed")
@pytest.mark.parametrize("num_hosts", [2, 3])  # by a cable, by a switch
def test_hosts_talk_at_the_rate_of_their_link(
    num_hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "ready")
    talk = [[sys.executable, "-c", TALK, host, str(tmp_path)] for host in "12"]
    with Network(parse_link("10mbit"), [*talk, ["true"]][:num_hosts]) as joined:
        assert joined.wait() == [0] * num_hosts
    # tbf lets through at most the rate and, once, its burst: 10 Mb/s * 1 ms = 1250 bytes, or two
    # packets of 1514.
    assert float((tmp_path / "seconds").read_text()) >= (1_000_000 - 2 * 1514) * 8 / 10e6
    sent = []
    for host in "12":
        monkeypatch.setattr(network, "_COUNTERS", tmp_path / host)
        sent.append(sent_bytes(DEVICE))
    # Counted once, not twice: with headers at least, and with what TCP sends again.
    assert 1_000_000 < sent[1] < 1_500_000
    assert sent[0] < 100_000


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


def processes_with(marker: str) -> list[int]:
    """File descriptors of the processes on whose command line a marker stands alone."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # ended meanwhile, or no process
            if marker.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(os.pidfd_open(int(entry.name)))
    return found


@pytest.mark.usefixtures("namespaces_allowed")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_network_whose_owner_is_ended(how: signal.Signals) -> None:
    marker = str(100_000 + os.getpid())  # seconds that no other process sleeps
    command = [sys.executable, "-c", OWNER, marker]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        for _ in range(2):
            assert owner.stdout.readline() == b"up\n", owner.stderr.read()
        processes = processes_with(marker)
        assert len(processes) >= 5  # with the owner
        owner.send_signal(how)
        assert owner.wait(30) != 0
    finally:
        owner.kill()
        owner.communicate()
    for process in processes:
        assert select.select([process], [], [], 60)[0], "a process outlives its network"
        os.close(process)


@pytest.mark.usefixtures("namespaces_allowed")
def test_a_failure_of_a_host_or_a_tool_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_LAST_WORDS_S", 0.1)
    marker = str(300_000 + os.getpid())
    with Network(parse_link("unshaped"), [["false"], ["sleep", marker]]) as joined:
        codes = joined.wait()
    assert codes[0] == 1
    assert codes[1] != 0
    monkeypatch.setattr(network, "_QUEUE", "never")
    with pytest.raises(PeerError, match="tc qdisc add dev link0 root tbf"):
        Network(parse_link("1gbit"), [["sleep", marker]] * 2)
    assert processes_with(marker) == []
