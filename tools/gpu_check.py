"""What there is to know about gradferry on this machine's GPU, in one command.

    python tools/gpu_check.py               # build, test, train, measure: half an hour, 16 cores
    python tools/gpu_check.py --minutes 9   # a part of it; call it again to go on
    python tools/gpu_check.py --as-built    # compile nothing: what build/gpu holds is run

Needs nvcc, CMake, ninja, Python and torch, but no network and no GoogleTest; benchmarks also need
the Python package rich. Results go to build/gpu/gpu.json after every check: one row each, and what
was measured. A check that has passed is not repeated as long as sources and GPU are the same.
Where there is no GPU everything is built, and what needs one is skipped: build/gpu can then go to
a machine that has one, with the same Python and torch, for --as-built; CUDAARCHS names that GPU.
Ends with code 0 when nothing failed and nothing is left to do, 1 when a check failed, 2 when some
are left for the next call. docs/results/gpu_check.md says what a failure of each check would mean.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "gpu"
PACKAGES = BUILD / "python"  # gradferry as this machine runs it
RESULT = BUILD / "gpu.json"
SCHEMA = 2
TOOLKIT = Path("/usr/local/cuda/bin")  # where nvcc is when it is not on the path
# What is compiled or copied, by stage.
COMPILED = {
    "kernels": ("cmake", "include", "kernels", "tests/kernels"),
    "package": ("cmake", "include", "kernels", "hooks", "measure", "python_bindings",
                "benchmarks/gradferry_lab"),
}  # fmt: skip
SOURCES = (*COMPILED["package"], "tests", "tools")
SKIPPED = 77
LAST_LINES = 30
# Checks that run beside each other: they keep processors busy. Kernels of different processes take
# turns on a GPU, so that with twice as many each takes more than twice as long.
BESIDE = 4
SANITIZED = "StayInside"  # of the tests: a sanitizer is tens of times slower
SANITIZERS = ("memcheck", "racecheck", "initcheck")
# What tests/kernels/cuda/check_hook.py shall do: backend, ranks, options. Least known first.
TRAININGS = (
    "nccl 2", "nccl 1", "nccl 2 --abandon", "nccl 2 --slow 7", "nccl 1 --detail",
    "nccl 1 --abandon --slow 7", "nccl 4", "nccl 1 --abandon", "nccl 1 --slow 7",
    "gloo 2", "gloo 2 --abandon", "gloo 2 --slow 7", "gloo 4",
)  # fmt: skip
# Commands of the package, with their options. Rows are kept by the last word.
MEASUREMENTS = {
    "bench codec": ["--peers", "--dtypes", "float32", "bfloat16", "--rounds", "50"],
    # Two ranks that share a GPU meet over gloo; on their own GPUs, over NCCL.
    "bench collective": ["-b", "1M", "-e", "64M", "-f", "8", "-n", "10"],
    "bench train": ["--hooks", "none", "sync", "torch:fp32", "torch:bf16", "q4", "--rounds", "4"],
    "doctor": [],
}


class Checks:
    """Runs checks and writes down what came of each. `num_left`: checks for the next call."""

    def __init__(self, minutes: float, fresh: bool, as_built: bool = False) -> None:
        self.as_built = as_built
        self._pool = ThreadPoolExecutor(BESIDE)
        self._started: list[Future[bool]] = []
        self._lock = threading.Lock()
        self._programs: set[subprocess.Popen[str]] = set()  # that run now
        self._stopped = False
        self._end = time.monotonic() + 60 * minutes
        self.gpu = gpu()
        self._source = digest_of_sources()
        self._environment = environment()
        self._rows: dict[str, dict[str, Any]] = {}  # by check, in order
        self._measured: dict[str, Any] = {}
        self.num_left = 0
        if RESULT.exists() and not fresh:
            before = json.loads(RESULT.read_text())
            if before["schema"] == SCHEMA:
                self._rows = {row["check"]: row for row in before["rows"]}
                self._measured = before["measured"]
        if not self.gpu:
            print("There is no GPU on this machine: what needs one is skipped.", flush=True)

    def skip(self, name: str, reason: str) -> bool:
        """Notes a check that cannot run here."""
        return self._add(name, "skipped", f"skipped: {reason}", 0.0)

    def fail(self, name: str, reason: str) -> bool:
        """Notes a check that fails before it runs."""
        return self._add(name, "failed", reason, 0.0)

    def leave(self, name: str, reason: str) -> bool:
        """Leaves a check to the next call. What it gave with these sources before stays."""
        with self._lock:
            self.num_left += 1
            print(f"left     {name} ({reason})", flush=True)
            if self._rows.get(name, {}).get("source") != self._source:
                self._keep_row(name, "left", [f"left: {reason}"], 0.0)
        return False

    def start(self, *arguments: Any, **options: Any) -> None:
        """What `run` does, beside what comes next."""
        self._started.append(self._pool.submit(self.run, *arguments, **options))

    def wait(self) -> None:
        """Until all that was started has ended."""
        for check in self._started:
            check.result()
        self._started.clear()

    def stop(self) -> None:
        """Ends what runs, with what it started, and starts nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._stopped = True
            for program in self._programs:
                _kill(program)

    def run(
        self,
        name: str,
        minutes: float,
        arguments: list[str],
        *,
        on_gpu: bool = False,
        again: bool = False,
        optional: bool = False,
        is_slow: bool = False,
        **environment: str,
    ) -> bool:
        """Runs a program for at most so many minutes.

        Args:
            on_gpu: it needs one.
            again: also if it has passed before. Builds do: they know best what is left to do.
            optional: a machine may lack the program.
            is_slow: it may need more minutes, which says nothing of what it checks: it is left.

        Returns:
            Whether it passed, now or before, or had a reason not to run.
        """
        if on_gpu and not self.gpu:
            return self.skip(name, "there is no GPU on this machine")
        if not again and self._has_passed(name):
            print(f"passed   {name} (before)", flush=True)
            return True
        left = self._end - time.monotonic()
        if left <= 0:
            return self.leave(name, "no time")
        limit = min(60 * minutes, left)
        start = time.monotonic()
        try:
            code, output = self._run(arguments, limit, environment)
        except subprocess.TimeoutExpired as error:
            if is_slow or limit < 60 * minutes:  # or the fault of what ran before it
                return self.leave(name, f"stopped after {limit:.0f} s")
            code, output = 1, f"{_text(error.stdout)}\nstopped after {minutes:g} minutes"
        except FileNotFoundError as error:
            reason = f"{error.filename} is not on this machine"
            return self.skip(name, reason) if optional else self.fail(name, reason)
        outcome = {0: "passed", SKIPPED: "skipped"}.get(code, "failed")
        # What is kept names files of the repository, and not where that lies.
        output = output.replace(f"{ROOT}{os.sep}", "")
        return self._add(name, outcome, output, time.monotonic() - start)

    def keep(self, name: str, measured: Any) -> None:
        """Keeps what a benchmark measured."""
        self._measured[name] = measured
        self._write()

    def drop(self, name: str) -> None:
        """Drops what a benchmark measured before."""
        if self._measured.pop(name, None) is not None:
            self._write()

    def has_measured(self, name: str) -> bool:
        return name in self._measured

    def failed(self) -> list[str]:
        """Names of the checks that failed with these sources."""
        return [
            name
            for name, row in self._rows.items()
            if row["outcome"] == "failed" and row["source"] == self._source
        ]

    def _run(
        self, arguments: list[str], limit: float, environment: dict[str, str]
    ) -> tuple[int, str]:
        """Exit code and output of a program. What it started ends with it, if it takes too long."""
        with subprocess.Popen(
            arguments,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as program:
            with self._lock:
                self._programs.add(program)
                if self._stopped:
                    _kill(program)
            try:
                output, _ = program.communicate(timeout=limit)
            except BaseException:
                _kill(program)
                raise
            finally:
                with self._lock:
                    self._programs.discard(program)
            return program.returncode, output

    def _has_passed(self, name: str) -> bool:
        row = self._rows.get(name, {})
        found = row.get("outcome"), row.get("source"), row.get("gpu")
        return found == ("passed", self._source, self.gpu)

    def _add(self, name: str, outcome: str, output: str, seconds: float) -> bool:
        lines = output.strip().splitlines()
        kept = lines[-LAST_LINES:] if outcome == "failed" else lines[-1:]
        with self._lock:
            print(f"{outcome:8} {name} ({seconds:.1f} s)", *kept, sep="\n    ", flush=True)
            self._keep_row(name, outcome, kept, seconds)
        return outcome != "failed"

    def _keep_row(self, name: str, outcome: str, output: list[str], seconds: float) -> None:
        """With the lock held."""
        self._rows[name] = {
            "check": name,
            "outcome": outcome,
            "seconds": round(seconds, 1),
            "output": output,
            "gpu": self.gpu,
            "source": self._source,
        }
        self._write()

    def _write(self) -> None:
        document = {
            "schema": SCHEMA,
            "environment": self._environment,
            "rows": list(self._rows.values()),
            "measured": self._measured,
        }
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        new = RESULT.with_suffix(".new")  # the machine may go away at any time
        new.write_text(json.dumps(document, indent=2) + "\n")
        new.replace(RESULT)


def _kill(program: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def digest_of_sources(folders: Sequence[str] = SOURCES) -> str:
    """Of the files that decide what a check finds."""
    digest = hashlib.sha256()
    files = (file for folder in folders for file in (ROOT / folder).rglob("*"))
    for file in sorted(
        file for file in files if file.is_file() and "__pycache__" not in file.parts
    ):
        digest.update(str(file.relative_to(ROOT)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _is_built(stage: str) -> bool:
    """Whether a stage's build is what these sources give."""
    note = BUILD / f"{stage}.built"
    return note.exists() and note.read_text() == digest_of_sources(COMPILED[stage])


def _is_ready(checks: Checks, stage: str, build: Callable[[Checks], bool]) -> bool:
    """Builds a stage; with --as-built sees that it is built, or leaves it."""
    if not checks.as_built:
        if not build(checks):
            return False
        (BUILD / f"{stage}.built").write_text(digest_of_sources(COMPILED[stage]))
    elif not _is_built(stage):
        return checks.leave(stage, f"{BUILD} holds nothing built from these sources: build first")
    return True


def _compile(checks: Checks, stage: str, build: Path, *options: str) -> bool:
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
    configure += ["-DCMAKE_BUILD_TYPE=Release", "-DGRADFERRY_GPU_CHECK=ON", *options]
    return checks.run(f"configure {stage}", 2, configure, again=True) and checks.run(
        f"build {stage}", 20, ["cmake", "--build", str(build)], again=True
    )


def _install(checks: Checks, name: str, build: Path, *options: str) -> bool:
    install = ["cmake", "--install", str(build), *options]
    return checks.run(f"install {name}", 1, install, again=True)


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
    lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    return lines[-1] if lines else ""


def check_kernels(checks: Checks) -> None:
    """Builds the kernels for this GPU and starts their tests."""
    if _is_ready(checks, "kernels", _build_kernels):
        checks.start("kernels give the bytes of the CPU", 8, _kernel_tests(), on_gpu=True)


def check_sanitized(checks: Checks) -> None:
    """Starts the tests at the edges of buffers under each sanitizer."""
    is_built = _is_built("kernels")
    for tool in SANITIZERS:
        name = f"kernels under compute-sanitizer {tool}"
        if not is_built:
            checks.leave(name, "the kernels are not built: run the stage kernels")
            continue
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *_kernel_tests()]
        checks.start(name, 8, [*command, SANITIZED], on_gpu=True, optional=True, is_slow=True)


def _kernel_tests() -> list[str]:
    return [str(next((BUILD / "kernels").rglob("gradferry_gpu_check"), "gradferry_gpu_check"))]


def _build_kernels(checks: Checks) -> bool:
    build, prefix = BUILD / "kernels", f"-DCMAKE_INSTALL_PREFIX={BUILD / 'install'}"
    if not _compile(checks, "kernels", build, "-DGRADFERRY_CUDA=ON", prefix):
        return False
    installed = _install(checks, "kernels", build, "--component", "development")
    rows = BUILD / "kernels.json"
    library = BUILD / "install" / "lib" / "libgradferry_kernels_cuda.a"
    script = ROOT / "tools" / "kernel_resources.py"
    listing = [sys.executable, *map(str, (script, library, rows))]
    if installed and checks.run("registers of kernels", 2, listing, again=True) and rows.exists():
        checks.keep("kernels", json.loads(rows.read_text()))
    return installed


def check_package(checks: Checks) -> None:
    """Builds the package on these kernels."""
    name, info = "gradferry info", [sys.executable, "-m", "gradferry", "info"]
    if _is_ready(checks, "package", _build_package) and _has_package(checks, name):
        checks.run(name, 1, info, PYTHONPATH=str(PACKAGES))


def _build_package(checks: Checks) -> bool:
    build = BUILD / "hook"
    shutil.rmtree(PACKAGES, ignore_errors=True)  # nothing may run what older sources gave
    if importlib.util.find_spec("torch") is None:
        checks.fail("configure package", f"{sys.executable} has no torch: call a Python that has")
        return False
    options = [
        "-DGRADFERRY_PYTHON=ON",
        f"-DGRADFERRY_PREBUILT_KERNELS={BUILD / 'install'}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    if not _compile(checks, "package", build, *options):
        return False
    for package in (ROOT / "python_bindings" / "gradferry", ROOT / "benchmarks" / "gradferry_lab"):
        shutil.copytree(package, PACKAGES / package.name)
    where = ("--prefix", str(PACKAGES))
    return all(_install(checks, c, build, "--component", c, *where) for c in ("python", "tests"))


def _has_package(checks: Checks, name: str) -> bool:
    """Whether there is the package that a check runs; otherwise leaves the check."""
    found = any((PACKAGES / "gradferry").glob("_native.*.so"))
    return found or checks.leave(name, "the package is not built: run the stage package")


def check_training(checks: Checks) -> None:
    """Trains on GPUs: the tests of the fake device, and trainings beside the CPU."""
    tests = ROOT / "tests" / "kernels" / "cuda"
    programs = {"tests of the fake device": [str(tests / "run_device_tests.py")]}
    for backend, ranks, *options in map(str.split, TRAININGS):
        name = " ".join(("train:", ranks, "ranks", backend, *options))
        programs[name] = [str(tests / "check_hook.py"), backend, "--ranks", ranks, *options]
    package = {"PYTHONPATH": str(PACKAGES)}
    for name, arguments in programs.items():
        if _has_package(checks, name):
            checks.start(name, 8, [sys.executable, *arguments], on_gpu=True, **package)


def measure(checks: Checks) -> None:
    """Runs the benchmarks of the package, and doctor, and keeps their rows."""
    checks.wait()  # they run alone
    for command, options in MEASUREMENTS.items():
        name, kept = f"gradferry {command}", command.split()[-1]
        if importlib.util.find_spec("rich") is None:
            checks.skip(name, "the Python package rich is not on this machine")
            continue
        if not _has_package(checks, name):
            continue
        rows = BUILD / f"{kept}.json"
        rows.unlink(missing_ok=True)
        arguments = [sys.executable, "-m", "gradferry", *command.split(), "--device", "cuda"]
        arguments += [*options, "--json", str(rows)]
        again = not checks.has_measured(kept)
        passed = checks.run(name, 6, arguments, on_gpu=True, again=again, PYTHONPATH=str(PACKAGES))
        if passed and rows.exists():
            checks.keep(kept, json.loads(rows.read_text()))
        elif not passed:
            checks.drop(kept)


STAGES: dict[str, Callable[[Checks], None]] = {
    "kernels": check_kernels,
    "package": check_package,
    "train": check_training,
    "sanitize": check_sanitized,
    "measure": measure,
}


def main() -> int:
    """Runs all stages, or one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=STAGES, help="one stage (default: all, in this order)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="stop after so many; what is left is for the next call (default: %(default)s)",
    )
    parser.add_argument("--fresh", action="store_true", help="forget what has passed before")
    parser.add_argument(
        "--as-built", action="store_true", help="compile nothing: run what build/gpu holds"
    )
    arguments = parser.parse_args()
    if arguments.minutes <= 0:
        parser.error(f"--minutes {arguments.minutes:g}: must be more than zero")
    if shutil.which("nvcc") is None and (TOOLKIT / "nvcc").exists():
        os.environ["PATH"] += os.pathsep + str(TOOLKIT)
    if gpu():
        os.environ.setdefault("CUDAARCHS", "native")  # machine code for others takes minutes
    checks = Checks(arguments.minutes, arguments.fresh, arguments.as_built)
    try:
        for name in [arguments.only] if arguments.only else STAGES:
            STAGES[name](checks)
        checks.wait()
    except BaseException:
        checks.stop()
        raise
    failed = checks.failed()
    outcome = f"failed: {', '.join(failed)}" if failed else "nothing failed"
    if checks.num_left:
        outcome += f"; {checks.num_left} more are left: call again"
    print(f"{RESULT}: {outcome}{'' if checks.gpu else ', without a GPU'}")
    return 1 if failed else 2 if checks.num_left else 0


if __name__ == "__main__":
    sys.exit(main())
