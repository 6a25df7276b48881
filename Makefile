# Thin wrapper: CMake and pip do the work. `make help` lists the targets.
#
#   TORCH=2.11.0       which torch to build and test with; each has its own environment
#   PYTHON=python3.12  which Python makes that environment (3.10 to 3.13)
#   JOBS=4             how many compilers or tests run at once
#
# Environments are .venv and .venv-torch<version>, all else goes to build/: build/core holds kernels
# and C++ tests and is shared by every torch, build/torch-<version> holds hooks and bindings.
# Stamp files remember what is done; long output goes to build/*.log.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
JOBS ?= $(shell nproc)
# The newest supported torch; Python 3.10 has none after 2.14.
newest_torch := $(or $(shell $(PYTHON) -c 'import sys; print("2.15.0" if sys.version_info >= (3, 11) else "2.14.1")' 2>/dev/null),2.15.0)
TORCH ?= $(newest_torch)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

venv := $(if $(filter $(newest_torch),$(TORCH)),.venv,.venv-torch$(TORCH))
bin := $(venv)/bin
package_build := build/torch-$(TORCH)
quiet := tools/quiet.sh

# Folders are listed too: theirs is the timestamp that changes when a file goes away.
core_inputs := $(shell find CMakeLists.txt CMakePresets.json cmake include kernels measure tests/cpp tests/simt tests/cuda benchmarks \
    hooks/layout.* hooks/plan.* 2>/dev/null)
package_inputs := $(shell find pyproject.toml README.md CMakeLists.txt cmake include hooks measure python_bindings \
    tests/streams tests/simt kernels/common \
    -not -name __pycache__ -not -name '*.pyc' 2>/dev/null)

system_ready := build/.system_packages
core_ready := build/core/.installed
venv_ready := $(venv)/.torch-$(TORCH)
package_ready := $(venv)/.gradferry
lint_ready := $(venv)/.lint

.PHONY: help setup demo test test-full test-torch-core lint format bench gpu-check sass clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(package_ready)  ## the environment, with gradferry built and installed
	@echo "gradferry is installed in $(venv) for torch $(TORCH)"

demo: $(package_ready)  ## two ranks on this machine: what compression changes, with pictures
	@$(bin)/gradferry demo

test: $(package_ready)  ## all fast tests
	@$(quiet) build/ctest.log --show 'tests passed|Total Test time' ctest --preset core -LE slow -j $(JOBS)
	@$(bin)/python -m pytest -q -m "not slow"

test-full: $(package_ready)  ## all tests, also the slow ones and those under sanitizers
	@$(quiet) build/ctest.log --show 'tests passed|Total Test time' ctest --preset core -j $(JOBS)
	@$(quiet) build/sanitize.log cmake --preset sanitize
	@$(quiet) build/sanitize.log cmake --build --preset sanitize
	@$(quiet) build/sanitize_ctest.log --show 'tests passed|Total Test time' ctest --preset sanitize -j $(JOBS)
	@$(bin)/python -m pytest -q

test-torch-core: $(package_ready)  ## what must hold on every torch; use with TORCH=
	@$(bin)/python -m pytest -q -m "torch_core and not slow"

gpu-check:  ## what a GPU makes of it: kernels, sanitizers, training; results in build/gpu/gpu.json
	@$(PYTHON) tools/gpu_check.py kernels
	@$(PYTHON) tools/gpu_check.py hook

bench: $(core_ready)  ## kernels of every codec, against what memory allows
	@build/core/benchmarks/codec_bench

sass: $(venv_ready)  ## instructions, registers and occupancy of every CUDA kernel; needs nvcc, no GPU
	@$(bin)/python tools/count_sass.py

# --- lint ------------------------------------------------------------------------------------------
cpp_files := $(shell find include kernels measure hooks python_bindings benchmarks \
    tests/cpp tests/simt tests/cuda tests/streams \
    '(' -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' ')' 2>/dev/null)
cpp_headers := $(filter %.h,$(cpp_files))
torch_sources := $(filter hooks/%.cpp python_bindings/%.cpp tests/streams/%.cpp,$(cpp_files))
core_sources := $(filter-out $(torch_sources),$(filter %.cpp,$(cpp_files)))
core_tidy := $(core_sources:%=build/lint/%.tidy)
torch_tidy := $(torch_sources:%=build/lint/%.tidy)

lint: $(package_ready) $(lint_ready)  ## formatting, static analysis, types, stubs, dependency laws
	@$(bin)/clang-format --dry-run --Werror $(cpp_files)
	@$(bin)/ruff check --quiet .
	@$(bin)/ruff format --check --quiet .
	@$(bin)/python tests/lint/check_includes.py
	@$(bin)/python tests/lint/check_imports.py
	@$(quiet) build/mypy.log --show Success $(bin)/mypy
	@$(quiet) build/stubtest.log --show Success $(bin)/python -m mypy.stubtest gradferry._native \
	    --mypy-config-file pyproject.toml --allowlist tests/lint/native_stub_allowlist.txt
	@$(MAKE) -s -k -j $(JOBS) $(torch_tidy) $(core_tidy)
	@echo "lint: all clean"

format: $(lint_ready)  ## rewrite what `make lint` would complain about
	@$(bin)/clang-format -i $(cpp_files)
	@$(bin)/ruff check --quiet --fix .
	@$(bin)/ruff format --quiet .

# One stamp per source; a header of ours that changes is looked at again through every source.
$(core_tidy): database = build/core
$(torch_tidy): database = $(lastword $(wildcard $(package_build)/*))
$(torch_tidy): | $(package_ready)
build/lint/%.tidy: % .clang-tidy $(cpp_headers) | $(core_ready) $(lint_ready)
	@$(quiet) build/lint/$*.log $(bin)/clang-tidy -p $(database) --quiet \
	    --extra-arg=-Wno-unknown-warning-option $<
	@touch $@

# --- set-up ----------------------------------------------------------------------------------------
$(system_ready): tools/system_packages.sh
	@$(quiet) build/system_packages.log $< $(PYTHON)
	@touch $@

$(venv_ready): requirements/build.txt requirements/run.txt requirements/test.txt | $(system_ready)
	@echo "$(venv): torch $(TORCH) and what the tests need (minutes, the first time)"
	@test -x $(bin)/python || $(PYTHON) -m venv $(venv)
	@$(quiet) build/pip_$(TORCH).log $(bin)/python -m pip install --disable-pip-version-check \
	    torch==$(TORCH) $(^:%=-r %)
	@touch $@

$(lint_ready): requirements/lint.txt | $(venv_ready)
	@$(quiet) build/pip_lint.log $(bin)/python -m pip install --disable-pip-version-check -r $<
	@touch $@

$(core_ready): $(core_inputs) | $(system_ready)
	@echo "build/core: kernels and C++ tests"
	@$(quiet) build/core.log cmake --preset core
	@$(quiet) build/core.log cmake --build --preset core
	@$(quiet) build/core_install.log cmake --install build/core
	@touch $@

$(package_ready): $(package_inputs) $(core_ready) $(venv_ready)
	@echo "$(package_build): hooks and bindings"
	@$(quiet) build/package_$(TORCH).log $(bin)/python -m pip install --disable-pip-version-check \
	    --no-build-isolation --no-deps -v \
	    --config-settings=build-dir='$(package_build)/{wheel_tag}' \
	    --config-settings=cmake.define.GRADFERRY_PREBUILT_KERNELS=$(CURDIR)/build/core/install \
	    --config-settings=cmake.define.GRADFERRY_WERROR=ON \
	    --config-settings=cmake.define.GRADFERRY_TESTS=ON \
	    --config-settings=install.components='python;tests' .
	@touch $@

clean:  ## remove what was built, keep the environments
	@rm -rf build demo_results .mypy_cache .pytest_cache .ruff_cache .hypothesis

distclean: clean  ## remove the environments too
	@rm -rf .venv*
