"""The example that the README shows as a diff."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_minimal.py"


def test_gradferry_is_one_import_and_one_attach():
    code = EXAMPLE.read_text().split('"""')[2]
    uses = [line.strip() for line in code.splitlines() if "gradferry" in line]
    assert uses == ["import gradferry", 'gradferry.attach(ddp, "q4")']


def test_example_learns_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, str(EXAMPLE)], capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", ended.stdout)]
    assert len(losses) == 5
    assert losses[-1] < 0.7 * losses[0]
