#!/usr/bin/env bash
# A wheel in dist/ by an environment with its torch, from the kernels of build/release. Its tag promises
# this machine's glibc or a newer one: what the compiler took from it may be new.
#
# Usage: tools/wheel.sh VENV PYTHON TORCH
set -euo pipefail
python=$1/bin/python
version() { "$1" -c 'import sys; print("cp%d%d" % sys.version_info[:2])'; }
tag=$(version "$python")
if [[ $tag != $(version "$2") ]]; then
  echo "$1 has another Python than $2; add venv=.venv-$(basename "$2")" >&2
  exit 2
fi
glibc=$(getconf GNU_LIBC_VERSION | sed 's/glibc //; s/[.]/_/')
tools/quiet.sh "build/wheel_$3.log" --show 'Prebuilt kernels|Created wheel' \
  --title "dist: a wheel for torch $3 (usually 3 min)" \
  "$python" -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps -v \
  --config-settings=build-dir="build/wheel/torch-$3/{wheel_tag}" \
  --config-settings=cmake.define.GRADFERRY_PREBUILT_KERNELS="$PWD/build/release/install" \
  --config-settings=cmake.define.GRADFERRY_WERROR=ON \
  --config-settings=wheel.tags="$tag-$tag-manylinux_${glibc}_$(uname -m)" \
  --wheel-dir dist .
