"""examples/trainers: what starts ranks without a trainer, and what docs/guide/trainers.md shows."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from documented import ROOT
from trained import expect_trained, free_port

PAGE = "docs/guide/trainers.md"
FOLDER = ROOT / "examples" / "trainers"
SECONDS = 300  # only what hangs takes so long

# The commands of SLURM that the batch file calls. `srun` starts two tasks, as on two nodes.
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[1-2]" ] && printf '127.0.0.1\\nnode2\\n'
"""
SRUN = """#!/bin/bash
export SLURM_NTASKS=2 SLURM_LOCALID=0
SLURM_PROCID=1 "$@" & other=$!
SLURM_PROCID=0 "$@" && wait $other
"""


def free_job() -> int:
    """Number of a job whose port, which the batch file derives from it, is free."""
    for job in range(os.getpid(), os.getpid() + 10000):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", 20000 + job % 10000))
            return job
    raise AssertionError("no port from 20000 to 29999 is free")


def test_spawned_ranks_train() -> None:
    ended = subprocess.run(
        [sys.executable, str(FOLDER / "with_spawn.py")],
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    expect_trained(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.slow
def test_tasks_of_srun_train(tmp_path: Path) -> None:
    commands = {"scontrol": SCONTROL, "srun": SRUN, "python": f'#!/bin/sh\n{sys.executable} "$@"\n'}
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    batch = (FOLDER / "srun.sbatch").read_text()
    assert batch.count("SOCKET_IFNAME=eth0") == 2
    ended = subprocess.run(
        ["bash", "-euc", batch.replace("=eth0", "=lo")],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(free_job()),
            "SLURM_JOB_NODELIST": "node[1-2]",
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    expect_trained(ended.returncode, ended.stdout, ended.stderr)


def shown() -> list[tuple[str, str]]:
    """Every diff of the page, with each of the scripts that its section links to."""
    text = (ROOT / PAGE).read_text()
    return [
        (script, diff)
        for section in re.split(r"^## ", text, flags=re.MULTILINE)
        for diff in re.findall(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        for script in re.findall(r"examples/trainers/(with_\w+\.py)\)", section)
    ]


def test_the_page_shows_a_diff_of_every_script() -> None:
    scripts = [script for script, _ in shown()]
    assert sorted(scripts) == sorted(path.name for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize(("script", "diff"), shown())
def test_a_diff_leads_to_its_script(script: str, diff: str) -> None:
    lines = (FOLDER / script).read_text().splitlines()
    for line in diff.splitlines():
        text = line[1:]
        if line.startswith("-"):
            assert text not in lines
        elif text.strip() not in ("", "..."):
            assert text in lines, f"{script} has no further {text!r}"
            lines = lines[lines.index(text) + 1 :]
