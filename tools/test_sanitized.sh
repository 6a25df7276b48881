#!/usr/bin/env bash
# The C++ tests, and a part of the Python tests on a native module of its own, under ASan and UBSan.
#
# Usage: tools/test_sanitized.sh VENV JOBS
set -euo pipefail
python=$PWD/$1/bin/python
site=build/asan/site
tests=()
for subject in misuse codec_bytes codec_payloads connecting damaged_states elastic failing_ranks faults \
  momentum node_memory nodes reducer reducer_errors fsdp2 shared_memory; do
  tests+=(tests/*/test_"$subject".py)
done
build() {  # build PRESET TITLE OPTION...
  tools/quiet.sh "build/$1.log" cmake --preset "$1" "${@:3}"
  tools/quiet.sh "build/$1.log" --title "build/$1: $2" cmake --build --preset "$1"
}

build sanitize "kernels and C++ tests (usually 5 min)"
tools/quiet.sh build/sanitize_ctest.log --show 'tests passed|Total Test time' ctest --preset sanitize -j "$2"
tools/quiet.sh build/sanitize_install.log cmake --install build/sanitize
build asan "hooks and bindings (usually 3 min)" -DPython_EXECUTABLE="$python"
rm -rf $site
mkdir -p $site
cp -r python_bindings/gradferry benchmarks/gradferry_lab $site
tools/quiet.sh build/asan_install.log cmake --install build/asan --component python --prefix $site
# Loaded first, as the sanitizers demand, with the C++ library for what is thrown. Torch and Python leave
# memory at the end, so that leaks are not looked for.
cxx=${CXX:-g++}
LD_PRELOAD=$($cxx -print-file-name=libasan.so):$($cxx -print-file-name=libstdc++.so) ASAN_OPTIONS=detect_leaks=0 \
  PYTHONPATH=$site "$python" -m pytest -q -m "not slow" "${tests[@]}"
