"""benchmarks/growth.py on the smallest world; its C++ program is built where it is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
    # Gradients and buckets of 4 M parameters are 32 MiB; q4 adds residuals of 24 MiB, and room.
    assert q4["memory_mib"] > plain["memory_mib"] > 30
