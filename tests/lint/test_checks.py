"""check_includes finds mistakes of each kind that are planted, alone."""

from __future__ import annotations

from pathlib import Path

import check_includes
import pytest


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


INCLUDES = {
    "include/gradferry/codec.h": "#include <cstddef>\n",
    "include/gradferry/wire.h": '#include "gradferry/codec.h"\n',
    "kernels/codec_table.cpp": '#include "q4/q4_layout.h"\n#include "q8/q8_layout.h"\n',
    "kernels/common/simd.h": "#include <immintrin.h>\n",
    "kernels/q4/q4_layout.h": '#include "gradferry/codec.h"\n#include "kernels/common/simd.h"\n',
    "kernels/q4/q4_cpu.cpp": '#include "q4_layout.h"\n',
    "kernels/q8/q8_layout.h": '#include "../common/simd.h"\n',
    "hooks/protocol/plan.h": '#include "gradferry/wire.h"\n',
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


def test_lawful_includes_and_those_of_this_tree_are_no_violation(tmp_path):
    assert check_includes.violations(write(tmp_path, INCLUDES)) == []
    assert check_includes.violations(Path(__file__).parents[2]) == []


@pytest.mark.parametrize(
    ("file", "name", "reason"),
    [
        ("kernels/q4/q4_cpu.cpp", "torch/torch.h", "kernels/ must not know torch"),
        ("kernels/codec_table.cpp", "gradferry/reducer.h", "kernels/ knows include/ alone"),
        ("kernels/q4/q4_cpu.cpp", "../q8/q8_layout.h", "the codec q4 knows no other codec"),
        ("kernels/common/simd.h", "q4/q4_layout.h", "kernels/common/ knows no codec"),
        ("hooks/protocol/plan.h", "c10/util/Exception.h", "hooks/protocol/ must not know torch"),
        ("hooks/protocol/plan.h", "bucket_engine.h", "knows nothing else of hooks/"),
        ("hooks/bucket_engine.cpp", "q4/q4_layout.h", "hooks/ knows include/ alone"),
        ("hooks/device/device_engine.h", "host/host_engine.h", "hooks/host/ is for itself"),
        ("python_bindings/src/module.cpp", "q8/q8_layout.h", "python_bindings/ knows no kernels"),
        ("include/gradferry/codec.h", "hooks/bucket_engine.h", "the standard library alone"),
        ("include/gradferry/codec.h", "cuda_runtime.h", "the standard library alone"),
    ],
)
def test_planted_include_is_found(tmp_path, file, name, reason):
    planted = {file: INCLUDES[file] + f'  #  include "{name}"  // planted\n'}
    (line,) = check_includes.violations(write(tmp_path, INCLUDES | planted))
    assert line.startswith(f"{file}:{INCLUDES[file].count(chr(10)) + 1}: ")
    assert f'"{name}"' in line
    assert reason in line
