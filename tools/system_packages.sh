#!/usr/bin/env bash
# Makes sure that the compilers of the build are there ("package"), and what the C++ tests and
# benchmarks need, too ("tests"), or the fuzz targets ("fuzz"), or the ends of processes that are
# watched ("valgrind"). On Debian as root it installs what is missing; elsewhere it says what to
# install.
#
# Usage: tools/system_packages.sh PYTHON package|tests|fuzz|valgrind
set -euo pipefail
python=$1
purpose=$2

missing=()
need() {  # need PACKAGE COMMAND...: the package is missing unless the command succeeds
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}
has_header() { echo "#include <$1>" | g++ -x c++ -std=c++20 -E -; }
has_fuzzer() { echo 'extern "C" int LLVMFuzzerTestOneInput() { return 0; }' | clang++ -fsanitize=fuzzer -o /dev/null -x c++ -; }
cmake_is_recent() { [[ $(printf '%s\n' 3.25 "$(cmake --version | awk 'NR == 1 {print $3}')" | sort -V | head -1) == 3.25 ]]; }

need g++ command -v g++
need cmake cmake_is_recent
need ninja-build command -v ninja
if [[ $purpose != package ]]; then
  need libgtest-dev has_header gtest/gtest.h
fi
if [[ $purpose == fuzz ]]; then
  need clang command -v clang++
  need libclang-rt-14-dev has_fuzzer
fi
if [[ $purpose == valgrind ]]; then
  need valgrind command -v valgrind
fi
if [[ $purpose == tests ]]; then
  need libbenchmark-dev has_header benchmark/benchmark.h
fi
if command -v "$python" >/dev/null; then
  need python3-venv "$python" -c 'import ensurepip, venv'
  need python3-dev "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
else
  missing+=(python3 python3-venv python3-dev)
fi
# Fashion-MNIST for the task tiny_vision, iproute2 for benchmarks on a link, valgrind for one slow test.
# Nothing else needs them, so only Debian offers them.
optional=(dataset-fashion-mnist iproute2 valgrind)
if [[ $purpose == tests && -f /etc/debian_version ]]; then
  need dataset-fashion-mnist test -d /usr/share/datasets/fashion-mnist
  need iproute2 command -v tc
fi

if ((${#missing[@]} == 0)); then
  exit 0
fi
if [[ ! -f /etc/debian_version || $(id -u) != 0 ]]; then
  echo "Missing on this machine (Debian's names): ${missing[*]}" >&2
  echo "Install them and call make again. On Debian: sudo apt-get install ${missing[*]}" >&2
  for package in "${missing[@]}"; do
    [[ " ${optional[*]} " == *" $package "* ]] || exit 1
  done
  exit 0
fi

echo "Installing Debian packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install --yes --no-install-recommends "${missing[@]}"; }
install || { apt-get update && install; }
