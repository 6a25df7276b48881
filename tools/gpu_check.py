"""Everything there is to know about gradferry on this machine's GPU, in two commands.

    python tools/gpu_check.py kernels     # build them; tests, sanitizers
    python tools/gpu_check.py hook        # build the package; training over gloo and NCCL

Each takes at most eight minutes on 16 cores and needs nvcc, CMake, ninja, Python and torch, but no
network, no GoogleTest and no other Python package. Results go to build/gpu/gpu.json, one row per
check, those of both commands in one file. Ends with code 0 when nothing failed.
"""

from __future__ import annotations

import argparse
import datetime
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
SKIPPED = 77
BUDGET_SECONDS = 460.0  # of a command
LAST_LINES = 30
# Of the tests under a sanitizer, which is tens of times slower.
SANITIZED = "StayInside"
SANITIZERS = ("memcheck", "racecheck", "initcheck")


class Checks:
    """Runs checks one after the other and keeps what came of each."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.start = time.monotonic()
        self.rows: list[dict[str, Any]] = []

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
        """Replaces this command's rows in the result. True if nothing failed."""
        kept: list[dict[str, Any]] = []
        if RESULT.exists():
            rows = json.loads(RESULT.read_text())["rows"]
            kept = [row for row in rows if row["command"] != self.command]
        document = {"schema": 1, "environment": environment(), "rows": kept + self.rows}
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
        "gpu": _line("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "nvcc": _line("nvcc", "--version"),
        "commit": _line("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }
    try:
        import torch
    except ImportError:
        return facts
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {**facts, "torch": torch.__version__, "nccl": nccl}


def _line(*arguments: str) -> str:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
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
    checks.run("kernels give the bytes of the CPU", [str(program)])
    for tool in SANITIZERS:
        checks.run(
            f"kernels under compute-sanitizer {tool}",
            ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", str(program), SANITIZED],
        )


def check_hook(checks: Checks) -> None:
    """Builds the package and trains beside the CPU."""
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
        checks.run(name, arguments, **variables)


def main() -> int:
    """Runs one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("kernels", "hook"))
    command = parser.parse_args().command
    checks = Checks(command)
    check_kernels(checks) if command == "kernels" else check_hook(checks)
    passed = checks.write()
    print(f"{RESULT}: {'nothing failed' if passed else 'something failed'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
