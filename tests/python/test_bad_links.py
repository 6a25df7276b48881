"""Two hosts in namespaces, whose link goes down for good, goes down for a while, or is slow."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_cells import hashes_of
from gradferry.lab.ranks.network import DEVICE, Network, parse_link
from link_script import SCENARIO, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("namespaces_allowed")]

SCRIPT = Path(__file__).with_name("link_script.py")
START_SECONDS = 120.0
TIMEOUT = 4.0


def down(network: Network) -> None:
    network._hosts[1].run("ip", "link", "set", DEVICE, "down")


def up(network: Network) -> None:
    network._hosts[1].run("ip", "link", "set", DEVICE, "up")


def down_for_a_while(network: Network) -> None:
    down(network)
    time.sleep(3)
    up(network)


def train(
    folder: Path, way: str, seconds: float, change: Callable[[Network], None], link: str
) -> list[dict[str, Any]]:
    """What both ranks saw; `change` happens when both are in the middle of their steps."""
    commands = [
        [sys.executable, str(SCRIPT), str(rank), str(folder), way, str(seconds)] for rank in (0, 1)
    ]
    with Network(parse_link(link), commands) as network:
        deadline = time.monotonic() + START_SECONDS
        while len(list(folder.glob("ready *"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        changing = threading.Timer(0.3, change, [network])
        changing.start()
        (folder / "go").touch()
        codes = network.wait()
        changing.join()
    assert codes == [0, 0]
    return [json.loads((folder / f"rank {rank}").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("way", ["gradferry", "gloo"])
def test_link_that_is_down_for_good_ends_both_with_the_timeout(tmp_path: Path, way: str) -> None:
    seen = train(tmp_path, way, TIMEOUT, down, "unshaped")
    for rank, answer in enumerate(seen):
        assert answer["error"] == ("PeerError" if way == "gradferry" else "RuntimeError"), seen
        assert answer["seconds"] < TIMEOUT + 2, seen
        if way == "gradferry":
            assert f"rank {rank} lost contact with rank {1 - rank} (step " in answer["text"]


def test_link_that_comes_up_again_changes_no_bit(tmp_path: Path) -> None:
    seen = train(tmp_path, "gradferry", 20.0, down_for_a_while, "unshaped")
    expected = hashes_of(SCENARIO, STEPS)[-1]
    assert [answer["error"] for answer in seen] == [None, None], seen
    assert [answer["parameters"] for answer in seen] == [expected] * 2
    assert max(answer["seconds"] for answer in seen) > 1  # it was down


def test_starved_link_is_slow_and_changes_no_bit(tmp_path: Path) -> None:
    seen = train(tmp_path, "gradferry", 20.0, lambda _: None, "1mbit")
    expected = hashes_of(SCENARIO, STEPS)[-1]
    assert [answer["error"] for answer in seen] == [None, None], seen
    assert [answer["parameters"] for answer in seen] == [expected] * 2
