"""Everything there is to know about gradferry on this machine's GPU, in two commands.

    python tools/gpu_check.py kernels     # build them; tests, sanitizers
    python tools/gpu_check.py hook        # build the package; training, benchmarks

Each takes at most eight minutes on 16 cores and needs nvcc, CMake, ninja, Python and torch, but no
network and no GoogleTest; benchmarks also need the Python package rich. Results go to
build/gpu/gpu.json: one row per check and what was measured, those of both commands in one file. To
keep them, copy it to benchmarks/results/. Where there is no GPU everything is built, and what needs
one is skipped. Ends with code 0 when nothing failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu"
PACKAGES = BUILD / "python"  # gradferry as this machine runs it
RESULT = BUILD / "gpu.json"
TOOLKIT = Path("/usr/local/cuda/bin")  # where nvcc is when it is not on the path
SKIPPED = 77
BUDGET_SECONDS = 460.0  # of a command
LAST_LINES = 30
# Of the tests under a sanitizer, which is tens of times slower.
SANITIZED = "StayInside"
SANITIZERS = ("memcheck", "racecheck", "initcheck")
# Of the package, with their options.
BENCHMARKS = {
    "overlap": ["--trace", str(BUILD / "overlap_trace.json")],
}


class Checks:
    """Runs checks one after the other and keeps what came of each."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.start = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.measured: dict[str, Any] = {}
        self.gpu = gpu()
        if not self.gpu:
            print("There is no GPU on this machine: what needs one is skipped.", flush=True)

    def run_on_gpu(self, name: str, arguments: list[str], **environment: str) -> bool:
        """As run(), where there is a GPU."""
        if self.gpu:
            return self.run(name, arguments, **environment)
        return self.skip(name, "there is no GPU on this machine")

    def skip(self, name: str, reason: str) -> bool:
        """Notes a check that cannot run here."""
        return self._add(name, "skipped", f"skipped: {reason}", 0.0)

    def run(self, name: str, arguments: list[str], **environment: str) -> bool:
        """Runs a program. True if it passed or had a reason not to run."""
        left = BUDGET_SECONDS - (time.monotonic() - self.start)
        start = time.monotonic()
        if left <= 0:
            return self._add(name, "failed", "no time was left", 0.0)
        try:
            done = subprocess.run(
                arguments,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=left,
            )
            outcome = {0: "passed", SKIPPED: "skipped"}.get(done.returncode, "failed")
            output = done.stdout
        except subprocess.TimeoutExpired as error:
            outcome, output = "failed", f"{_text(error.stdout)}\nstopped: no time was left"
        except FileNotFoundError as error:
            outcome, output = "skipped", f"skipped: {error.filename} is not on this machine"
        return self._add(name, outcome, output, time.monotonic() - start)

    def _add(self, name: str, outcome: str, output: str, seconds: float) -> bool:
        lines = output.strip().splitlines()
        kept = lines[-LAST_LINES:] if outcome == "failed" else lines[-1:]
        self.rows.append(
            {
                "command": self.command,
                "check": name,
                "outcome": outcome,
                "seconds": round(seconds, 1),
                "output": kept,
            }
        )
        print(f"{outcome:8} {name} ({seconds:.1f} s)", *kept, sep="\n    ", flush=True)
        return outcome != "failed"

    def write(self) -> bool:
        """Replaces what this command gave before in the result. True if nothing failed."""
        kept: list[dict[str, Any]] = []
        measured: dict[str, Any] = {}
        if RESULT.exists():
            before = json.loads(RESULT.read_text())
            kept = [row for row in before["rows"] if row["command"] != self.command]
            measured = before.get("measured", {})
        document = {
            "schema": 1,
            "environment": environment(),
            "rows": kept + self.rows,
            "measured": {**measured, **self.measured},
        }
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(document, indent=2) + "\n")
        return all(row["outcome"] != "failed" for row in self.rows)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def environment() -> dict[str, Any]:
    """When and where."""
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cpu count": os.cpu_count(),
        "gpu": gpu(),  # and its driver
        "nvcc": _line("nvcc", "--version"),
        "commit": _line("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }
    try:
        import torch
    except ImportError:
        return facts
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {**facts, "torch": torch.__version__, "nccl": nccl}


def gpu() -> str:
    """Name and driver of the GPU; empty where there is none."""
    return _line("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


def _line(*arguments: str) -> str:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode != 0:
        return ""
    return (done.stdout.strip().splitlines() or [""])[-1]


def check_kernels(checks: Checks) -> None:
    """Builds the kernels for this GPU and runs their tests, also under sanitizers."""
    build = BUILD / "kernels"
    built = checks.run(
        "configure kernels",
        ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
         "-DGRADFERRY_CUDA=ON", "-DGRADFERRY_GPU_CHECK=ON",
         f"-DCMAKE_INSTALL_PREFIX={BUILD / 'install'}"],
    ) and checks.run("build kernels", ["cmake", "--build", str(build)])  # fmt: skip
    if not built:
        return
    checks.run("install kernels", ["cmake", "--install", str(build), "--component", "development"])
    program = next(build.rglob("gradferry_gpu_check"), build / "gradferry_gpu_check")
    checks.run_on_gpu("kernels give the bytes of the CPU", [str(program)])
    for tool in SANITIZERS:
        checks.run_on_gpu(
            f"kernels under compute-sanitizer {tool}",
            ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", str(program), SANITIZED],
        )


def check_hook(checks: Checks) -> None:
    """Builds the package, trains beside the CPU, and measures."""
    build = BUILD / "hook"
    built = checks.run(
        "configure package",
        ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
         "-DGRADFERRY_PYTHON=ON", "-DGRADFERRY_GPU_CHECK=ON",
         f"-DGRADFERRY_PREBUILT_KERNELS={BUILD / 'install'}",
         f"-DPython_EXECUTABLE={sys.executable}"],
    ) and checks.run("build package", ["cmake", "--build", str(build)])  # fmt: skip
    if not built:
        return
    shutil.rmtree(PACKAGES, ignore_errors=True)
    shutil.copytree(ROOT / "python_bindings" / "gradferry", PACKAGES / "gradferry")
    for component in ("python", "tests"):
        install = ["cmake", "--install", str(build), "--component", component]
        checks.run(f"install {component}", [*install, "--prefix", str(PACKAGES)])
    train = [sys.executable, str(ROOT / "tests" / "cuda" / "check_hook.py")]
    for backend, ranks, slow in (
        ("gloo", 2, None),
        ("gloo", 4, None),
        ("nccl", 1, None),
        ("nccl", 2, None),
        ("nccl", 1, 7),
        ("gloo", 2, 7),
    ):
        name = f"{ranks} ranks over {backend}" + (", random delays" if slow else "")
        arguments = [*train, backend, "--ranks", str(ranks)]
        variables = {"PYTHONPATH": str(PACKAGES)}
        if slow:
            arguments += ["--slow", str(slow)]
            # Freed memory goes back at once, so that late users are found.
            variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        checks.run_on_gpu(name, arguments, **variables)
    for benchmark, options in BENCHMARKS.items():
        measure(checks, benchmark, options)


def measure(checks: Checks, benchmark: str, options: list[str]) -> None:
    """Runs a benchmark of the package and keeps its rows."""
    name = f"gradferry bench {benchmark}"
    if importlib.util.find_spec("rich") is None:
        checks.skip(name, "the Python package rich is not on this machine")
        return
    rows = BUILD / f"{benchmark}.json"
    rows.unlink(missing_ok=True)
    arguments = [sys.executable, "-m", "gradferry", "bench", benchmark, "--device", "cuda"]
    arguments += [*options, "--json", str(rows)]
    if checks.run_on_gpu(name, arguments, PYTHONPATH=str(PACKAGES)) and rows.exists():
        checks.measured[benchmark] = json.loads(rows.read_text())


def main() -> int:
    """Runs one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("kernels", "hook"))
    command = parser.parse_args().command
    if shutil.which("nvcc") is None and (TOOLKIT / "nvcc").exists():
        os.environ["PATH"] += os.pathsep + str(TOOLKIT)
    checks = Checks(command)
    check_kernels(checks) if command == "kernels" else check_hook(checks)
    passed = checks.write()
    outcome = "nothing failed" if passed else "something failed"
    print(f"{RESULT}: {outcome}{'' if checks.gpu else ', without a GPU'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
