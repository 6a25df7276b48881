"""tools/gpu_check.py on small programs: what it writes, and that it goes on where it stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import load_program

PROGRAM = Path(__file__).parents[2] / "tools/gpu_check.py"


def test_all_steps_are_listed_and_nothing_is_run() -> None:
    done = subprocess.run([sys.executable, PROGRAM, "--list"], capture_output=True, text=True)
    for part in ("cmake --build", "gradferry_gpu_check", "run_device_tests.py", "memcheck",
                 "check_hook.py nccl --ranks 2 --abandon", "gradferry bench train"):  # fmt: skip
        assert part in done.stdout


@pytest.mark.parametrize("gpu", ["a GPU", ""])
def test_what_has_passed_on_this_gpu_is_not_repeated(
    gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = load_program("tools/gpu_check.py")
    vars(tool).update(BUILD=tmp_path, SOURCES="cmake", line=lambda _: gpu)
    passes, hangs = f"bash -c 'echo x >> {tmp_path}/ran; echo done'", "sleep 100"
    steps = (f"1 {passes}", "1 bash -c 'echo why; exit 3'", "1 no-such-program", f"0.02 {hangs}")
    monkeypatch.setattr(tool, "STAGES", {"build": (1, ("1 true",)), "check": (2, steps)})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert [tool.main(), tool.main()] == ([1, 1] if gpu else [0, 0])
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    of_gpu = ["passed", "failed", "failed", "failed"] if gpu else ["skipped"] * 4
    assert sorted(row["outcome"] for row in rows) == sorted(["passed", *of_gpu])
    assert (tmp_path / "ran").exists() == bool(gpu)
    if gpu:  # once
        assert (tmp_path / "ran").read_text() == "x\n"
        assert next(row["output"] for row in rows if row["command"] == passes) == ["done"]
