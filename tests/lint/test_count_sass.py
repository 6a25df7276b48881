"""tools/count_sass.py reads what nvdisasm and ptxas say."""

import importlib.util
import sys
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location(
    "count_sass", Path(__file__).parents[2] / "tools" / "count_sass.py"
)
count_sass = importlib.util.module_from_spec(SPEC)
sys.modules["count_sass"] = count_sass
SPEC.loader.exec_module(count_sass)

DISASSEMBLY = """
\t.section\t.text._Z5firstv,"ax",@progbits
.text._Z5firstv:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
.L_x_1:
        /*0020*/                   EXIT ;
        /*0030*/                   NOP;
\t.section\t.text._Z6secondv,"ax",@progbits
        /*0000*/              @UP1 UIADD3 UR4, UR4, 0x1, URZ ;
\t.section\t.nv.info,"",@"SHT_CUDA_INFO"
        /*0000*/ \t.byte\t0x04, 0x2f
"""

PTXAS = """
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_90'
ptxas info    : Function properties for _Z5firstv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 44 bytes smem
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_90'
ptxas info    : Used 10 registers, used 0 barriers
"""


def test_count_instructions_leaves_padding_and_data_out():
    assert count_sass.count_instructions(DISASSEMBLY) == {"_Z5firstv": 3, "_Z6secondv": 1}


def test_read_usage_finds_registers_and_shared_memory():
    assert count_sass.read_usage(PTXAS) == {"_Z5firstv": (72, 44), "_Z6secondv": (10, 0)}


def test_kernels_are_known_by_codec_and_variant():
    space = "void gradferry::cuda::"
    dtype = "(gradferry::ScalarType)0"
    rht = "gradferry::cuda::rht::Rht<gradferry::cuda::rht::OneWidth<4u> >"
    q4 = "gradferry::cuda::q4::Q4"
    kernel = count_sass.KERNEL.search(f"{space}encode_kernel<{rht}, {dtype}, true>(int)")
    assert kernel.groups() == (
        "encode",
        "Rht<gradferry::cuda::rht::OneWidth<4u> >",
        "0",
        "true",
    )
    kernel = count_sass.KERNEL.search(f"{space}decode_kernel<{q4}, {dtype}>(int)")
    assert kernel.groups() == ("decode", "Q4", "0", None)
    pair = f"gradferry::cuda::WithExact<{q4}>"
    assert count_sass.KERNEL.search(f"{space}encode_chunk_kernel<{pair}, {dtype}>(int)") is None


def test_blocks_per_sm_is_the_scarcest_resource():
    def blocks(registers: int, shared_bytes: int, arch: str = "sm_90") -> int:
        kernel = count_sass.Kernel("q4", "encode", "float32", True, 0, registers, shared_bytes)
        return kernel.blocks_per_sm(arch)

    assert blocks(72, 44) == 7  # 65536 / (4 * 32 * 72) = 7.1
    assert blocks(16, 44) == 16  # 64 warps
    assert blocks(16, 44, "sm_86") == 12  # 48 warps
    assert blocks(16, 40 * 1024) == 5  # 228 / 41


def test_find_nvdisasm_says_where_it_comes_from(monkeypatch):
    monkeypatch.setattr(count_sass.shutil, "which", lambda name: None)
    monkeypatch.setattr(count_sass.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"wheels triton and nvidia-cuda-nvdisasm"):
        count_sass.find_nvdisasm(None)
