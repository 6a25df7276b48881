"""check_includes finds mistakes of each kind that are planted, and no other."""

from __future__ import annotations

import shutil
from pathlib import Path

import check_includes

ROOT = Path(__file__).parents[2]
# The file, what it includes, and what is said.
PLANTED = [
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
]


def test_planted_includes_are_found(tmp_path):
    for room in ("include", "kernels", "hooks", "python_bindings/src"):
        shutil.copytree(ROOT / room, tmp_path / room)
    for file, name, _ in PLANTED:
        with (tmp_path / file).open("a") as opened:
            opened.write(f'  #  include "{name}"  // planted\n')
    found = check_includes.violations(tmp_path)
    assert len(found) == len(PLANTED)
    for file, name, reason in PLANTED:
        (line,) = (each for each in found if each.startswith(file) and f'"{name}"' in each)
        assert reason in line
