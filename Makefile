# Thin wrapper: CMake and pip do the work. `make help` lists the targets.
#
#   TORCH=2.11.0       which torch to build and test with; each has its own environment
#   PYTHON=python3.12  which Python makes that environment (3.10 to 3.13)
#   JOBS=4             how many compilers or tests run at once
#   WORLDS=1000000     how many worlds `make sim` plays, from number FIRST=0 on; on real threads it is
#                      THREAD_WORLDS=300
#   FUZZ_SECONDS=600   how long `make fuzz` runs each target
#
# `make wheel` builds in build/release, whose kernels every torch and Python share, and in build/wheel.
# Environments are .venv, .venv-torch<version>, .venv-docs and, for trainers, .venv-hosts; all else
# goes to build/: build/core holds kernels and C++ tests and is shared by every torch,
# build/torch-<version> holds hooks and bindings.
# `make demo` on a fresh clone builds, in the same folders, the package for the CPU alone; what tests
# need on top comes with `make setup` or `make test`, which compile nothing of that a second time.
# Stamp files remember what is done; long output goes to build/*.log.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
JOBS ?= $(shell nproc)
WORLDS ?= 20000
THREAD_WORLDS ?= 300
FIRST ?= 0
FUZZ_SECONDS ?= 60
# The newest supported torch; Python 3.10 has none after 2.14.
newest_torch := $(or $(shell $(PYTHON) -c 'import sys; print("2.15.0" if sys.version_info >= (3, 11) else "2.14.1")' 2>/dev/null),2.15.0)
TORCH ?= $(newest_torch)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# Kernels for the GPUs of this machine; where it has none, PTX alone: machine code takes minutes for
# each kind. What pip installs without this file has three (cmake/enable_cuda.cmake).
ifndef CUDAARCHS
export CUDAARCHS := $(if $(shell nvidia-smi -L 2>/dev/null),native,90-virtual)
endif

venv := $(if $(filter $(newest_torch),$(TORCH)),.venv,.venv-torch$(TORCH))
bin := $(venv)/bin
package_build := build/torch-$(TORCH)
quiet := tools/quiet.sh

# What is compiled of folders that also hold tests in Python.
cpp_of = $(shell find $(1) -type f -not -name '*.py' -not -path '*/__pycache__/*')
# Folders are listed too: theirs is the timestamp that changes when a file goes away.
core_inputs := $(shell find CMakeLists.txt CMakePresets.json cmake include kernels benchmarks/CMakeLists.txt benchmarks/*.cpp benchmarks/*.h \
    hooks/protocol 2>/dev/null) \
    $(call cpp_of,tests/kernels tests/engine tests/fuzz)
package_inputs := $(shell find pyproject.toml README.md CMakeLists.txt cmake include hooks python_bindings benchmarks/gradferry_lab \
    examples/cpp kernels/common \
    -not -name __pycache__ -not -name '*.pyc' 2>/dev/null) \
    $(call cpp_of,tests/engine tests/faults tests/reducer) tests/kernels/host_library.h tests/kernels/host_library.cpp tests/kernels/numbers.h

kernel_inputs := $(shell find CMakeLists.txt CMakePresets.json cmake include kernels 2>/dev/null)

compilers_ready := build/.compilers
system_ready := build/.system_packages
fuzzer_ready := build/.fuzzer
valgrind_ready := build/.valgrind
kernels_ready := build/core/.kernels
release_ready := build/release/.installed
core_ready := build/core/.installed
venv_ready := $(venv)/.torch-$(TORCH)
tests_ready := $(venv)/.tests
package_ready := $(venv)/.gradferry
lint_ready := $(venv)/.lint
docs_ready := .venv-docs/.docs
# Trainers bring thirty packages, none of which may become necessary unnoticed.
hosts := $(venv)-hosts
hosts_ready := $(hosts)/.hosts
# Where everything is installed already, the demo uses and renews that.
demo_ready := $(if $(wildcard $(package_ready)),$(package_ready),$(venv)/.gradferry-demo)

# The shell looks for the folder, named after Python and machine: make would look before it is built.
simulate = $(package_build)/*/tests/faults/sim/gradferry_sim --worlds $(WORLDS) --first $(FIRST) --jobs $(JOBS)
# Likewise: the C++ tests that need torch.
test_hooks = $(quiet) build/ctest_hooks.log --show 'tests passed|Total Test time' \
    ctest --test-dir $(package_build)/* --output-on-failure --no-tests=error -j $(JOBS)

# A file's tests stay together: they share fixtures. Beyond four, worlds of processes need much memory.
pytest = $(bin)/python -m pytest -q -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Brings stamps up to date, two at a time: torch is on its way while kernels are compiled. Goals
# given together come one after the other, so that no two of these run at once.
prepare = @+$(MAKE) -s -j2
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif

.PHONY: help setup demo wheel sdist test test-full test-slow test-hosts test-sanitized test-torch-core sim sim-threads soak fuzz lint format docs bench gpu-check sass clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## the environment, with gradferry and all that tests need built and installed
	$(prepare) $(package_ready)
	@echo "gradferry is installed in $(venv) for torch $(TORCH)"

demo:  ## two ranks on this machine: what compression changes, with a picture
	@test -e $(demo_ready) || echo "Set-up: about 4 minutes on two cores, once; then 2 of training. Details are in build/*.log."
	$(prepare) $(demo_ready)
	@$(bin)/gradferry demo

# Its tag promises this machine's glibc or a newer one: what the compiler took from it may be new.
wheel: version = $$($(1) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
wheel: python = $(call version,$(bin)/python)
wheel: glibc = $$(getconf GNU_LIBC_VERSION | sed 's/glibc //; s/[.]/_/')
wheel:  ## dist/gradferry-*.whl for TORCH= and PYTHON=, with kernels for every processor and every GPU
	$(prepare) $(release_ready) $(venv_ready)
	@[[ $(python) == $(call version,$(PYTHON)) ]] || \
	    { echo "$(venv) has another Python than $(PYTHON); add venv=.venv-$(notdir $(PYTHON))" >&2; exit 2; }
	@$(quiet) build/wheel_$(TORCH).log --show 'Prebuilt kernels|Created wheel' \
	    --title "dist: a wheel for torch $(TORCH) (usually 3 min)" \
	    $(bin)/python -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps -v \
	    --config-settings=build-dir='build/wheel/torch-$(TORCH)/{wheel_tag}' \
	    --config-settings=cmake.define.GRADFERRY_PREBUILT_KERNELS=$(CURDIR)/build/release/install \
	    --config-settings=cmake.define.GRADFERRY_WERROR=ON \
	    --config-settings=wheel.tags="$(python)-$(python)-manylinux_$(glibc)_$$(uname -m)" \
	    --wheel-dir dist .

sdist: $(venv_ready)  ## dist/gradferry-*.tar.gz, with all that is not built
	@$(bin)/python -c 'from scikit_build_core.build import build_sdist as build; build("dist")'

test:  ## all fast tests
	$(prepare) $(package_ready)
	@$(simulate)
	@$(quiet) build/ctest.log --show 'tests passed|Total Test time' ctest --preset core -LE slow -j $(JOBS)
	@$(test_hooks) -LE slow
	@$(pytest) -m "not slow"

test-full: test test-slow  ## all tests

# What the machine for PTX says at the end of a run, and ctest of all.
ptx_lines = launches,|tests passed

# Beside `make test`, which it does not run again.
test-slow: $(valgrind_ready)  ## what `make test` leaves out: slow tests, sanitizers, trainers, kernels for every GPU
	$(prepare) $(package_ready)
	@$(quiet) build/ctest_slow.log --show '$(ptx_lines)|Total Test time' ctest --preset core -L slow -V -j $(JOBS)
	@$(test_hooks) -L slow
	@$(pytest) -m slow
	@$(MAKE) -s test-hosts
	@$(MAKE) -s test-sanitized
	@$(MAKE) -s sim-threads
	@$(MAKE) -s fuzz FUZZ_SECONDS=20
	@rm -f $(torch_tidy)
	@$(MAKE) lint UNITY=OFF
	@$(quiet) build/all_gpus.log env -u CUDAARCHS cmake -S . -B build/all_gpus -G Ninja \
	    -DCMAKE_BUILD_TYPE=Release -DGRADFERRY_WERROR=ON -DGRADFERRY_TESTS=ON
	@$(quiet) build/all_gpus.log --show 'Built target|Linking' env -u CUDAARCHS cmake --build build/all_gpus
	@$(quiet) build/all_gpus.log --show '$(ptx_lines)' ctest --test-dir build/all_gpus --no-tests=error -R '^(cuda_ptx|ptx)_' -V -j $(JOBS)

test-hosts:  ## gradferry in accelerate, Lightning, transformers, Ray and torchft
	$(prepare) $(package_ready) $(hosts_ready)
	@$(hosts)/bin/python -m pytest -q tests/hosts

# Loaded first, as the sanitizers demand; torch and Python leave memory at the end, so that leaks are
# not looked for. What is thrown needs the C++ library beside them.
preload = $(shell $(CXX) -print-file-name=libasan.so):$(shell $(CXX) -print-file-name=libstdc++.so)
sanitized_site := build/asan/site
sanitized_tests := $(patsubst %,tests/*/test_%.py,bad_input codec_bytes codec_payloads connecting damaged_states \
    elastic failing_ranks faults momentum node_memory nodes forged_messages reducer reducer_errors reduce_scatter all_gather \
    shared_memory)

test-sanitized: $(package_ready)  ## C++ tests and a part of the Python tests under ASan and UBSan
	@$(quiet) build/sanitize.log cmake --preset sanitize
	@$(quiet) build/sanitize.log --title "build/sanitize: kernels and C++ tests (usually 5 min)" \
	    cmake --build --preset sanitize
	@$(quiet) build/sanitize_ctest.log --show 'tests passed|Total Test time' ctest --preset sanitize -j $(JOBS)
	@$(quiet) build/sanitize_install.log cmake --install build/sanitize
	@$(quiet) build/asan.log cmake --preset asan -DPython_EXECUTABLE=$(abspath $(bin))/python
	@$(quiet) build/asan.log --title "build/asan: hooks and bindings (usually 3 min)" \
	    cmake --build --preset asan
	@rm -rf $(sanitized_site) && mkdir -p $(sanitized_site)
	@cp -r python_bindings/gradferry benchmarks/gradferry_lab $(sanitized_site)
	@$(quiet) build/asan_install.log cmake --install build/asan --component python --prefix $(sanitized_site)
	@env LD_PRELOAD=$(preload) ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(sanitized_site) \
	    $(bin)/python -m pytest -q -m "not slow" $(sanitized_tests)

test-torch-core:  ## what must hold on every torch; use with TORCH=
	$(prepare) $(package_ready)
	@$(test_hooks) -LE slow
	@$(pytest) -m "torch_core and not slow"

sim: $(package_ready)  ## worlds of engines in one thread, with faults: WORLDS= of them, from FIRST= on
	@$(simulate)

# A world that fails on real threads need not fail again, so none is made smaller.
sim-threads: $(package_ready)  ## the same worlds on real threads and sockets, under ThreadSanitizer
	@$(quiet) build/tsan.log cmake --preset tsan -DPython_EXECUTABLE=$(abspath $(bin))/python
	@$(quiet) build/tsan.log cmake --build --preset tsan
	@$(quiet) build/tsan_worlds.log --show 'all held' env OMP_NUM_THREADS=1 \
	    TSAN_OPTIONS=halt_on_error=1:suppressions=$(CURDIR)/tests/faults/sim/tsan_suppressions.txt \
	    build/tsan/tests/faults/sim/gradferry_threads --worlds $(THREAD_WORLDS) --first $(FIRST) \
	    --jobs $(JOBS) --tries 0

fuzz: $(fuzzer_ready)  ## fuzz targets with clang's libFuzzer, each for FUZZ_SECONDS=60
	@$(quiet) build/fuzz.log cmake --preset fuzz
	@$(quiet) build/fuzz.log --title "build/fuzz: kernels and fuzz targets (usually 3 min)" \
	    cmake --build --preset fuzz
	@tools/fuzz.sh build/fuzz $(FUZZ_SECONDS) $(JOBS)

soak: minutes := $(if $(HOURS)$(MINUTES),$(MINUTES),5)
soak:  ## random trainings, kills and restarts for HOURS=2 or MINUTES=5; figures in build/soak.json
	$(prepare) $(package_ready)
	@$(bin)/python tests/faults/soak.py $(HOURS:%=--hours %) $(minutes:%=--minutes %) \
	    $(SEED:%=--seed %) --json build/soak.json

gpu-check:  ## what a GPU makes of it: kernels, sanitizers, training; results in build/gpu/gpu.json
	@$(PYTHON) tools/gpu_check.py

docs: $(docs_ready)  ## the documentation as a site in build/site; a link that leads nowhere is an error
	@$(quiet) build/docs.log env NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "build/site/index.html"

bench: $(core_ready)  ## kernels of every codec, against what memory allows
	@build/core/benchmarks/codec_bench

sass: $(package_ready)  ## instructions, registers and occupancy of every CUDA kernel; needs nvcc, no GPU
	@$(bin)/python tools/count_sass.py

# --- lint ------------------------------------------------------------------------------------------
cpp_files := $(shell find include kernels hooks python_bindings benchmarks \
    tests examples/cpp \
    '(' -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' ')' 2>/dev/null)
cpp_headers := $(filter %.h,$(cpp_files))
torch_rooms := hooks python_bindings tests/reducer tests/faults/sim tests/engine/streams examples/cpp
torch_sources := $(filter $(torch_rooms:%=%/%.cpp),$(cpp_files))
core_sources := $(filter-out $(torch_sources),$(filter %.cpp,$(cpp_files)))
core_tidy := $(core_sources:%=build/lint/%.tidy)
torch_tidy := build/lint/torch-$(TORCH).tidy
UNITY ?= ON

lint: $(package_ready) $(lint_ready)  ## formatting, static analysis, types, stubs, dependency laws, words
	@$(bin)/clang-format --dry-run --Werror $(cpp_files)
	@$(bin)/ruff check --quiet .
	@$(bin)/ruff format --check --quiet .
	@$(bin)/python tests/lint/check_includes.py
	@$(quiet) build/imports.log --show 'Contracts: ' env PYTHONPATH=python_bindings:benchmarks $(bin)/lint-imports --no-cache
	@$(bin)/python tests/lint/check_words.py
	@$(quiet) build/mypy.log --show Success $(bin)/mypy
	@$(quiet) build/stubtest.log --show Success $(bin)/python -m mypy.stubtest gradferry._native \
	    --mypy-config-file pyproject.toml --allowlist tests/lint/native_stub_allowlist.txt
	@$(MAKE) -s -k -j $(JOBS) $(torch_tidy) $(core_tidy)
	@echo "lint: all clean"

format: $(lint_ready)  ## rewrite what `make lint` would complain about
	@$(bin)/clang-format -i $(cpp_files)
	@$(bin)/ruff check --quiet --fix .
	@$(bin)/ruff format --quiet .

# One stamp per source, or one for all that include torch; a header of ours that changes is looked at
# again through every source. UNITY=OFF has the latter checked one by one, not target by target.
build/lint/%.tidy: % .clang-tidy $(cpp_headers) | $(core_ready) $(lint_ready)
	@$(quiet) build/lint/$*.log $(bin)/clang-tidy -p build/core --quiet \
	    --extra-arg=-Wno-unknown-warning-option $<
	@touch $@

$(torch_tidy): CMakePresets.json .clang-tidy $(torch_sources) $(cpp_headers) | $(package_ready) $(lint_ready)
	@$(quiet) $(@:.tidy=.log) cmake --preset tidy -DPython_EXECUTABLE=$(abspath $(bin))/python \
	    -DCMAKE_UNITY_BUILD=$(UNITY)
	@$(quiet) $(@:.tidy=.log) $(bin)/run-clang-tidy.py -p build/tidy -quiet -j $(JOBS) \
	    -clang-tidy-binary $(bin)/clang-tidy -extra-arg=-Wno-unknown-warning-option \
	    -checks=-bugprone-suspicious-include
	@touch $@

# --- set-up ----------------------------------------------------------------------------------------
# How long a step usually takes is for two cores and 100 MB/s, the first time.
$(compilers_ready): tools/system_packages.sh
	@$(quiet) build/compilers.log $< $(PYTHON) package
	@touch $@

$(system_ready): tools/system_packages.sh | $(compilers_ready)
	@$(quiet) build/system_packages.log $< $(PYTHON) tests
	@touch $@

$(fuzzer_ready): tools/system_packages.sh | $(compilers_ready)
	@$(quiet) build/fuzzer.log $< $(PYTHON) fuzz
	@touch $@

$(valgrind_ready): tools/system_packages.sh | $(compilers_ready)
	@$(quiet) build/valgrind.log $< $(PYTHON) valgrind
	@touch $@

$(venv_ready): requirements/build.txt requirements/run.txt | $(compilers_ready)
	@$(quiet) build/pip_$(TORCH).log --title "$(venv): torch $(TORCH), 3 GB (usually 2 min)" \
	    bash -ec 'test -x $(bin)/python || $(PYTHON) -m venv $(venv); \
	    $(bin)/python -m pip install --disable-pip-version-check --progress-bar off \
	    torch==$(TORCH) $(^:%=-r %)'
	@touch $@

$(tests_ready): requirements/test.txt | $(venv_ready)
	@$(quiet) build/pip_tests.log --title "$(venv): what tests need" \
	    $(bin)/python -m pip install --disable-pip-version-check --progress-bar off -r $<
	@touch $@

# An environment on top of the other: it has torch and gradferry from there, and what trainers need
# changes nothing there.
$(hosts_ready): requirements/hosts.txt | $(tests_ready)
	@$(quiet) build/pip_hosts.log --title "$(hosts): trainers" bash -ec '$(PYTHON) -m venv $(hosts); \
	    below=$$($(bin)/python -c "import sysconfig; print(sysconfig.get_path(\"purelib\"))"); \
	    above=$$($(hosts)/bin/python -c "import sysconfig; print(sysconfig.get_path(\"purelib\"))"); \
	    echo "import site; site.addsitedir(\"$$below\")" > $$above/below.pth; \
	    $(hosts)/bin/python -m pip install --disable-pip-version-check --progress-bar off \
	    -r $< -c requirements/run.txt -c requirements/test.txt'
	@touch $@

$(lint_ready): requirements/lint.txt | $(tests_ready)
	@$(quiet) build/pip_lint.log $(bin)/python -m pip install --disable-pip-version-check -r $<
	@touch $@

# Sources are read, not imported: no torch.
$(docs_ready): requirements/docs.txt
	@$(quiet) build/pip_docs.log bash -ec 'test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs; \
	    .venv-docs/bin/python -m pip install --disable-pip-version-check --progress-bar off -r $<'
	@touch $@

$(kernels_ready): $(kernel_inputs) | $(compilers_ready)
	@rm -f $(core_ready)  # what stands there is without tests from now on
	@$(quiet) build/core.log cmake --preset demo
	@$(quiet) build/core.log --title "build/core: kernels (usually 1 min)" \
	    cmake --build --preset demo
	@$(quiet) build/core_install.log cmake --install build/core
	@touch $@

$(release_ready): $(kernel_inputs) | $(compilers_ready)
	@$(quiet) build/release.log cmake --preset release
	@$(quiet) build/release.log \
	    --title "build/release: kernels for every processor and GPU (usually 1 min, with nvcc 30)" \
	    cmake --build --preset release
	@$(quiet) build/release_install.log cmake --install build/release
	@touch $@

$(core_ready): $(core_inputs) | $(system_ready)
	@$(quiet) build/core.log cmake --preset core
	@$(quiet) build/core.log --title "build/core: kernels and C++ tests (usually 8 min)" \
	    cmake --build --preset core
	@$(quiet) build/core_install.log cmake --install build/core
	@touch $@

# $(1): ON with what tests load beside the package, else OFF.
define install_package
	@$(quiet) build/package_$(TORCH).log \
	    --title "$(package_build): hooks and bindings (usually 2 min, with tests 5)" \
	    $(bin)/python -m pip install --disable-pip-version-check \
	    --no-build-isolation --no-deps -v \
	    --config-settings=build-dir='$(package_build)/{wheel_tag}' \
	    --config-settings=cmake.define.GRADFERRY_PREBUILT_KERNELS=$(CURDIR)/build/core/install \
	    --config-settings=cmake.define.GRADFERRY_WERROR=ON \
	    --config-settings=cmake.define.GRADFERRY_TESTS=$(1) \
	    --config-settings=install.components='python$(if $(filter ON,$(1)),;tests)' .
	@touch $@
endef

$(venv)/.gradferry-demo: $(package_inputs) $(kernels_ready) $(venv_ready)
	$(call install_package,OFF)

$(package_ready): $(package_inputs) $(core_ready) $(venv_ready) | $(tests_ready)
	$(call install_package,ON)

clean:  ## remove what was built, keep the environments
	@rm -rf build dist demo_results .mypy_cache .pytest_cache .ruff_cache .hypothesis

distclean: clean  ## remove the environments too
	@rm -rf .venv*
