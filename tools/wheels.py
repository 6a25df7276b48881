"""Builds a wheel for every torch and Python, and tries each where there is no compiler.

For every cell `make wheel` builds in an environment with that torch. Then the wheel is installed,
with the torch that its metadata asks for, in a fresh environment whose PATH leads to no compiler;
there `gradferry demo --steps 20` and examples/ddp_minimal.py on two ranks must end well. An
environment takes 6 GB, and is removed before the next is made. Wheels are left in dist/, logs in
build/wheel/.

Usage: tools/wheels.py [--torch 2.15.0 ...] [--python python3.11 ...]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "build/wheel/env"
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make", "nvcc")
# Beside these a wheel needs torch alone, which loads its libraries before ours.
SYSTEM_LIBRARIES = r"(libstdc\+\+|libgcc_s|libm|libc|ld-linux-[^.]*)\.so\.\d+"
TORCH_LIBRARIES = r"lib(torch_python|torch_cpu|torch|c10)\.so"


class CellError(Exception):
    """What is wrong with a wheel, in one line."""


def supported_torches() -> list[str]:
    """The first of every supported minor version, such as "2.15.0", the newest first."""
    text = (ROOT / "CMakeLists.txt").read_text()
    (oldest,), (newest,) = (
        map(int, re.findall(rf"GRADFERRY_{which}_TORCH 2\.(\d+)", text))
        for which in ("OLDEST", "NEWEST")
    )
    return [f"2.{minor}.0" for minor in range(newest, oldest - 1, -1)]


def torches_for(python: str) -> list[str]:
    """The versions of torch that pip finds for this Python; empty without such a Python.

    Ends the program where pip cannot say it.
    """
    if shutil.which(python) is None:
        return []
    command = [python, "-m", "pip", "index", "versions", "torch"]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode:
        sys.exit(f"{' '.join(command)}: {asked.stderr.strip()}")
    return re.findall(r"\d+\.\d+\.\d+", asked.stdout.partition("Available versions:")[2])


def run(log: Path, command: Sequence[object], **options: object) -> float:
    """Appends the output to the log; returns seconds.

    Raises:
        CellError: the command did.
    """
    words = [str(word) for word in command]
    begin = time.monotonic()
    with log.open("a") as output:
        output.write(f"$ {' '.join(words)}\n")
        output.flush()
        code = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, **options).returncode
    if code:
        raise CellError(
            f"{' '.join(words[:4])} ...: exit status {code}, see {log.relative_to(ROOT)}"
        )
    return time.monotonic() - begin


def check_binaries(wheel: Path) -> None:
    """What a wheel's modules need must be what its tag and its metadata promise.

    Raises:
        CellError: a module needs another library or a newer glibc, or names a folder of ours.
    """
    promised = tuple(map(int, re.search(r"manylinux_(\d+)_(\d+)_", wheel.name).groups()))
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".so"):
                continue
            module = archive.extract(name, folder)
            shown = subprocess.run(
                ["readelf", "-dVW", module], capture_output=True, text=True, check=True
            ).stdout
            if path := re.search(r"\((RPATH|RUNPATH)\).*", shown):
                raise CellError(f"{name} has a {path[0]}")
            for library in re.findall(r"\(NEEDED\).*\[(.*)\]", shown):
                if not re.fullmatch(f"{SYSTEM_LIBRARIES}|{TORCH_LIBRARIES}", library):
                    raise CellError(f"{name} needs {library}")
            needed = max(tuple(map(int, v)) for v in re.findall(r"GLIBC_(\d+)\.(\d+)", shown))
            if needed > promised:
                raise CellError(f"{name} needs glibc {needed}, and the tag promises {promised}")
            if str(ROOT).encode() in Path(module).read_bytes():
                raise CellError(f"{name} names {ROOT}")


def without_compilers() -> dict[str, str]:
    """The variables of a shell that finds the fresh environment's programs and no others.

    Raises:
        CellError: a compiler is among them.
    """
    hidden = r"PATH|CC|CXX|CUDA.*|CMAKE.*|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|MAKE.*|GRADFERRY.*"
    variables = {k: v for k, v in os.environ.items() if not re.fullmatch(hidden, k)}
    variables["PATH"] = str(ENVIRONMENT / "bin")
    for compiler in COMPILERS:
        if found := shutil.which(compiler, path=variables["PATH"]):
            raise CellError(f"the fresh environment has a compiler: {found}")
    return variables


def cell(torch: str, python: str, log: Path) -> Iterator[str]:
    """Builds and tries one wheel; yields the columns of the table.

    Raises:
        CellError: a step did.
    """
    made = ["make", "-C", ROOT, "wheel", f"TORCH={torch}", f"PYTHON={python}"]
    seconds = run(log, [*made, f"venv={ENVIRONMENT.relative_to(ROOT)}"])
    wheel = ROOT / "dist" / re.findall(r"filename=(gradferry-\S+\.whl)", log.read_text())[-1]
    yield f"{wheel.stat().st_size / 1e6:.1f}"
    yield f"{seconds:.0f}"
    check_binaries(wheel)
    yield from try_out(wheel, python, log)
    yield wheel.name


def try_out(wheel: Path, python: str, log: Path) -> Iterator[str]:
    """Installs and runs a wheel without compilers; yields the seconds of each step.

    Raises:
        CellError: a step did not end well.
    """
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    run(log, [python, "-m", "venv", ENVIRONMENT])
    alone = {"env": without_compilers(), "cwd": ENVIRONMENT}
    inside = [ENVIRONMENT / "bin/python", "-m"]
    yield f"{run(log, [*inside, 'pip', 'install', wheel], **alone):.0f}"
    run(log, [ENVIRONMENT / "bin/gradferry", "--version"], **alone)  # the library needs no extra
    run(log, [*inside, "pip", "install", f"{wheel}[lab]"], **alone)
    without_compilers()  # nor did its dependencies bring one
    run(log, [*inside, "pip", "check"], **alone)
    run(log, [ENVIRONMENT / "bin/gradferry", "info"], **alone)
    yield f"{run(log, [ENVIRONMENT / 'bin/gradferry', 'demo', '--steps', 20], **alone):.0f}"
    ranks = [*inside, "torch.distributed.run", "--nproc-per-node", 2]
    yield f"{run(log, [*ranks, ROOT / 'examples/ddp_minimal.py'], **alone):.0f}"


def main() -> int:
    """Returns 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", default=supported_torches(), metavar="VERSION")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="PYTHON")
    arguments = parser.parse_args()

    columns = ("torch", "Python", "MB", "build s", "install s", "demo s", "2 ranks s", "wheel")
    widths = (8, 12, 6, 8, 10, 7, 10, 0)
    made = failures = 0

    def show(row: Sequence[str]) -> None:
        print("".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=False)), flush=True)

    show(columns)
    for python in arguments.python:
        name = Path(python).name
        known = torches_for(python)
        for torch in arguments.torch:
            if torch not in known:
                show((torch, name, "no such Python, or no such torch for it"))
                continue
            shutil.rmtree(ENVIRONMENT, ignore_errors=True)
            log = ROOT / f"build/wheel/torch{torch}-{name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("")
            row = [torch, name]
            try:
                for column in cell(torch, python, log):
                    row.append(column)
                made += 1
            except CellError as failure:
                failures += 1
                row.append(f"FAILED: {failure}")
            finally:
                shutil.rmtree(ENVIRONMENT, ignore_errors=True)
            show(row)
    if not made:
        print("no wheel was made")
    return 0 if made and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
