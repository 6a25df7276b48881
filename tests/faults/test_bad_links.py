"""Two hosts in namespaces, whose link goes down for good, goes down for a while, or is slow."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_play import hashes_of
from gradferry_lab.ranks.network import DEVICE, Network, parse_link
from link_script import SCENARIO, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("namespaces_allowed")]

SCRIPT = Path(__file__).parents[1] / "helpers" / "link_script.py"
START_SECONDS = 120.0
TIMEOUT = 4.0
PATIENCE = 120.0


def down(network: Network) -> None:
    network._hosts[1].run("ip", "link", "set", DEVICE, "down")


def up(network: Network) -> None:
    network._hosts[1].run("ip", "link", "set", DEVICE, "up")


def nothing(_: Network) -> None:
    pass


def train(
    folder: Path,
    seconds: float,
    link: str = "unshaped",
    before: Callable[[Network], None] = nothing,
    meanwhile: Callable[[Network], None] = nothing,
) -> list[dict[str, Any]]:
    """What both ranks saw: in the middle of their steps they wait while `before` happens."""
    commands = [[sys.executable, str(SCRIPT), str(r), str(folder), str(seconds)] for r in (0, 1)]
    with Network(parse_link(link), commands) as network:
        deadline = time.monotonic() + START_SECONDS
        while len(list(folder.glob("ready *"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before(network)
        (folder / "go").touch()
        meanwhile(network)
        codes = network.wait()
    assert codes == [0, 0]
    return [json.loads((folder / f"rank {rank}").read_text()) for rank in (0, 1)]


def test_link_that_is_down_for_good_ends_both_with_the_timeout(tmp_path: Path) -> None:
    seen = train(tmp_path, TIMEOUT, before=down)
    for rank, answer in enumerate(seen):
        assert answer["error"] == "PeerError", seen
        assert f"rank {rank} lost contact with rank {1 - rank} (step " in answer["text"]


def expect_all_steps(seen: list[dict[str, Any]]) -> None:
    expected = hashes_of(SCENARIO, STEPS)[-1]
    assert [(answer["error"], answer["parameters"]) for answer in seen] == [(None, expected)] * 2


def test_link_that_comes_up_again_changes_no_bit(tmp_path: Path) -> None:
    def up_again(network: Network) -> None:
        time.sleep(3)
        assert not list(tmp_path.glob("rank *"))  # which no rank can write without the link
        up(network)

    expect_all_steps(train(tmp_path, PATIENCE, before=down, meanwhile=up_again))


def test_starved_link_is_slow_and_changes_no_bit(tmp_path: Path) -> None:
    expect_all_steps(train(tmp_path, PATIENCE, "1mbit"))
