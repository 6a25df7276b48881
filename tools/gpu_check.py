"""What there is to know about gradferry on this machine's GPU, a step a command.

    python tools/gpu_check.py               # build, test, train, measure: half an hour, 16 cores
    python tools/gpu_check.py --minutes 9   # a part of it; call it again to go on
    python tools/gpu_check.py --as-built    # compile nothing: what build/gpu holds is run
    python tools/gpu_check.py --list        # do nothing: list the steps, and what came of each
    python tools/gpu_check.py --tune        # kernels with other bounds, each timed (make gpu-tune)

Results go to build/gpu/gpu.json after every step. A step that has passed is not repeated as long as
sources and GPU are the same. Ends with code 1 when a step failed, 2 when some are left, else 0.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/gpu"
SOURCES = "benchmarks/gradferry_lab cmake hooks include kernels python_bindings tests tools"
KERNELS, PACKAGE = "build/gpu/kernels", "build/gpu/package"
CMAKE = "cmake -S . -G Ninja -DCMAKE_BUILD_TYPE=Release -DGRADFERRY_GPU_CHECK=ON -B"
OF_PYTHON = f"-DGRADFERRY_PYTHON=ON -DPython_EXECUTABLE={sys.executable}"
PROGRAM = f"{KERNELS}/tests/kernels/cuda/standalone/gradferry_gpu_check"
AT_EDGES = "--gtest_filter=*StayInside*"
TRAININGS = ("nccl 2, nccl 1, nccl 2 --abandon, nccl 2 --slow 7, nccl 1 --detail, nccl 1 --abandon "
             "--slow 7, nccl 4, gloo 2, gloo 2 --abandon, gloo 2 --slow 7, gloo 4")  # fmt: skip
# By stage: how many steps run beside each other, and minutes and command of each.
STAGES = {
    "build": (1, (
        f"2 {CMAKE} {KERNELS} -DGRADFERRY_CUDA=ON -DCMAKE_INSTALL_PREFIX={BUILD}/install",
        f"20 cmake --build {KERNELS}",
        f"1 cmake --install {KERNELS} --component development",
        f"2 {CMAKE} {PACKAGE} {OF_PYTHON} -DGRADFERRY_PREBUILT_KERNELS={BUILD}/install",
        f"20 cmake --build {PACKAGE}",
        "1 cmake -E rm -rf build/gpu/python",
        *(f"1 cmake -E copy_directory {room} build/gpu/python/{Path(room).name}"
          for room in ("python_bindings/gradferry", "benchmarks/gradferry_lab")),
        *(f"1 cmake --install {PACKAGE} --component {part} --prefix build/gpu/python"
          for part in ("python", "tests")),
        "1 python -m gradferry info")),
    "check": (4, (
        f"8 {PROGRAM} --gtest_brief=1",
        "8 python tests/kernels/cuda/run_device_tests.py",
        *(f"8 python tests/kernels/cuda/check_hook.py {words.replace(' ', ' --ranks ', 1)}"
          for words in TRAININGS.split(", ")),
        *(f"8 compute-sanitizer --tool {tool} --error-exitcode 1 {PROGRAM} {AT_EDGES}"
          for tool in ("memcheck", "racecheck", "initcheck")))),
    "measure": (1, tuple(
        f"6 python -m gradferry {words} --device cuda --json build/gpu/{file}.json"
        for file, words in {
            "codec": "bench codec --rounds 50",
            "collective": "bench collective -b 1M -e 64M -f 8 -n 10",
            "train": "bench train --rounds 4 --hooks none sync torch:fp32 torch:bf16 q4",
            "doctor": "doctor"}.items())),
    # For all codecs, what kernels/cuda/chunk_bounds.h has by codec, a digit each: encode, reduce,
    # decode, accumulate. Bounds with which registers spill are timed, too; presets refuse them.
    "tune": (1, tuple(
        f"25 bash -ec '{CMAKE} {to} -DGRADFERRY_CUDA=ON {OF_PYTHON} "
        f"-DCMAKE_CUDA_FLAGS=-DGRADFERRY_CHUNK_BOUNDS={bounds}; cmake --build {to} --target _cuda; "
        f"cp -r build/gpu/python {to}; cp {to}/python_bindings/_cuda*.so {to}/python/gradferry/; "
        f"PYTHONPATH={to}/python {sys.executable} -m gradferry bench codec --rounds 20 "
        f"--device cuda --json {to}.json'"
        for to, bounds in ((f"build/gpu/bounds_{each}", each)
                           for each in (3343, 4454, 4475, 4565, 5575, 6686)))),
}  # fmt: skip


class Run:
    """One call: runs steps that have not passed, and writes down what came of each."""

    def __init__(self, minutes: float) -> None:
        self.result = BUILD / "gpu.json"
        self._end, self._lock = time.monotonic() + 60 * minutes, threading.Lock()
        self.gpu = line("nvidia-smi --query-gpu=name,driver_version --format=csv,noheader")
        self.torch = line(f"{sys.executable} -c 'import torch; print(torch.__version__)'")
        self.commit = line("git rev-parse HEAD")
        digest = hashlib.sha256()
        for file in sorted(f for folder in SOURCES.split() for f in (ROOT / folder).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
        self.source = digest.hexdigest()[:16]
        before = self.result.read_text() if self.result.exists() else '{"rows": []}'
        self.rows = {row["command"]: row for row in json.loads(before)["rows"]}

    def step(self, step: str, *, on_gpu: bool, only_look: bool) -> str:
        """Runs a step unless it passed here, a build always: passed, failed, skipped or left."""
        minutes, _, command = step.partition(" ")
        row = self.rows.get(command, {"source": None})
        is_known = row["source"] == self.source and (row["gpu"] == self.gpu or not on_gpu)
        outcome = str(row["outcome"]) if is_known else "left"
        if only_look or (on_gpu and outcome == "passed"):
            print(f"{outcome:8} {command}", flush=True)
            return outcome
        limit = min(60 * float(minutes), self._end - time.monotonic())
        words = [sys.executable if word == "python" else word for word in shlex.split(command)]
        if on_gpu and not self.gpu:
            code, output = 77, "there is no GPU on this machine"
        elif limit < 1:
            code, output = 124, "no time"
        else:  # timeout(1) ends what the program has started, too
            words[:0] = ["timeout", f"{limit:.0f}"]
            done = subprocess.run(words, capture_output=True, text=True)
            code, output = done.returncode, (done.stdout + done.stderr).replace(f"{ROOT}/", "")
        slow = "left" if limit < 60 * float(minutes) or "sanitizer" in command else "failed"
        outcome = {0: "passed", 77: "skipped", 124: slow}.get(code, "failed")
        row = {"command": command, "outcome": outcome, "gpu": self.gpu, "source": self.source,
               "commit": self.commit, "torch": self.torch,
               "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
               "output": output.strip().splitlines()[-30 if code else -1 :]}  # fmt: skip
        if code == 0 and (file := re.search(r"--json (\S+\.json)", command)):
            row["measured"] = json.loads(Path(file[1]).read_text())
        with self._lock:
            print(f"{outcome:8} {command}", *row["output"], sep="\n    ", flush=True)
            self.rows[command] = row
            new = BUILD / "gpu.new"  # the machine may go away at any time
            BUILD.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps({"rows": list(self.rows.values())}, indent=1) + "\n")
            new.replace(self.result)
        return outcome


def line(command: str) -> str:
    """The last line that a command prints; empty where it fails or is not there."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip().rpartition("\n")[2] if done.returncode == 0 else ""


def main() -> int:
    """Runs all stages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="then stop; call again to go on")
    parser.add_argument("--as-built", action="store_true", help="compile nothing")
    parser.add_argument("--list", action="store_true", help="list the steps and do nothing")
    parser.add_argument("--tune", action="store_true", help="time kernels with other bounds")
    asked = parser.parse_args()
    os.chdir(ROOT)
    os.environ["PATH"] += ":/usr/local/cuda/bin"  # where nvcc may be
    os.environ["PYTHONPATH"] = f"{BUILD}/python"
    run, found = Run(asked.minutes), list[str]()
    if run.gpu:
        os.environ.setdefault("CUDAARCHS", "native")  # machine code for others takes minutes
    for stage, (beside, steps) in STAGES.items():
        builds = stage == "build"
        if not builds and asked.tune != (stage == "tune"):
            continue
        only_look = asked.list or (builds and asked.as_built)
        with ThreadPoolExecutor(beside) as pool:
            found += pool.map(partial(run.step, on_gpu=not builds, only_look=only_look), steps)
        if builds and not asked.list and {"failed", "left"} & set(found):
            break  # nothing may run what older sources gave
    print(f"{run.result}:", *(f"{found.count(each)} {each}" for each in dict.fromkeys(found)))
    return 1 if "failed" in found else 2 if "left" in found else 0


if __name__ == "__main__":
    sys.exit(main())
