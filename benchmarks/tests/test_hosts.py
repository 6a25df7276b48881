"""Ranks that share a host: who they are, and what leaves it, as counted and by formula."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from gradferry.core.nodes import Nodes
from gradferry_lab.cli import main
from gradferry_lab.ranks import everywhere, hosts
from gradferry_lab.ranks.hosts import (
    InterfaceCounter,
    Where,
    busiest_host,
    found_hosts,
    ranks_text,
)
from gradferry_lab.ranks.launch import Outbox
from gradferry_lab.ranks.network import DEVICE, Network, parse_link
from test_ranks import parsed
from world import World


def hosts_of(*of_rank: int) -> Nodes:
    """The table of ranks that are on these hosts."""
    numbers = dict.fromkeys(of_rank)
    return Nodes(
        tuple(tuple(r for r, host in enumerate(of_rank) if host == number) for number in numbers)
    )


def test_where_ranks_are_says_how_many_a_host_has() -> None:
    assert Where.on("1gbit", hosts_of(0, 0, 1, 1)) == Where("1gbit", 4, 2, 2)
    assert Where.on("1gbit", hosts_of(0, 1, 0)) == Where("1gbit", 3, 2, None)


def test_the_busiest_host_is_the_one_whose_ranks_send_most_together() -> None:
    assert busiest_host(hosts_of(0, 0, 1), [3, 3, 5]) == (0, 6)
    assert busiest_host(hosts_of(0, 0, 1), [1, 1, 5]) == (1, 5)
    assert busiest_host(hosts_of(0, 1), [0, 0]) == (0, 0)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"ranks": 4}, "4 ranks"),  # of an older file
        ({"ranks": 4, "hosts": 1}, "4 ranks"),
        ({"ranks": 4, "hosts": 4}, "4 ranks"),
        ({"ranks": 4, "hosts": 2}, "4 ranks on 2 hosts"),
    ],
)
def test_hosts_are_named_where_ranks_share_them(row: dict[str, int], text: str) -> None:
    assert ranks_text(row) == text


def test_a_link_between_hosts_is_not_called_loopback() -> None:
    assert Where.on("loopback", hosts_of(0, 0)).link == "loopback"
    assert Where.on("loopback", hosts_of(0, 1)).link == "network"
    assert Where.on("1gbit", hosts_of(0, 1)).link == "1gbit"


def test_processes_of_one_namespace_are_on_one_host(world_of_2: World) -> None:
    assert world_of_2.run(found_hosts) == [hosts_of(0, 0)] * 2


def counter(
    monkeypatch: pytest.MonkeyPatch, of_rank: tuple[int, ...], records: list[dict[str, Any]]
) -> tuple[InterfaceCounter, list[str]]:
    """A counter on ranks that name these interfaces, and what it does. A reading is 100 more."""
    done: list[str] = []

    def read(device: str) -> int:
        done.append("read")
        return 100 * done.count("read")

    monkeypatch.setattr(hosts, "sent_bytes", read)
    monkeypatch.setattr(hosts, "gather_from_ranks", lambda mine: records)
    monkeypatch.setattr(hosts.dist, "barrier", lambda: done.append("barrier"))
    made = InterfaceCounter(hosts_of(*of_rank))
    done.clear()
    return made, done


CARD = {"name": "eth0", "counted": True}


def test_no_rank_reads_while_another_of_its_host_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    interface, done = counter(monkeypatch, (0, 0, 1, 1), [CARD] * 4)
    interface.begin()
    done.append("send")
    assert interface.end() == 100
    assert done == ["barrier", "read", "barrier", "send", "barrier", "read"]


@pytest.mark.parametrize(
    ("of_rank", "records"),
    [
        ((0, 0), [CARD] * 2),  # nothing leaves the host
        ((0, 0, 1), [CARD, {"name": "eth1", "counted": True}, CARD]),
        ((0, 1), [CARD, {"name": "", "counted": False}]),
    ],
)
def test_what_no_one_interface_counts_is_not_told(
    monkeypatch: pytest.MonkeyPatch, of_rank: tuple[int, ...], records: list[dict[str, Any]]
) -> None:
    interface, done = counter(monkeypatch, of_rank, records)
    interface.begin()
    assert interface.end() is None
    assert done == []


@pytest.mark.usefixtures("namespaces_allowed")
def test_ranks_of_a_host_are_numbered_as_torchrun_does(tmp_path: Path) -> None:
    say = textwrap.dedent(
        """
        import json, os, pathlib, sys
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE")
        said = [int(os.environ[name]) for name in names]
        said.append(os.environ["GLOO_SOCKET_IFNAME"])
        pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(said))
        """
    )
    (tmp_path / "say.py").write_text(say)
    arguments = parsed("--link", "unshaped", "--ranks-per-host", "2")
    everywhere.check_ranks(arguments)
    arguments.command_line = ()
    commands = []
    for host in range(arguments.hosts):
        *launcher, dash_m, gradferry = everywhere._torchrun(arguments, host, Outbox(tmp_path))
        assert (dash_m, gradferry) == ("-m", "gradferry")
        commands.append([*launcher, str(tmp_path / "say.py"), str(tmp_path)])
    with Network(parse_link("unshaped"), commands) as network:
        assert network.wait() == [0, 0]
    said = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert said == [[rank % 2, 2, rank // 2, 4, DEVICE] for rank in range(4)]


@pytest.mark.usefixtures("namespaces_allowed")
def test_collective_counts_what_ranks_of_a_host_send_to_other_hosts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    size = ["-b", "1M", "-e", "1M", "-n", "1", "-w", "0", "--codecs", "q4", "--json", str(file)]
    size += ["--exchange", "flat", "two-level"]
    link = ["--link", "unshaped", "--hosts", "2", "--ranks-per-host", "2"]
    assert main(["bench", "collective", *link, *size]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["codec"], row["exchange"]) for row in rows] == [
        ("torch:fp32", None),
        ("torch:fp16", None),
        ("torch:bf16", None),
        ("q4", "flat"),
        ("q4", "two-level"),
    ]
    for row in rows:
        assert row["wrong"] == 0
        assert (row["ranks"], row["hosts"], row["ranks_per_host"]) == (4, 2, 2)
        formula = row["interface_bytes_formula"]
        if row["exchange"] == "two-level":
            assert formula == 2 * row["wire"]  # which counts what leaves the node
            with_siblings = 3 / 2  # of the smallest: a gradient in fp32 is larger still
        elif row["exchange"] == "flat":
            # Two of the three messages of each of two ranks leave. All ranks have as many tiles.
            assert 3 * formula == 2 * 2 * row["wire"]
            with_siblings = 3 / 2
        else:
            assert (
                formula == row["wire"]
            )  # one rank of a host has the next one of the ring elsewhere
            with_siblings = 2
        # Headers and acknowledgements take at most 2 * 66 bytes of 1448 each way, and three
        # barriers under 4 kB each. The rest is for what TCP sends again because a busy machine
        # acknowledges late; what ranks of one host send each other would not fit in.
        assert formula <= row["interface_bytes"] < with_siblings * formula
        assert (2 * 66 / 1448) * formula + 3 * 4096 < (with_siblings - 1) * formula
    shown = capfd.readouterr().out
    assert "4 ranks on 2 hosts, link unshaped" in shown
    assert "interface" in shown
    assert "two-level" in shown
