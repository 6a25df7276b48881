"""The PTX lint finds what it is for, and nothing else."""

import pytest
from check_ptx import violations


@pytest.mark.parametrize(
    "instruction",
    [
        "fma.rn.f32 \t%f1, %f2, %f3, %f4;",
        "@%p1 fma.rn.f64 %fd1, %fd2, %fd3, %fd4;",
        "mad.rn.f32 %f1, %f2, %f3, %f4;",
        "rcp.approx.f32 %f1, %f2;",
        "div.approx.f32 %f1, %f2, %f3;",
        "sqrt.approx.ftz.f32 %f1, %f2;",
        "add.ftz.f32 %f1, %f2, %f3;",
        "rsqrt.approx.f32 %f1, %f2;",
    ],
)
def test_check_ptx_forbids(instruction: str) -> None:
    text = f".visible .entry some_kernel(\n)\n{{\n\t{instruction}\n}}\n"
    assert [(n, kernel) for n, kernel, _ in violations(text)] == [(4, "some_kernel")]


@pytest.mark.parametrize(
    "instruction",
    [
        "mad.lo.s32 %r1, %r2, %r3, %r4;",
        "mul.rn.f32 %f1, %f2, %f3;",
        "div.rn.f32 %f1, %f2, %f3;",
        "sqrt.rn.f32 %f1, %f2;",
        "// fma.rn.f32 in a comment",
    ],
)
def test_check_ptx_allows(instruction: str) -> None:
    assert violations(f".entry some_kernel(\n\t{instruction}\n") == []
