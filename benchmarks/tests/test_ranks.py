"""--link, --hosts, --ranks, --ranks-per-host: what they accept and what they refuse."""

from __future__ import annotations

import argparse

import pytest
from gradferry.errors import ConfigError
from gradferry_lab.flags import Parser
from gradferry_lab.ranks import network
from gradferry_lab.ranks.everywhere import add_rank_arguments, check_ranks
from gradferry_lab.ranks.launch import Placement, torchrun_placement
from gradferry_lab.ranks.network import check_network, parse_link


def test_link_is_a_rate_or_refused() -> None:
    rates: dict[str, float | None] = {"100mbit": 1e8, "2.5gbit": 2.5e9, ".5gbit": 5e8}
    rates |= {"64kbit": 64e3, "1Gb/s": 1e9, "1 gbit": 1e9, "1gbps": 1e9, "unshaped": None}
    assert {text: parse_link(text).bits_per_second for text in rates} == rates
    assert parse_link("100mbit").name == "100mbit"
    for text in ("1", "fast", "1GB/s", "-1gbit", "0mbit", "1 g", "1.2.3gbit"):
        with pytest.raises(ConfigError, match=r"100mbit.*'unshaped'.*or 'loopback'"):
            parse_link(text)


def test_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(ConfigError, match="'tc': install iproute2"):
        check_network(2)
    for hosts in (1, 33):
        with pytest.raises(ConfigError, match="--hosts"):
            check_network(hosts)


@pytest.mark.parametrize(("user", "name"), [(1000, "an ordinary user"), (0, "root")])
def test_who_may_not_make_namespaces_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, user: int, name: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr(network, "_NEW_HOST", ("sh", "-c", "echo not permitted >&2; exit 1"))
    with pytest.raises(ConfigError, match=rf"{name}.*not permitted.*run as root.*--link loopback"):
        check_network(2)


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser()
    add_rank_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def every_network_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradferry_lab.ranks.everywhere.check_network", lambda hosts: None)


@pytest.mark.usefixtures("every_network_is_possible")
@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("", 2),
        ("--ranks 3", 3),
        ("--link 1gbit", 2),
        ("--link 1gbit --hosts 3", 3),
        ("--link 1gbit --hosts 2 --ranks 4", 4),
        ("--link 1gbit --hosts 3 --ranks-per-host 2", 6),
        ("--link 1gbit --hosts 3 --ranks-per-host 2 --ranks 6", 6),
        ("--link 1gbit --hosts 32 --ranks-per-host 8", 256),
    ],
)
def test_ranks_follow_from_hosts_unless_given(line: str, ranks: int) -> None:
    arguments = parsed(*line.split())
    check_ranks(arguments)
    assert arguments.ranks == ranks
    if arguments.link != "loopback":
        assert arguments.ranks == arguments.hosts * arguments.ranks_per_host


@pytest.mark.usefixtures("every_network_is_possible")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ranks 0", "--ranks"),
        ("--link 1gbit --ranks 3", "--ranks"),
        ("--link 1gbit --ranks 0", "--ranks"),
        ("--link 1gbit --ranks-per-host 0", "--ranks-per-host: 0 must be at least 1"),
        ("--ranks-per-host 2", "--ranks-per-host 2: .*add .*--link 1gbit --hosts 2.*--ranks 2"),
        (
            "--link 1gbit --hosts 2 --ranks-per-host 2 --ranks 6",
            "--ranks 6 is not --hosts 2 times --ranks-per-host 2: leave --ranks out",
        ),
        ("--link 1gbit --hosts 32 --ranks-per-host 9", "288 ranks: .*at most 256.*torchrun"),
        ("--ranks 257", "257 ranks: .*at most 256"),
        ("--hosts 2", "--hosts means nothing without --link"),
    ],
)
def test_ranks_that_cannot_be_had_say_what_to_do(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_ranks(parsed(*line.split()))


def test_under_torchrun_its_ranks_are_taken_and_the_link_is_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "5", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    assert torchrun_placement() is None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert torchrun_placement() == Placement(1, 5)
    arguments = parsed("--link", "our InfiniBand")
    check_ranks(arguments)
    assert arguments.ranks == 5
