"""examples/trainers: every script trains, as docs/guide/trainers.md says to start it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from documented import ROOT, blocks
from trained import expect_trained
from trainings import SECONDS
from two_machines import run_on_two

FOLDER = ROOT / "examples" / "trainers"
TORCHRUN = (*("-m", "torch.distributed.run", "--standalone"), "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("script", "launcher"),
    [("with_lightning.py", ()), ("with_fabric.py", ()), ("with_transformers.py", TORCHRUN)],
)
def test_script_trains(tmp_path: Path, script: str, launcher: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, *launcher, str(FOLDER / script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    expect_trained(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.usefixtures("namespaces_allowed")
def test_accelerate_trains_on_two_machines(tmp_path: Path) -> None:
    (block,) = (each for each in blocks("docs/guide/trainers.md", "") if "accelerate" in each)
    export, *commands = block.splitlines()
    (code, said), (other, others_said) = run_on_two(commands, tmp_path, export)
    assert other == 0, others_said
    expect_trained(code, "\n".join(said))
