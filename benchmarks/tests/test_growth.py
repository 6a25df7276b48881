"""benchmarks/growth.py on the smallest world; its C++ program is built where it is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

PROGRAM = Path(__file__).parents[1] / "growth.py"


def test_cost_of_two_ranks_is_counted(tmp_path):
    file = tmp_path / "growth.json"
    options = ["--ranks", "2", "--reducer-ranks", "--json", str(file)]
    subprocess.run([sys.executable, str(PROGRAM), *options], check=True)
    plain, q4 = json.loads(file.read_text())["rows"]
    assert (plain["way"], q4["way"]) == ("DDP, plain", "DDP, `q4`")
    assert plain["ranks"] == q4["ranks"] == 2
    assert (plain["attach_s"], plain["sockets"]) == (None, 0)  # gloo's were there before
    assert q4["attach_s"] > 0
    # A rank connects to the other, once for each of its lanes.
    assert q4["sockets"] >= 1
    assert q4["cpu_ms"] > 0 < plain["cpu_ms"]
    # How much of what a hook needs the process had already is the allocator's.
    assert q4["memory_mib"] > 0 < plain["memory_mib"]


def test_a_missing_program_is_told_before_anything_runs(tmp_path):
    growth = tmp_path / "benchmarks/growth.py"
    growth.parent.mkdir()
    growth.write_text(PROGRAM.read_text())
    ended = subprocess.run([sys.executable, str(growth)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    torch_version = torch.__version__.partition("+")[0]
    assert f"cmake --build build/torch-{torch_version}/* --target" in ended.stderr
