"""tools/count_sass.py reads what nvdisasm and ptxas say."""

import shutil

import pytest
from programs import load_program

count_sass = load_program("tools/count_sass.py")

DISASSEMBLY = """
\t.section\t.text._Z5firstv,"ax",@progbits
.text._Z5firstv:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   BPT.TRAP 0x1 ;
.L_x_1:
        /*0030*/                   BRA.DIV UR4, `(.L_x_3) ;
        /*0040*/                   CALL.REL.NOINC `($_Z9slow_pathv) ;
        /*0050*/                   BRA `(.L_x_2) ;
        /*0060*/                   FADD R0, R0, R1 ;
.L_x_2:
        /*0070*/               @P0 EXIT ;
        /*0080*/                   NOP;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   WARPSYNC.COLLECTIVE R4, `(.L_x_4) ;
.L_x_4:
        /*00b0*/                   EXIT ;
\t.section\t.text._Z6secondv,"ax",@progbits
        /*0000*/              @UP1 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0010*/                   EXIT ;
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


def test_the_hot_path_leaves_out_rare_paths_padding_and_data():
    kernels = count_sass.read_kernels(DISASSEMBLY)
    counts = {name: count_sass.count_hot_path(*kernel) for name, kernel in kernels.items()}
    assert counts == {"_Z5firstv": 7, "_Z6secondv": 2}


def test_read_usage_finds_registers_and_shared_memory():
    assert count_sass.read_usage(PTXAS) == {"_Z5firstv": (72, 44), "_Z6secondv": (10, 0)}


def test_blocks_per_sm_is_the_scarcest_resource():
    blocks = count_sass.blocks_per_sm
    assert blocks(72, 44, "sm_90") == 7  # 65536 / (4 * 32 * 72) = 7.1
    assert blocks(16, 44, "sm_90") == 16  # 64 warps
    assert blocks(16, 44, "sm_86") == 12  # 48 warps
    assert blocks(16, 40 * 1024, "sm_90") == 5  # 228 / 41


# An H100 can issue ten instructions per byte that its memory moves: 125 for the 12.5 of an encode
# with residual, half of which hides behind memory for sure; 45 for the 4.5 bytes of a q4 decode, 25
# for the 2.5 with 16-bit gradients.
@pytest.mark.parametrize(
    ("codec", "dtype", "encode", "decode"),
    [
        ("q4", "float32", 60, 22),
        pytest.param("q4", "bfloat16", 60, 24, marks=pytest.mark.slow),
        pytest.param("bf16", "float32", 45, 22, marks=pytest.mark.slow),
    ],
)
def test_instructions_leave_memory_to_be_what_limits(codec, dtype, encode, decode):
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc, to compile kernels")
    try:
        nvdisasm = count_sass.find_nvdisasm(None)
    except SystemExit as error:
        pytest.skip(str(error))
    counted = {
        (kernel.function, kernel.residual): kernel.instructions
        for kernel in count_sass.count_kernels(codec, dtype, "sm_90", nvdisasm)
    }
    assert 10 < counted["encode", True] <= encode
    assert 5 < counted["decode", True] <= decode
