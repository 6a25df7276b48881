#!/usr/bin/env python3
"""Counts what each CUDA kernel is made of: machine instructions per element, registers, occupancy.

    tools/count_sass.py [--arch sm_90] [--dtype float32] [--nvdisasm PATH] [CODEC...]

Needs nvcc and nvdisasm but no GPU. Kernels are compiled as for whole, aligned tiles
(GRADFERRY_HOT_PATH_ONLY in kernels/common/slice.h). Every instruction that is left counts once,
those of rare branches too, and a loop's body once: one rank of a reduce, one step of topk's
bisection.
"""

import argparse
import concurrent.futures
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ELEMENTS_PER_THREAD = 32  # kLaneElements
THREADS_PER_BLOCK = 128  # kTileThreads
DTYPES = ("float32", "bfloat16", "float16", "float64")

# Of a multiprocessor: 64 Ki registers, handed to warps in units of 256; warps; shared bytes, of
# which a block takes 1 KiB more than it asks for.
REGISTERS, REGISTER_UNIT = 65536, 256
WARPS = {"sm_80": 64, "sm_86": 48, "sm_89": 48, "sm_90": 64, "sm_100": 64, "sm_120": 48}
SHARED_KIB = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100}

SECTION = re.compile(r"^\s*\.section\s+\.text\.(\S+?),")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)")
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
# Not those of chunks, which hold two codecs or more.
KERNEL = re.compile(
    r"(encode|decode|reduce|undo)_kernel<.*?::(\w+(?:<[^,]*>)?), "
    r"\(\S*ScalarType\)(\d)(?:, (true|false))?>"
)


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel of a codec."""

    codec: str
    function: str
    dtype: str
    residual: bool
    instructions: int
    registers: int
    shared_bytes: int

    @property
    def uses_dtype(self) -> bool:
        """Whether each dtype has its own: a reduce sees payloads, and only exact's depend on it."""
        return self.function != "reduce" or self.codec == "exact"

    def blocks_per_sm(self, arch: str) -> int:
        """How many blocks of 128 threads a multiprocessor holds."""
        warps = THREADS_PER_BLOCK // 32
        registers_per_warp = -(-32 * self.registers // REGISTER_UNIT) * REGISTER_UNIT
        by_registers = REGISTERS // registers_per_warp // warps
        by_shared = SHARED_KIB[arch] * 1024 // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, WARPS[arch] // warps)


def count_instructions(disassembly: str) -> dict[str, int]:
    """Returns the number of instructions of every function in nvdisasm's text, without padding."""
    counts: dict[str, int] = {}
    function = ""
    for line in disassembly.splitlines():
        if match := SECTION.match(line):
            function = match[1]
            counts[function] = 0
        elif (match := INSTRUCTION.match(line)) and match[1] != "NOP":
            counts[function] += 1
    return counts


def read_usage(ptxas_output: str) -> dict[str, tuple[int, int]]:
    """Returns registers and static shared bytes of every kernel in what `ptxas -v` says."""
    usage = {}
    entry = ""
    for line in ptxas_output.splitlines():
        if match := ENTRY.search(line):
            entry = match[1]
        elif match := USED.search(line):
            usage[entry] = (int(match[1]), int(match[2] or 0))
    return usage


def find_nvdisasm(named: str | None) -> str:
    """Returns the path of nvdisasm: the one named, the toolkit's, or that of the triton wheel."""
    if found := shutil.which(named or "nvdisasm"):
        return found
    triton = importlib.util.find_spec("triton") if named is None else None
    if triton is not None and triton.origin is not None:
        bundled = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        if bundled.exists():
            return str(bundled)
    sys.exit(
        f"{named or 'nvdisasm'} was not found: it comes with the CUDA toolkit, and with the wheels "
        "triton and nvidia-cuda-nvdisasm. Run this with a Python that has triton, or name it with "
        "--nvdisasm PATH"
    )


def run(*command: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"failed: {' '.join(command)}\n{result.stderr}")
    return result


def inspect(codec: str, arch: str, nvdisasm: str) -> list[Kernel]:
    """Compiles the kernels of a codec and counts."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/{codec}.cubin"
        flags = ["-std=c++20", "-O3", "-DNDEBUG", "-fmad=false", "--expt-relaxed-constexpr"]
        defines = ["-DGRADFERRY_KERNEL_NAMESPACE=cuda", "-DGRADFERRY_HOT_PATH_ONLY"]
        includes = [f"-I{ROOT}", f"-I{ROOT / 'include'}"]
        source = str(ROOT / "kernels" / codec / f"{codec}_cuda.cu")
        compiled = run(
            "nvcc", "-cubin", f"-arch={arch}", *flags, *defines, *includes, "-Xptxas=-v",
            "-o", cubin, source,
        )  # fmt: skip
        counts = count_instructions(run(nvdisasm, "-c", cubin).stdout)
    kernels = []
    for symbol, (registers, shared_bytes) in read_usage(compiled.stderr).items():
        match = KERNEL.search(run("c++filt", symbol).stdout)
        if match is None:  # exact's for float64, which have no hot path to speak of
            continue
        function, name, dtype, residual = match.groups()
        variant = "".join(re.findall(r"<(\d+)", name))
        kernels.append(
            Kernel(
                codec=f"{codec}:{variant}" if variant else codec,
                function=function,
                dtype=DTYPES[int(dtype)],
                residual=residual == "true",
                instructions=counts[symbol],
                registers=registers,
                shared_bytes=shared_bytes,
            )
        )
    return sorted(kernels, key=lambda k: (k.codec, k.function, k.dtype, k.residual))


def main() -> int:
    codecs = sorted(path.parent.name for path in ROOT.glob("kernels/*/*_cuda.cu"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", nargs="*", metavar="CODEC", help=f"of {' '.join(codecs)}")
    parser.add_argument("--arch", default="sm_90", choices=WARPS)
    parser.add_argument("--dtype", default="float32", choices=DTYPES[:3])
    parser.add_argument("--nvdisasm", help="default: the toolkit's, else the triton wheel's")
    arguments = parser.parse_args()
    if unknown := set(arguments.codecs) - set(codecs):
        parser.error(f"no such codec: {' '.join(sorted(unknown))}")
    if shutil.which("nvcc") is None:
        sys.exit("nvcc was not found: install the CUDA toolkit and put its bin folder on PATH")
    nvdisasm = find_nvdisasm(arguments.nvdisasm)

    print(f"{arguments.arch}, {arguments.dtype} gradients")
    heads = "instructions", "registers", "shared", "blocks"
    print(f"{'codec':<8} {'kernel':<21} {heads[0]:>12} {heads[1]:>9} {heads[2]:>7} {heads[3]:>6}")
    print(f"{'':<8} {'':<21} {'per element':>12} {'':>9} {'bytes':>7} {'per SM':>6}")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        chosen = arguments.codecs or codecs
        results = pool.map(lambda codec: inspect(codec, arguments.arch, nvdisasm), chosen)
        for kernel in (kernel for kernels in results for kernel in kernels):
            if kernel.dtype != (arguments.dtype if kernel.uses_dtype else "float32"):
                continue
            name = kernel.function + (" with residual" if kernel.residual else "")
            per_element = kernel.instructions / ELEMENTS_PER_THREAD
            print(
                f"{kernel.codec:<8} {name:<21} {per_element:>12.1f} {kernel.registers:>9}"
                f" {kernel.shared_bytes:>7} {kernel.blocks_per_sm(arguments.arch):>6}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
