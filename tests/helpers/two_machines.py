"""Two hosts made of network namespaces, on which commands of the guide run to the letter."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from documented import ROOT
from gradferry_lab.ranks.network import DEVICE, Network, parse_link

# Interface and addresses are those of the pages.
_AS_ON_THE_PAGES = (
    f"ip link set {DEVICE} down name eth0; "
    "ip address add 10.0.0.{number}/24 dev eth0; ip link set eth0 up; "
)
_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def run_on_two(
    scripts: Sequence[str], folder: Path, before: str = ""
) -> list[tuple[int, list[str]]]:
    """Runs a script of bash on each host, at the same time.

    Once one has failed, the other has ten more seconds.

    Args:
        scripts: of machine 1 and machine 2.
        folder: for what they print.
        before: what both run first.

    Returns:
        The exit code of each, and the lines that it printed, to standard error too.
    """
    logs = [folder / f"machine{number}.log" for number in (1, 2)]
    commands = [
        [
            *("env", f"PATH={_PATH}", "OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES="),
            *("bash", "-euc", f"exec >'{log}' 2>&1; cd '{ROOT}'; {setup}{before}\n{script}"),
        ]
        for log, script, setup in zip(
            logs, scripts, (_AS_ON_THE_PAGES.format(number=n) for n in (1, 2)), strict=True
        )
    ]
    with Network(parse_link("unshaped"), commands) as network:
        codes = network.wait()
    return [(code, log.read_text().splitlines()) for code, log in zip(codes, logs, strict=True)]


def without_numbers(line: str) -> str:
    return re.sub(r"[\d.,]*\d", "#", line)
