#!/usr/bin/env python3
"""Counts what each CUDA kernel is made of: machine instructions per element, registers, occupancy.

    tools/count_sass.py [--arch sm_90] [--dtype float32] [--nvdisasm PATH] [CODEC...]

Needs nvcc and nvdisasm but no GPU. What is counted is what the kernels of chunks do with a whole,
aligned tile of finite numbers (GRADFERRY_HOT_PATH_ONLY in kernels/cuda/cuda.h): without rare
paths, without the calls that a division makes for extreme numbers, without what a warp does whose
lanes have come apart, and without headers, which the last block writes. Both sides of other
branches count, and a loop's body once: one rank of a reduce, one step of topk's search. Momentum
mode's addition to residuals counts as rare.

The roof is what instructions leave of the memory's rate, on an H100 SXM of which every cycle issues
(132 multiprocessors, 128 lanes each, 1.98 GHz, 3.35 TB/s). Registers and blocks are those of the
kernels of chunks, with rare paths.
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

import torch
from gradferry import _native

ROOT = Path(__file__).resolve().parents[1]
ELEMENTS_PER_THREAD = 32  # kLaneElements
THREADS_PER_BLOCK = 128  # kTileThreads
TILE_ELEMENTS = ELEMENTS_PER_THREAD * THREADS_PER_BLOCK
DTYPES = {"float32": "kFloat32", "bfloat16": "kBFloat16", "float16": "kFloat16"}
# Of an H100 SXM: multiprocessors, lanes that issue per cycle, cycles and bytes per second.
INSTRUCTIONS_PER_BYTE = 132 * 128 * 1.98e9 / 3.35e12

# Of a multiprocessor: 64 Ki registers, handed to warps in units of 256; warps; shared bytes, of
# which a block takes 1 KiB more than it asks for.
REGISTERS, REGISTER_UNIT = 65536, 256
WARPS = {"sm_80": 64, "sm_86": 48, "sm_89": 48, "sm_90": 64, "sm_100": 64, "sm_120": 48}
SHARED_KIB = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100}

SECTION = re.compile(r"^\s*\.section\s+\.text\.(\S+?),")
LABEL = re.compile(r"^(\S+):$")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*)")
TARGET = re.compile(r"`\((\S+?)\)")
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
KERNEL = re.compile(r"(encode|decode|reduce)_(?:chunk_kernel|tile<(true)?)")

# Instantiated for a codec and the dtype: what is counted, and what runs.
COUNTED = """
#include "kernels/{codec}/{codec}_cuda.h"
#include "kernels/cuda/chunk_launch.h"
namespace gradferry::cuda::counted {{
using Counted = {codec}::TileCodec;
constexpr ScalarType kDtype = ScalarType::{dtype};
#define GRADFERRY_COUNT(name, bound) \\
  template <bool kResidual> \\
  __global__ void __launch_bounds__(kTileThreads, bounds_of(Counted::kRow).bound) name
#define GRADFERRY_FIX \\
  if (call.residual == nullptr) __builtin_unreachable(); \\
  call.chunk.dtype = kDtype; \\
  entry.has_residual = kResidual; \\
  {options}

GRADFERRY_DEVICE void finish(StatusPart part, uint64_t* sums) {{
  add_sum(sums, 0, part.checksum);
  const uint32_t flags = block_flags(part.flags);
  if (threadIdx.x == 0) sums[0] = flags;
}}

GRADFERRY_COUNT(encode_tile, encode)(ChunkTile entry, ChunkCodec codec, EncodeChunkCall call,
                                     uint64_t* sums) {{
  GRADFERRY_FIX;
  add_sum(sums, 0, encode_entry<Counted, kDtype>(call, entry, codec));
}}
GRADFERRY_COUNT(reduce_tile, reduce)(ChunkTile entry, ChunkCodec codec, ReduceChunkCall call,
                                     uint64_t* sums) {{
  GRADFERRY_FIX;
  finish(reduce_entry<Counted, false>(call, entry, codec), sums);
}}
GRADFERRY_COUNT(decode_tile, decode)(ChunkTile entry, ChunkCodec codec, DecodeChunkCall call,
                                     uint64_t* sums) {{
  GRADFERRY_FIX;
  finish(cuda::decode_tile<Counted, kDtype>(call, entry, codec), sums);
}}
#define GRADFERRY_INSTANTIATE(name, Call) \\
  template __global__ void name<false>(ChunkTile, ChunkCodec, Call, uint64_t*); \\
  template __global__ void name<true>(ChunkTile, ChunkCodec, Call, uint64_t*);
GRADFERRY_INSTANTIATE(encode_tile, EncodeChunkCall)
GRADFERRY_INSTANTIATE(reduce_tile, ReduceChunkCall)
GRADFERRY_INSTANTIATE(decode_tile, DecodeChunkCall)
}}
"""
# What is counted one by one, as an option chooses among it.
FIXED = "const Counted::Options fixed{{{0}}}; __builtin_memcpy(codec.options.storage, &fixed, 4)"
VARIANTS = {"rht": {f"rht:{bits}": FIXED.format(bits) for bits in (2, 3, 4)}}
RUN = """
#include "kernels/{codec}/{codec}_cuda.h"
#include "kernels/cuda/chunk_launch.h"
namespace gradferry::cuda {{
using Codecs = WithExact<{codec}::TileCodec>;
template __global__ void encode_chunk_kernel<Codecs, ScalarType::{dtype}>(EncodeChunkCall, Share);
template __global__ void reduce_chunk_kernel<Codecs, false>(ReduceChunkCall, Share);
template __global__ void decode_chunk_kernel<Codecs, ScalarType::{dtype}>(DecodeChunkCall, Share);
}}
"""


def blocks_per_sm(registers: int, shared_bytes: int, arch: str) -> int:
    """Returns how many blocks of 128 threads a multiprocessor holds."""
    warps = THREADS_PER_BLOCK // 32
    registers_per_warp = -(-32 * registers // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS // registers_per_warp // warps
    by_shared = SHARED_KIB[arch] * 1024 // (shared_bytes + 1024)
    return min(by_registers, by_shared, WARPS[arch] // warps)


@dataclass(frozen=True)
class Counted:
    """What a codec does with a tile."""

    codec: str
    function: str  # "encode", "reduce" or "decode"
    residual: bool
    instructions: float  # per element

    def bytes_per_element(self, dtype: str) -> float:
        """What is read and written: gradient, payload (for a reduce one of each), residual."""
        name = {"topk": "topk:ratio=0.01"}.get(self.codec, self.codec.replace(":", ":bits="))
        sent, gathered = (
            _native.payload_bytes(name, TILE_ELEMENTS, getattr(torch, dtype), stage) / TILE_ELEMENTS
            for stage in ("worker", "owner")
        )
        gradient = getattr(torch, dtype).itemsize
        moved = {
            "encode": gradient + sent,
            "reduce": sent + gathered,
            "decode": gathered + gradient,
        }[self.function]
        return moved + (8 if self.residual and self.function != "decode" else 0)


@dataclass(frozen=True)
class Instruction:
    """One line of nvdisasm."""

    name: str
    is_predicated: bool
    target: str | None  # label of a branch


def read_kernels(disassembly: str) -> dict[str, tuple[list[Instruction], dict[str, int]]]:
    """Returns the instructions of every kernel in nvdisasm's text, and where its labels are."""
    kernels: dict[str, tuple[list[Instruction], dict[str, int]]] = {}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in disassembly.splitlines():
        if match := SECTION.match(line):
            instructions, labels = kernels[match[1]] = [], {}
        elif match := LABEL.match(line):
            labels[match[1]] = len(instructions)
        elif match := INSTRUCTION.match(line):
            target = TARGET.search(match[3])
            instructions.append(Instruction(match[2], match[1] is not None, target and target[1]))
    return kernels


def count_hot_path(instructions: list[Instruction], labels: dict[str, int]) -> int:
    """Returns how many instructions a kernel's hot path has: see above."""
    counted: set[int] = set()
    begins = [0]
    while begins:
        at = begins.pop()
        while at not in counted:
            instruction = instructions[at]
            if instruction.name.startswith("BPT.TRAP"):  # a rare path
                break
            counted.add(at)
            if instruction.name.startswith(("EXIT", "RET")) and not instruction.is_predicated:
                break
            if instruction.name.startswith("BRA") and instruction.name != "BRA.DIV":
                begins.append(labels[str(instruction.target)])
                if not instruction.is_predicated:
                    break
            at += 1
    return sum(instructions[at].name != "NOP" for at in counted)


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


def compile_kernels(source: str, arch: str, cubin: str, *flags: str) -> str:
    """Returns what ptxas says of the kernels."""
    path = Path(cubin).with_suffix(".cu")
    path.write_text(source)
    compiled = run(
        "nvcc", "-cubin", f"-arch={arch}", "-std=c++20", "-O3", "-DNDEBUG", "-fmad=false",
        "--expt-relaxed-constexpr", "-DGRADFERRY_KERNEL_NAMESPACE=cuda", *flags, f"-I{ROOT}",
        f"-I{ROOT / 'include'}", "-Xptxas=-v", "-o", cubin, str(path),
    )  # fmt: skip
    return compiled.stderr


def name_of(symbol: str) -> tuple[str, bool]:
    """Returns a kernel's function and whether it has a residual."""
    match = KERNEL.search(run("c++filt", symbol).stdout)
    if match is None:
        sys.exit(f"count_sass.py does not know the kernel {symbol}")
    return match[1], match[2] is not None


def usage_of(codec: str, dtype: str, arch: str) -> dict[str, tuple[int, int]]:
    """Returns registers and shared bytes of the kernels of chunks, by function."""
    with tempfile.TemporaryDirectory() as folder:
        source = RUN.format(codec=codec, dtype=DTYPES[dtype])
        said = compile_kernels(source, arch, f"{folder}/run.cubin")
    return {name_of(symbol)[0]: used for symbol, used in read_usage(said).items()}


def count_kernels(codec: str, dtype: str, arch: str, nvdisasm: str) -> list[Counted]:
    """Compiles what a codec does with a tile, and counts."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, options in VARIANTS.get(codec, {codec: ""}).items():
            cubin = f"{folder}/counted.cubin"
            source = COUNTED.format(codec=codec, options=options, dtype=DTYPES[dtype])
            compile_kernels(source, arch, cubin, "-DGRADFERRY_HOT_PATH_ONLY")
            for symbol, kernel in read_kernels(run(nvdisasm, "-c", cubin).stdout).items():
                per_element = count_hot_path(*kernel) / ELEMENTS_PER_THREAD
                found.append(Counted(name, *name_of(symbol), per_element))
    return sorted(found, key=lambda c: (c.codec, c.function, c.residual))


def main() -> int:
    codecs = sorted(path.parent.name for path in ROOT.glob("kernels/*/*_cuda.cu"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", nargs="*", metavar="CODEC", help=f"of {' '.join(codecs)}")
    parser.add_argument("--arch", default="sm_90", choices=WARPS)
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of gradients")
    parser.add_argument("--nvdisasm", help="default: the toolkit's, else the triton wheel's")
    arguments = parser.parse_args()
    if unknown := set(arguments.codecs) - set(codecs):
        parser.error(f"no such codec: {' '.join(sorted(unknown))}")
    if shutil.which("nvcc") is None:
        sys.exit("nvcc was not found: install the CUDA toolkit and put its bin folder on PATH")
    nvdisasm = find_nvdisasm(arguments.nvdisasm)

    arch, dtype = arguments.arch, arguments.dtype

    def inspect(codec: str) -> tuple[list[Counted], dict[str, tuple[int, int]]]:
        return count_kernels(codec, dtype, arch, nvdisasm), usage_of(codec, dtype, arch)

    print(f"{arch}, {dtype} gradients; instructions and bytes per element")
    heads = ("instructions", "bytes", "roof", "registers", "blocks/SM")
    print(f"{'codec':<8} {'':<21} " + " ".join(f"{head:>12}" for head in heads))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for counted, usage in pool.map(inspect, arguments.codecs or codecs):
            for kernel in counted:
                name = kernel.function + (" with residual" if kernel.residual else "")
                moved = kernel.bytes_per_element(dtype)
                roof = min(1.0, moved * INSTRUCTIONS_PER_BYTE / kernel.instructions)
                registers, shared_bytes = usage[kernel.function]
                print(
                    f"{kernel.codec:<8} {name:<21} {kernel.instructions:>12.1f} {moved:>12.2f}"
                    f" {roof:>12.2f} {registers:>12}"
                    f" {blocks_per_sm(registers, shared_bytes, arch):>12}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
