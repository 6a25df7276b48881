"""tools/gpu_check.py on programs that pass, fail, skip and hang: what it writes and repeats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from programs import load_program

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "gpu_check.py"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool, with a result file of its own, on a machine with a GPU."""
    module = load_program("tools/gpu_check.py")
    monkeypatch.setattr(module, "RESULT", tmp_path / "gpu.json")
    monkeypatch.setattr(module, "gpu", lambda: "a GPU")
    monkeypatch.setattr(module, "environment", dict)
    monkeypatch.setattr(module, "digest_of_sources", lambda *_: "first")
    return module


@pytest.fixture
def checks(tool: ModuleType) -> Any:
    """A call of the tool, with time enough."""
    return tool.Checks(minutes=1, fresh=False)


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def rows(tool: ModuleType) -> dict[str, dict]:
    return {row["check"]: row for row in json.loads(tool.RESULT.read_text())["rows"]}


def test_outcomes_are_written_as_they_come(tool, checks):
    assert checks.run("good", 1, program("print('first'); print('last')"), on_gpu=True)
    assert rows(tool)["good"]["outcome"] == "passed"
    assert rows(tool)["good"]["output"] == ["last"]
    assert not checks.run("bad", 1, program("print('why'); raise SystemExit(3)"))
    assert checks.run("not here", 1, program("print('no'); raise SystemExit(77)"))
    assert checks.run("may be missing", 1, ["there-is-no-such-program"], optional=True)
    assert not checks.run("missing", 1, ["there-is-no-such-program"])
    outcomes = {name: row["outcome"] for name, row in rows(tool).items()}
    assert outcomes == {
        "good": "passed", "bad": "failed", "not here": "skipped", "may be missing": "skipped",
        "missing": "failed",
    }  # fmt: skip
    assert rows(tool)["bad"]["output"] == ["why"]
    assert rows(tool)["missing"]["output"] == ["there-is-no-such-program is not on this machine"]
    assert checks.failed() == ["bad", "missing"]


def test_check_that_takes_too_long_fails_and_the_next_one_runs(tool, checks):
    assert not checks.run("hangs", 0.005, program("import time; time.sleep(60)"))
    assert "stopped after 0.005 minutes" in rows(tool)["hangs"]["output"][-1]
    assert checks.run("next", 1, program(""))
    assert (checks.failed(), checks.num_left) == (["hangs"], 0)


def test_slow_check_that_takes_too_long_is_left_and_the_file_says_so(tool, checks):
    hangs = program("import time; time.sleep(60)")
    assert not checks.run("slow", 0.005, hangs, is_slow=True)
    assert rows(tool)["slow"]["outcome"] == "left"
    assert (checks.failed(), checks.num_left) == ([], 1)
    later = tool.Checks(minutes=1, fresh=False)
    assert not later.run("slow", 1, program("raise SystemExit(1)"), is_slow=True)
    assert not later.run("slow", 0.005, hangs, is_slow=True)
    assert later.failed() == ["slow"]  # what is known stays


LISTING = """
arch = sm_90
Resource usage:
 Common:
  GLOBAL:0
 Function few:
  REG:32 STACK:0 SHARED:16 LOCAL:0 CONSTANT[0]:592 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function spills:
  REG:128 STACK:24 SHARED:0 LOCAL:8 CONSTANT[0]:592 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_resources_are_rows_by_architecture_and_kernel(tmp_path, monkeypatch):
    """A stand-in for cuobjdump prints what the toolkit does."""
    (tmp_path / "cuobjdump").write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    (tmp_path / "cuobjdump").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    result = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT.with_name("kernel_resources.py")), "a library", result]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "2 kernels, at most 128 registers, 1 with a stack\n"
    few = {"registers": 32, "stack": 0, "shared": 16, "local": 0}
    spills = {"registers": 128, "stack": 24, "shared": 0, "local": 8}
    assert json.loads(result.read_text()) == [
        {"arch": "sm_90", "kernel": "spills", **spills},
        {"arch": "sm_90", "kernel": "few", **few},
    ]


def is_running(process: str) -> bool:
    try:
        text = Path("/proc", process, "stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(") ")[2][0] != "Z"  # nobody has to ask how it ended


def test_what_a_check_started_ends_with_it(tool, checks):
    """Ranks that hang must not hold the GPU, and the port where they meet, in the next check."""
    assert not checks.run("hangs", 0.02, ["sh", "-c", "sleep 60 & echo $!; wait"])
    process = rows(tool)["hangs"]["output"][0]
    deadline = time.monotonic() + 60
    while is_running(process) and time.monotonic() < deadline:
        pass
    assert not is_running(process)


def test_results_survive_an_end_while_they_are_written(tool, checks, monkeypatch):
    assert checks.run("check", 1, program(""))

    def write_half(path, text):
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(KeyboardInterrupt):
        checks.run("next", 1, program(""))
    assert list(rows(tool)) == ["check"]


def test_what_time_was_too_short_for_is_left_to_the_next_call(tool):
    checks = tool.Checks(minutes=0, fresh=False)
    assert not checks.run("late", 1, program(""))
    assert (checks.failed(), checks.num_left) == ([], 1)
    assert tool.Checks(minutes=1, fresh=False).run("late", 1, program(""))


@pytest.mark.parametrize(
    ("change", "repeated"), [("nothing", False), ("sources", True), ("gpu", True), ("fresh", True)]
)
def test_passed_check_is_repeated_only_for_other_sources_or_another_gpu(
    tool, monkeypatch, change, repeated
):
    assert tool.Checks(minutes=1, fresh=False).run("check", 1, program(""))
    if change == "sources":
        monkeypatch.setattr(tool, "digest_of_sources", lambda *_: "second")
    if change == "gpu":
        monkeypatch.setattr(tool, "gpu", lambda: "another GPU")
    checks = tool.Checks(minutes=1, fresh=change == "fresh")
    assert checks.run("check", 1, program("raise SystemExit(1)")) is not repeated


def test_failed_check_is_repeated(tool, checks):
    assert not checks.run("check", 1, program("raise SystemExit(1)"))
    later = tool.Checks(minutes=1, fresh=False)
    assert later.run("check", 1, program(""))
    assert later.failed() == []


def test_without_a_gpu_what_needs_one_is_skipped(tool, monkeypatch):
    monkeypatch.setattr(tool, "gpu", lambda: "")
    checks = tool.Checks(minutes=1, fresh=False)
    assert checks.run("check", 1, program("raise SystemExit(1)"), on_gpu=True)
    assert rows(tool)["check"]["output"] == ["skipped: there is no GPU on this machine"]


def test_digest_changes_with_any_source(tool, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "hooks").mkdir()
    file = tmp_path / "hooks" / "file.h"
    file.write_text("one")
    first = tool.digest_of_sources()
    assert tool.digest_of_sources() == first
    file.write_text("two")
    assert tool.digest_of_sources() != first


def package_in(folder: Path) -> Path:
    """A folder with what the stage package leaves there."""
    (folder / "python" / "gradferry").mkdir(parents=True)
    (folder / "python" / "gradferry" / "_native.abi.so").touch()
    return folder / "python"


def test_without_the_package_nothing_that_needs_it_runs(tool, checks, monkeypatch, tmp_path):
    """Another gradferry that this Python knows would run in its place."""
    monkeypatch.setattr(tool, "PACKAGES", tmp_path / "python")
    tool.check_training(checks)
    tool.measure(checks)
    assert checks.num_left == 1 + len(tool.TRAININGS) + len(tool.MEASUREMENTS)
    assert {row["outcome"] for row in rows(tool).values()} == {"left"}


def test_package_that_cannot_be_built_leaves_no_older_one(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "PACKAGES", package_in(tmp_path))
    monkeypatch.setattr(tool.Checks, "run", lambda *_, **__: False)
    tool.check_package(tool.Checks(minutes=1, fresh=False))
    assert not tool.PACKAGES.exists()


def test_as_built_compiles_nothing(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "BUILD", tmp_path)
    monkeypatch.setattr(tool, "PACKAGES", package_in(tmp_path))
    ran = []
    monkeypatch.setattr(tool.Checks, "run", lambda _, name, *rest, **options: ran.append(name))

    def call():
        checks = tool.Checks(minutes=1, fresh=False, as_built=True)
        tool.check_kernels(checks)
        tool.check_package(checks)
        tool.check_sanitized(checks)
        checks.wait()
        return checks.num_left

    (tmp_path / "kernels.built").write_text("other sources")
    assert call() == 2 + len(tool.SANITIZERS)
    assert ran == []
    for stage in tool.COMPILED:
        (tmp_path / f"{stage}.built").write_text(tool.digest_of_sources())
    assert call() == 0
    tests = ["kernels give the bytes of the CPU"]
    tests += [f"kernels under compute-sanitizer {name}" for name in tool.SANITIZERS]
    assert sorted(ran) == sorted([*tests, "gradferry info"])
    assert tool.PACKAGES.exists()


def test_interrupt_ends_what_runs_and_starts_nothing_more(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "BESIDE", 1)
    checks = tool.Checks(minutes=1, fresh=False)
    pid = tmp_path / "pid"
    shell = f"echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 60"
    checks.start("runs", 1, ["sh", "-c", shell])
    checks.start("waits", 1, program(""))
    deadline = time.monotonic() + 60
    while not pid.exists() and time.monotonic() < deadline:
        pass
    checks.stop()
    checks._pool.shutdown()
    assert not is_running(pid.read_text().strip())
    assert "waits" not in rows(tool)


def test_checks_that_run_beside_each_other_are_all_written_before_benchmarks(
    tool, checks, monkeypatch
):
    for number in range(5):
        checks.start(str(number), 1, program(f"raise SystemExit({number} % 2)"))
    monkeypatch.setattr(tool, "MEASUREMENTS", {})
    tool.measure(checks)
    outcomes = {name: row["outcome"] for name, row in rows(tool).items()}
    assert outcomes == {str(n): "failed" if n % 2 else "passed" for n in range(5)}


def test_python_without_torch_is_named(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "PACKAGES", tmp_path / "python")
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tool.Checks, "run", lambda *_, **__: False)
    tool.check_package(tool.Checks(minutes=1, fresh=False))
    assert list(rows(tool)) == ["configure package"]
    assert rows(tool)["configure package"]["outcome"] == "failed"
    assert f"{sys.executable} has no torch" in rows(tool)["configure package"]["output"][0]


@pytest.mark.parametrize("asked", [None, "80"])
def test_kernels_are_built_for_this_gpu_alone(tool, monkeypatch, asked):
    """Machine code for each kind of GPU takes minutes."""
    without = {name: value for name, value in os.environ.items() if name != "CUDAARCHS"}
    monkeypatch.setattr(os, "environ", without | ({"CUDAARCHS": asked} if asked else {}))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setattr(tool, "STAGES", {})
    assert tool.main() == 0
    assert os.environ["CUDAARCHS"] == (asked or "native")


def test_rows_of_what_was_measured_are_kept(tool, monkeypatch, tmp_path):
    monkeypatch.setattr(tool, "BUILD", tmp_path)
    monkeypatch.setattr(tool, "PACKAGES", package_in(tmp_path))
    ran = []
    passes = True

    def run(self, name, minutes, arguments, **options):
        ran.append((name, minutes, arguments[2 : arguments.index("--json")]))
        Path(arguments[-1]).write_text(json.dumps(name))
        return passes

    monkeypatch.setattr(tool.Checks, "run", run)
    tool.measure(tool.Checks(minutes=1, fresh=False))
    assert json.loads(tool.RESULT.read_text())["measured"] == {
        "codec": "gradferry bench codec",
        "collective": "gradferry bench collective",
        "train": "gradferry bench train",
        "doctor": "gradferry doctor",
    }
    assert all(0 < minutes <= 6 for _, minutes, _ in ran)
    name, _, arguments = ran[-1]
    assert name == "gradferry doctor"
    assert arguments[:4] == ["gradferry", "doctor", "--device", "cuda"]
    passes = False
    tool.measure(tool.Checks(minutes=1, fresh=False))
    assert json.loads(tool.RESULT.read_text())["measured"] == {}
