"""check_includes finds a planted violation of each kind, and nothing in a tree without one."""

from pathlib import Path

import pytest
from check_includes import violations

LAWFUL = {
    "include/gradferry/codec.h": "#include <cstddef>\n",
    "include/gradferry/wire.h": '#include "gradferry/codec.h"\n',
    "kernels/codec_table.cpp": '#include "q4/q4_layout.h"\n#include "q8/q8_layout.h"\n',
    "kernels/common/simd.h": "#include <immintrin.h>\n",
    "kernels/q4/q4_layout.h": '#include "gradferry/codec.h"\n#include "kernels/common/simd.h"\n',
    "kernels/q4/q4_cpu.cpp": '#include "q4_layout.h"\n',
    "kernels/q8/q8_layout.h": '#include "../common/simd.h"\n',
    "hooks/bucket_engine.h": '#include "gradferry/wire.h"\n#include <torch/torch.h>\n',
    "hooks/bucket_engine.cpp": '#include "bucket_engine.h"\n',
    "hooks/include/gradferry/reducer.h": '#include "gradferry/error.h"\n#include <torch/torch.h>\n',
    "hooks/host/reducer.cpp": '#include "gradferry/reducer.h"\n#include "bucket_engine.h"\n',
    "hooks/host/host_engine.h": '#include "bucket_engine.h"\n',
    "hooks/host/host_engine.cpp": '#include "host/host_engine.h"\n',
    "hooks/device/device_engine.h": '#include "../bucket_engine.h"\n',
    "python_bindings/src/module.cpp": (
        '#include "hooks/bucket_engine.h"\n#include <pybind11/pybind11.h>\n'
    ),
}


@pytest.fixture
def tree(tmp_path):
    for name, text in LAWFUL.items():
        write(tmp_path, name, text)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_violations_lawful_tree_has_none(tree):
    assert violations(tree) == []


@pytest.mark.parametrize(
    ("file", "name", "reason"),
    [
        ("kernels/q4/q4_cpu.cpp", "torch/torch.h", "kernels/ must not know torch"),
        ("kernels/common/simd.h", "c10/util/Exception.h", "kernels/ must not know torch"),
        ("kernels/q4/q4_cpu.cpp", "Python.h", "kernels/ must not know torch"),
        ("kernels/codec_table.cpp", "hooks/bucket_engine.h", "kernels/ must not include hooks/"),
        ("kernels/codec_table.cpp", "gradferry/reducer.h", "kernels/ must not include hooks/"),
        ("kernels/q4/q4_cpu.cpp", "kernels/q8/q8_layout.h", "must not include the codec q8"),
        ("kernels/q4/q4_cpu.cpp", "../q8/q8_layout.h", "must not include the codec q8"),
        ("kernels/common/simd.h", "q4/q4_layout.h", "must not include the codec q4"),
        ("hooks/bucket_engine.cpp", "kernels/common/simd.h", "hooks/ must not include kernels/"),
        ("hooks/bucket_engine.cpp", "q4/q4_layout.h", "hooks/ must not include kernels/"),
        ("hooks/bucket_engine.cpp", "host/host_engine.h", "hooks/host/ is for itself"),
        ("hooks/device/device_engine.h", "host/host_engine.h", "hooks/host/ is for itself"),
        ("hooks/host/host_engine.cpp", "../device/device_engine.h", "hooks/device/ is for itself"),
        ("python_bindings/src/module.cpp", "q8/q8_layout.h", "must not include kernels/"),
        ("include/gradferry/codec.h", "hooks/bucket_engine.h", "include/ must not include hooks/"),
        ("include/gradferry/codec.h", "torch/torch.h", "the standard library alone"),
        ("include/gradferry/codec.h", "cuda_runtime.h", "the standard library alone"),
    ],
)
def test_violations_planted_include_is_found(tree, file, name, reason):
    write(tree, file, LAWFUL[file] + f'  #  include "{name}"  // planted\n')
    (line,) = violations(tree)
    assert line.startswith(f"{file}:{LAWFUL[file].count(chr(10)) + 1}: ")
    assert f'"{name}"' in line
    assert reason in line


def test_violations_this_tree_has_none():
    assert violations(Path(__file__).parents[2]) == []
